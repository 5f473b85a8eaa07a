"""Odd answers of an engine in other languages: all that the engine said reaches the agent, or the answer is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from google import genai
from google.genai import types

from tests.on_loop import Service
from tests.recorder.broken import BrokenEngine, breaking, chunk, completion, streamed, whole
from tests.recorder.engine import END
from tests.recorder.recorders import Recorder, end, start

DONE = b"data: [DONE]\n\n"
PATHS = {
    "messages": "v1/messages",
    "responses": "v1/responses",
    "contents": "v1beta/models/toy:generateContent",
}
CALLS: dict[str, Any] = {
    "messages": {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "toy", "input": "hi"},
    "contents": {"contents": [{"parts": [{"text": "hi"}]}]},
}
LANGUAGES = pytest.mark.parametrize("language", PATHS)


@pytest.fixture(scope="module")
def broken() -> Iterator[BrokenEngine]:
    with breaking() as engine:
        yield engine


@pytest.fixture(scope="module")
def recorder(broken: BrokenEngine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("odd")
    running = start(directory / "log", broken.url, service.grpc_address, "--journal", str(directory / "journal"))
    yield running
    end(running)
    assert "Traceback" not in running.log.read_text()


def ask(recorder: Recorder, run: str, language: str, *, stream: bool = False) -> str:
    """The answer as the agent gets it."""
    path, document = PATHS[language], CALLS[language]
    if stream and language == "contents":
        path = path.replace("generate", "streamGenerate")
    elif stream:
        document = {**document, "stream": True}
    return httpx.post(f"{recorder.base(run)}/{path}", json=document, trust_env=False).text


def call(name: str | None, arguments: str, index: int | None = 0) -> dict[str, Any]:
    """A call of a tool, or a part of one: without a name it goes on."""
    more = {} if name is None else {"id": f"id-{name}", "type": "function"}
    function = {"arguments": arguments, **({} if name is None else {"name": name})}
    return {**more, "function": function, **({} if index is None else {"index": index})}


def message(**more: Any) -> bytes:
    return whole(completion(message={"role": "assistant", "content": None, **more}))


def deltas(*parts: dict[str, Any], finish: str = "tool_calls", stop: Any = None) -> bytes:
    """A stream of these deltas, with a token of each."""
    chunks = [chunk("", [104]) for _ in parts]
    for each, part in zip(chunks, parts, strict=True):
        each["choices"][0]["delta"] = part
    last = chunk("", [END], finish)
    last["choices"][0]["stop_reason"] = stop
    return streamed(chunk(prompt_token_ids=[1, 2]), *chunks, last, DONE)


def test_spaces_within_a_call_follow_it_as_in_vllm(recorder: Recorder, broken: BrokenEngine, run: str) -> None:
    parts: list[Any] = [
        {"tool_calls": [call("look", '{"at"')]},
        {"content": "\n\n"},
        {"tool_calls": [call(None, ": 1}")]},
    ]
    broken.answer = deltas(*parts)
    with anthropic.Anthropic(base_url=recorder.base(run), api_key="key", max_retries=0) as client:
        asked = CALLS["messages"]
        with client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    (look, spaces) = answer.content
    assert look.type == "tool_use"
    assert spaces.type == "text"
    assert (look.name, look.input, spaces.text, answer.stop_reason) == ("look", {"at": 1}, "\n\n", "tool_use")
    with recorder.openai(run) as other, other.responses.stream(model="toy", input="hi") as responded:
        (item, _) = responded.get_final_response().output
    assert item.type == "function_call"
    assert item.arguments == '{"at": 1}'
    client_of = genai.Client(api_key="key", http_options=types.HttpOptions(base_url=recorder.base(run)))
    chunks = [*client_of.models.generate_content_stream(model="toy", contents="hi")]
    client_of.close()
    (called,) = [each for one in chunks for each in one.function_calls or ()]
    assert (called.name, called.args) == ("look", {"at": 1})


@LANGUAGES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        {"tool_calls": [call(None, "{}")]},
        {"content": [{"type": "text", "text": "hi"}]},
        {"audio": {"id": "a", "data": "YWJj"}},
        {"function_call": {"name": "look", "arguments": "{}"}},
    ],
    ids=["a call without a name", "a list", "audio", "a call of old"],
)
def test_what_cannot_be_translated_is_refused(
    recorder: Recorder, broken: BrokenEngine, run: str, language: str, stream: bool, answer: dict[str, Any]
) -> None:
    broken.answer = deltas(answer) if stream else message(**answer)
    assert "gristmill_NotRecorded" in ask(recorder, run, language, stream=stream)


@LANGUAGES
@pytest.mark.parametrize(
    "parts",
    [
        [call("look", "{}", None)],
        [call("look", "{"), call("see", "{}", 1), call(None, "}")],
    ],
    ids=["a call without an index", "a call that goes on after another"],
)
def test_a_stream_whose_calls_cannot_be_told_apart_is_refused(
    recorder: Recorder, broken: BrokenEngine, run: str, language: str, parts: list[Any]
) -> None:
    broken.answer = deltas(*({"tool_calls": [part]} for part in parts))
    assert "gristmill_NotRecorded" in ask(recorder, run, language, stream=True)


@LANGUAGES
def test_a_stream_with_more_choices_than_the_one_is_refused(
    recorder: Recorder, broken: BrokenEngine, run: str, language: str
) -> None:
    other = chunk("other", [105], "stop")
    other["choices"][0]["index"] = 1
    broken.answer = streamed(chunk(prompt_token_ids=[1, 2]), chunk("h", [104]), other, chunk("", [END], "stop"), DONE)
    assert "gristmill_NotRecorded" in ask(recorder, run, language, stream=True)


@LANGUAGES
def test_parts_of_a_choice_in_one_chunk_and_an_end_without_a_mark_are_read(
    recorder: Recorder, broken: BrokenEngine, run: str, language: str
) -> None:
    both = chunk("good ", [104])
    both["choices"] += chunk("day", [105])["choices"]
    broken.answer = streamed(chunk(prompt_token_ids=[1, 2]), both, chunk("", [END], "stop"))
    answer = ask(recorder, run, language, stream=True)
    assert ("good " in answer, "day" in answer) == (True, True)
    ends = {"messages": ("stop_reason", "end_turn"), "responses": ("status", "completed")}
    name, end_of_answer = ends.get(language, ("finishReason", "STOP"))
    assert last_value(answer, name) == end_of_answer


@LANGUAGES
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_text(recorder: Recorder, broken: BrokenEngine, run: str, language: str, stream: bool) -> None:
    broken.answer = deltas({"refusal": "Never."}, finish="stop") if stream else message(refusal="Never.")
    assert "Never." in ask(recorder, run, language, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "stop", "arguments", "reasons"),
    [
        ("stop", None, "{}", ("tool_use", "completed", "STOP")),
        ("stop", "!", "{}", ("tool_use", "completed", "STOP")),
        ("stop", "!", "", ("stop_sequence", "completed", "STOP")),
        ("stop", "!", '{"a', ("stop_sequence", "completed", "STOP")),
        ("length", None, "{}", ("max_tokens", "incomplete", "MAX_TOKENS")),
        ("content_filter", None, "{}", ("refusal", "incomplete", "SAFETY")),
        ("abort", None, "{}", (None, "incomplete", "OTHER")),
    ],
)
def test_the_end_of_an_answer_is_named_as_it_was(
    recorder: Recorder,
    broken: BrokenEngine,
    run: str,
    stream: bool,
    finish: str,
    stop: Any,
    arguments: str,
    reasons: tuple[Any, ...],
) -> None:
    """vLLM ends a call of a tool that the agent chose with `stop`."""
    calls = {"tool_calls": [call("look", arguments)]}
    more = {"finish_reason": finish, "stop_reason": stop}
    said = {"role": "assistant", "content": None, **calls}
    broken.answer = deltas(calls, finish=finish, stop=stop) if stream else whole(completion(message=said, **more))
    names = zip(PATHS, ("stop_reason", "status", "finishReason"), strict=True)
    answers = [(ask(recorder, run, language, stream=stream), name) for language, name in names]
    assert tuple(last_value(answer, name) for answer, name in answers) == reasons


def last_value(answer: str, name: str) -> Any:
    """The last value of a field in an answer, or in the events of a stream; of a response its own."""
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    named = [each for event in events or [answer] for each in values(json.loads(event), name)]
    return named[0] if name == "status" and not events else named[-1]


def values(document: Any, name: str) -> Iterator[Any]:
    if isinstance(document, dict):
        if name in document:
            yield document[name]
        for key, value in document.items():
            if key != "output":
                yield from values(value, name)
    elif isinstance(document, list):
        for value in document:
            yield from values(value, name)
