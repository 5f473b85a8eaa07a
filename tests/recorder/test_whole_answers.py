"""With --whole-answers the engine answers whole, and the recorder streams: some parsers misread streamed thoughts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from gristmill_recorder.engines.vllm import VLLM
from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.language import Asking
from gristmill_recorder.languages.whole import streamed
from tests.on_loop import Service
from tests.recorder.broken import completion
from tests.recorder.engine import END, Engine, Words, answer_of, logprobs_for, prompt_of
from tests.recorder.recorders import Recorder, end, post, start, trained
from tests.recorder.test_chat import ask, user


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def asked(request: pytest.FixtureRequest) -> Engine:
    """The engine that is asked for whole answers."""
    engine: Engine = request.getfixturevalue("engine" if request.param == "vllm" else "sglang")
    return engine


@pytest.fixture(scope="module")
def whole(asked: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("whole")
    flags = ("--journal", str(directory / "journal"), "--whole-answers", "--engine")
    engine = "sglang" if asked.is_sglang else "vllm"
    running = start(directory / "log", asked.url, service.grpc_address, *flags, engine)
    yield running
    end(running)


def collected(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    """A streamed answer as the library puts it together."""
    with client.chat.completions.stream(model="toy", messages=messages, **more) as events:
        return events.get_final_completion()


@pytest.mark.parametrize("script", ["think hm; done", 'call look {"at" :"clock"}', "say ok"])
def test_a_streamed_answer_is_the_whole_one(whole: Recorder, asked: Engine, run: str, script: str) -> None:
    with whole.openai(run) as client:
        options: Any = {"stream_options": {"include_usage": True}, "logprobs": True}
        parts = collected(client, [user(script)], **options)
        assert "stream" not in asked.requests[-1]
        assert "stream_options" not in asked.requests[-1]
        answered = ask(client, [user(script)], logprobs=True)
    assert parts.choices[0].finish_reason == answered.choices[0].finish_reason
    assert parts.choices[0].logprobs.content == answered.choices[0].logprobs.content
    assert parts.usage.completion_tokens == answered.usage.completion_tokens
    one, other = (each.choices[0].message.model_dump(exclude_none=True) for each in (parts, answered))
    for message in (one, other):
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    assert {name: value for name, value in one.items() if value} == {n: value for n, value in other.items() if value}


def test_its_tokens_are_recorded_and_not_seen_by_the_agent(whole: Recorder, service: Service, run: str) -> None:
    messages = [user("think hm; done")]
    with whole.openai(run) as client:
        chunks = list(ask(client, messages, stream=True))
    seen = {name for chunk in chunks for part in (chunk, *chunk.choices) for name in part.model_dump(exclude_none=True)}
    assert seen.isdisjoint(("token_ids", "prompt_token_ids", "sglext", "response_token_ids", "usage"))
    whole.finish(run)
    (row,) = trained(service.grpc_address, run)
    answer = answer_of(Words("hm", "done"))
    assert row.tokens == [*prompt_of(messages), *answer]
    assert row.logprobs == logprobs_for(len(answer))


def test_several_choices_are_streamed_one_after_the_other(whole: Recorder, run: str) -> None:
    with whole.openai(run) as client:
        choices = collected(client, [user("think a; b")], n=2).choices
    assert [choice.message.content for choice in choices] == ["b", "b #1"]


def test_messages_responses_and_contents_are_streamed_too(
    whole: Recorder, asked: Engine, service: Service, run: str
) -> None:
    messages: Any = [user("think hm; done")]
    with (
        anthropic.Anthropic(base_url=whole.base(run), api_key="key", max_retries=0) as client,
        client.messages.stream(model="toy", max_tokens=9, messages=messages) as events,
    ):
        message = events.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.usage.input_tokens == len(prompt_of(messages))
    with whole.openai(run) as openais:
        *_, last = openais.responses.create(model="toy", input="think hm; done", stream=True)
    assert [item.type for item in last.response.output] == ["reasoning", "message"]  # type: ignore[union-attr]
    contents = {"contents": [{"role": "user", "parts": [{"text": "say hi"}]}]}
    url = f"{whole.base(run)}/v1beta/models/toy:streamGenerateContent"
    body = urllib.request.Request(f"{url}?alt=sse", str(contents).replace("'", '"').encode())
    with urllib.request.urlopen(body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert b'"text":"hi"' in answer.read()
    assert all("stream" not in request for request in asked.requests[-3:])
    assert whole.finish(run)["steps"] == 3


def test_an_error_and_a_completion_are_the_engines_own(whole: Recorder, asked: Engine, run: str) -> None:
    body = {"model": "toy", "messages": [user("fail 503")], "stream": True}
    assert post(f"{whole.base(run)}/v1/chat/completions", body)[0] == 503
    # Completions have no thoughts.
    with whole.openai(run) as client:
        text = "".join(
            each.choices[0].text for each in client.completions.create(model="toy", prompt="say hi", stream=True)
        )
    assert (text, asked.requests[-1]["stream"]) == ("hi", True)
    assert answer_of(Words(text="hi"))[-1] == END


def test_all_that_a_message_says_is_streamed() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": "Never.",
        "audio": {"id": "a"},
        "annotations": [],
    }
    form = ChatForm("chat/completions", {"messages": []}, Asking(VLLM, logprobs=False))
    body = streamed(form.stream(), completion(message=message), {})
    (chunk, _) = body.split(b"\n\n", 1)
    delta = json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"]
    assert delta == {"role": "assistant", "refusal": "Never.", "audio": {"id": "a"}}
