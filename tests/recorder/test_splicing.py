"""A recorder that splices: the engine reads the recorded tokens and what is new, so that a conversation is one row."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pytest

from gristmill_recorder.engines.vllm import VLLM
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.splicing.bridge import WORDS
from gristmill_recorder.splicing.splicer import CHAT, Splicer
from tests.on_loop import Service
from tests.recorder.engine import END, Engine, Words, answer_of, prompt_of, serving, tokens_of, turn
from tests.recorder.recorders import Recorder, StartRecorder, end, post, start, trained
from tests.recorder.test_chat import ask, user

BEGIN_ANSWER = prompt_of([])


@pytest.fixture(scope="module")
def vllm() -> Iterator[Engine]:
    with serving(Engine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def splicer(vllm: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("splicer")
    flags = ("--journal", str(directory / "journal.sqlite3"), "--splice", "on")
    running = start(directory / "log", vllm.url, service.grpc_address, *flags)
    yield running
    end(running)


@pytest.fixture(autouse=True)
def _as_started(vllm: Engine) -> Iterator[None]:
    yield
    vllm.takes_tokens, vllm.has_render, vllm.template = True, False, prompt_of
    vllm.renders_after_s = 0.0


def sent_back(message: Any) -> Any:
    """An answer as many agents put it into their history: without thoughts, with arguments in their own spelling."""
    calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or ()]
    for call in calls:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return {"role": "assistant", "content": message.content or "", **({"tool_calls": calls} if calls else {})}


def result(text: str) -> Any:
    return {"role": "tool", "tool_call_id": "call-1", "content": text}


def converse(recorder: Recorder, run: str, *new: Any, history: list[Any] | None = None, **more: Any) -> list[Any]:
    """Asks with one new message after the other, and returns the whole conversation."""
    messages = list(history or ())
    with recorder.openai(run) as client:
        for message in new:
            messages.append(message)
            messages.append(sent_back(ask(client, messages, **more).choices[0].message))
    return messages


class Results:
    """What the recorder counted since this was made."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        names = ("start", "spliced", "verified", "history", "settings", "fields", "rendering", "end", "ignored")
        return {name: self._recorder.metric(f'splices_total{{result="{name}"}}') for name in names}

    def counted(self) -> dict[str, float]:
        counts = {name: count - self._before[name] for name, count in self._now().items()}
        return {name: count for name, count in counts.items() if count}


SCRIPT = (user("think hm; done"), user('call look {"at" :"clock"}'), result("short it is no"), user("say noon"))
ANSWERS = (
    Words("hm", "done"),
    Words(tool=("look", '{"at" :"clock"}')),
    Words(text="it is no", is_cut=True),
    Words(text="noon"),
)
ROLES = ("user", "user", "tool", "user")


def row_of(count: int) -> list[int]:
    """The tokens of the first `count` turns of SCRIPT in one row: each answer as sampled, each message as rendered."""
    row: list[int] = []
    for role, message, words in list(zip(ROLES, SCRIPT, ANSWERS, strict=True))[:count]:
        row += [*turn(role, message["content"]), *BEGIN_ANSWER, *answer_of(words)]
        row += tokens_of("\n") if row[-1] == END else [END, *tokens_of("\n")]
    return row[:-1]


@pytest.mark.parametrize("has_render", [False, True])
def test_a_conversation_is_one_row_whatever_the_agent_sends_back(
    splicer: Recorder, vllm: Engine, service: Service, run: str, has_render: bool
) -> None:
    vllm.has_render = has_render
    results = Results(splicer)
    converse(splicer, run, *SCRIPT)
    assert results.counted() == {"start": 1, "spliced": 3}
    splicer.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert row.tokens == row_of(4)
    assert row.trained == [token for words in ANSWERS for token in answer_of(words)]


def test_later_calls_of_the_same_kind_are_rendered_once(splicer: Recorder, vllm: Engine, run: str) -> None:
    settings: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"of": "this test"}}}
    messages = converse(splicer, run, user("say a"), user("say b"), **settings)
    vllm.rendered.clear()
    results = Results(splicer)
    messages = converse(splicer, run, user("say c"), history=messages, **settings)
    assert (results.counted(), len(vllm.rendered)) == ({"spliced": 1}, 1)
    # A system's message is another kind: templates may move it to the start.
    vllm.template = lambda messages: prompt_of(sorted(messages, key=lambda message: message["role"] != "system"))
    converse(splicer, run, user("say d"), {"role": "system", "content": "Stop."}, history=messages, **settings)
    assert results.counted() == {"spliced": 2, "end": 1}


def test_a_message_that_repeats_a_passage_is_not_lost(splicer: Recorder, vllm: Engine, run: str) -> None:
    def template(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Writes ! behind an answer to a tool, and takes ■ in a message for the end of a turn."""
        spoken = [
            {**message, "content": f"{message['content']}!"} if before["role"] == "tool" else message
            for before, message in pairwise([user(""), *messages])
        ]
        text = "".join(map(chr, prompt_of(spoken)))
        return [*map(ord, text.replace("".join(map(chr, tokens_of("■"))), chr(END)))]

    vllm.template = template
    settings: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"of": "passages"}}}
    converse(splicer, run, user("say a"), user("say b"), **settings)
    results, copy = Results(splicer), user(f"say assistant\n{WORDS[0]}■ and more")
    converse(splicer, run, user("call look {}"), result("say c"), copy, **settings)
    assert results.counted() == {"start": 1, "spliced": 2}
    prompt, whole = vllm.requests[-1]["kv_transfer_params"]["prompt_token_ids"], template([copy])
    assert prompt[-len(whole) :] == whole


def test_sglang_takes_the_tokens_too(start_recorder: StartRecorder, sglang: Engine, service: Service, run: str) -> None:
    recorder = start_recorder(sglang.url, service.grpc_address, "--splice", "on", "--engine", "sglang")
    results = Results(recorder)
    converse(recorder, run, *SCRIPT)
    assert results.counted() == {"start": 1, "spliced": 3}
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert row.tokens == row_of(4)


def test_an_engine_that_renders_no_last_answer_shows_its_end_in_longer_conversations(
    start_recorder: StartRecorder, sglang: Engine, service: Service, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def template(messages: list[Mapping[str, Any]]) -> list[int]:
        """Renders a last answer as a message of the user, as SGLang does, and this without an end of turn."""
        *earlier, last = messages
        if last["role"] != "assistant":
            return prompt_of(messages)
        before = prompt_of(earlier)[: -len(BEGIN_ANSWER)]
        return [*before, *turn("user", last["content"])[:-2], *BEGIN_ANSWER]

    monkeypatch.setattr(sglang, "template", template)
    recorder = start_recorder(sglang.url, service.grpc_address, "--splice", "on", "--engine", "sglang")
    asked, words = user('words {"tool": ["look", "{}"], "is_cut": true}'), Words(tool=("look", "{}"), is_cut=True)
    converse(recorder, run, asked, result("say noon"))
    recorder.finish(run)
    (row,) = trained(service.grpc_address, run)
    begun = [*turn("user", asked["content"]), *BEGIN_ANSWER, *answer_of(words), END, *tokens_of("\n")]
    assert row.tokens == [*begun, *turn("tool", "say noon"), *BEGIN_ANSWER, *answer_of(Words(text="noon"))]


def test_without_splicing_the_same_conversation_is_several_rows(recorder: Recorder, service: Service, run: str) -> None:
    converse(recorder, run, *SCRIPT)
    recorder.finish(run)
    assert len(trained(service.grpc_address, run)) == 3


def test_an_end_that_the_call_names_as_a_stop_token_stands_there_once(
    splicer: Recorder, vllm: Engine, service: Service, run: str
) -> None:
    converse(splicer, run, user("say a"), user("say b"), user("say c"), extra_body={"stop_token_ids": [END]})
    splicer.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert row.tokens == [*vllm.requests[-1]["kv_transfer_params"]["prompt_token_ids"], *b"c", END]
    assert row.tokens == [*prompt_of(vllm.requests[-1]["messages"]), *b"c", END]


def test_a_choice_goes_on_where_another_one_is_empty(splicer: Recorder, run: str) -> None:
    results, script = Results(splicer), 'words {"text": "a"}'
    with splicer.openai(run) as client:
        assert len(ask(client, [user(script)], n=2).choices) == 2
    converse(splicer, run, user("say b"), history=[user(script), {"role": "assistant", "content": "a"}])
    assert results.counted() == {"start": 1, "spliced": 1}


def test_a_stream_is_spliced_too(splicer: Recorder, service: Service, run: str) -> None:
    messages: list[Any] = []
    with splicer.openai(run) as client:
        for message in SCRIPT:
            messages.append(message)
            deltas = [chunk.choices[0].delta for chunk in ask(client, messages, stream=True)]
            text = "".join(delta.content or "" for delta in deltas)
            calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or ()]
            messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
    splicer.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert row.tokens == row_of(4)


def test_anthropics_messages_are_spliced_too(splicer: Recorder, service: Service, run: str) -> None:
    client = anthropic.Anthropic(base_url=splicer.base(run), api_key="key", max_retries=0)
    messages: list[Any] = []
    for text in ("think hm; done", "say noon"):
        messages.append(user(text))
        answer = client.messages.create(model="toy", max_tokens=99, messages=messages)
        messages.append({"role": "assistant", "content": [each for each in answer.content if each.type == "text"]})
    client.close()
    splicer.finish(run)
    (row,) = trained(service.grpc_address, run)
    assert row.trained == [*answer_of(Words("hm", "done")), *answer_of(Words(text="noon"))]


def test_a_call_goes_on_from_any_recorded_answer(splicer: Recorder, service: Service, run: str) -> None:
    with splicer.openai(run) as client:
        choices = ask(client, [user("think a; b")], n=2).choices
    results = Results(splicer)
    for choice in choices:
        converse(splicer, run, user("say on"), history=[user("think a; b"), sent_back(choice.message)])
    assert results.counted() == {"spliced": 2}
    splicer.finish(run)
    rows = trained(service.grpc_address, run)
    firsts = [answer_of(Words("a", text)) for text in ("b", "b #1")]
    assert [row.trained for row in rows] == [[*first, *answer_of(Words(text="on"))] for first in firsts]


@pytest.mark.parametrize(
    ("identity", "result"), [("call_0123456789abcdef01234567", "spliced"), ("functions.look:0", "history")]
)
def test_a_call_whose_arguments_the_agent_rewrote_is_known_by_a_random_id(
    splicer: Recorder, run: str, identity: str, result: str
) -> None:
    words = {"tool": ["look", '{"at": "clock  "}'], "id": identity}
    messages = converse(splicer, run, user(f"words {json.dumps(words)}"))
    messages[-1]["tool_calls"][0]["function"]["arguments"] = '{"at": "clock", "all": false}'
    results = Results(splicer)
    converse(splicer, run, {"role": "tool", "tool_call_id": identity, "content": "say noon"}, history=messages)
    assert results.counted() == {result: 1}


def test_an_answer_that_comes_back_without_the_spaces_around_it_is_spliced(splicer: Recorder, run: str) -> None:
    messages = converse(splicer, run, user("think a; \n\nb\n"))
    assert messages[-1]["content"] == "\n\nb\n"
    messages[-1]["content"] = "b"
    results = Results(splicer)
    converse(splicer, run, user("say c"), history=messages)
    assert results.counted() == {"spliced": 1}


def test_a_changed_history_begins_a_row_and_is_counted(splicer: Recorder, service: Service, run: str) -> None:
    messages = converse(splicer, run, user("think a; b"), user("say c"))
    results = Results(splicer)
    messages[1]["content"] = "a summary"
    converse(splicer, run, user("say d"), history=messages)
    assert results.counted() == {"history": 1}
    splicer.finish(run)
    first, second = trained(service.grpc_address, run)
    assert first.trained == [*answer_of(Words("a", "b")), *answer_of(Words(text="c"))]
    assert second.tokens == [*prompt_of([*messages, user("say d")]), *answer_of(Words(text="d"))]


@pytest.mark.parametrize(
    ("cause", "fields"),
    [
        ("settings", {"tools": [{"type": "function", "function": {"name": "look"}}]}),
        ("settings", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}),
        ("fields", {"extra_body": {"truncate_prompt_tokens": 10}}),
    ],
)
def test_a_call_that_cannot_be_spliced_goes_as_it_came(
    splicer: Recorder, vllm: Engine, run: str, cause: str, fields: dict[str, Any]
) -> None:
    messages = converse(splicer, run, user("think a; b"))
    results = Results(splicer)
    converse(splicer, run, user("say c"), history=messages, **fields)
    assert results.counted() == {cause: 1}
    assert "kv_transfer_params" not in vllm.requests[-1]
    assert vllm.requests[-1]["messages"] == [*messages, user("say c")]


@pytest.mark.parametrize("tokens", ["abc", 3, {"a": 1}, [1.5, "x", None], [[1]], []])
def test_a_call_whose_rendering_is_no_list_of_tokens_goes_as_it_came(
    splicer: Recorder, vllm: Engine, run: str, tokens: Any
) -> None:
    results, history = Results(splicer), converse(splicer, run, user("say a"))
    vllm.template = lambda messages: tokens
    assert converse(splicer, run, user("say b"), history=history)[-1]["content"] == "b"
    assert results.counted() == {"start": 1, "rendering": 1}


@pytest.mark.slow
def test_a_call_whose_rendering_does_not_arrive_goes_as_it_came(splicer: Recorder, vllm: Engine, run: str) -> None:
    results, history = Results(splicer), converse(splicer, run, user("say a"))
    vllm.renders_after_s = 300.0
    assert converse(splicer, run, user("say b"), history=history)[-1]["content"] == "b"
    assert results.counted() == {"start": 1, "rendering": 1}


def test_an_engine_that_does_not_read_the_tokens_is_named_and_recorded_right(
    start_recorder: StartRecorder, vllm: Engine, service: Service, run: str
) -> None:
    vllm.takes_tokens = False
    recorder = start_recorder(vllm.url, service.grpc_address, "--splice", "on")
    results = Results(recorder)
    messages = converse(recorder, run, user("think a; b"), user("say c"))
    assert results.counted() == {"start": 1, "ignored": 1}
    assert "ignores the tokens of a prompt, calls are not spliced; use vLLM 0.32 or newer" in recorder.log.read_text()
    vllm.rendered.clear()
    messages = converse(recorder, run, user("say d"), history=messages)
    assert (results.counted(), vllm.rendered) == ({"start": 1, "ignored": 2}, [])
    recorder.finish(run)
    assert [row.tokens for row in trained(service.grpc_address, run)] == [
        [*prompt_of(messages[:1]), *answer_of(Words("a", "b"))],
        [*prompt_of(messages[:5]), *answer_of(Words(text="d"))],
    ]


def test_a_model_whose_rendering_is_not_the_prompt_of_its_answers_is_not_spliced(
    splicer: Recorder, vllm: Engine, run: str
) -> None:
    vllm.template = lambda messages: [*turn("system", "rendered by the template"), *prompt_of(messages)]
    settings: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"renders": "otherwise"}}}
    results = Results(splicer)
    converse(splicer, run, user("think a; b"), user("say c"), **settings)
    assert results.counted() == {"start": 1, "rendering": 1}


def test_the_agents_transfer_parameters_reach_the_engine(splicer: Recorder, vllm: Engine, run: str) -> None:
    converse(splicer, run, user("say a"), user("say b"), extra_body={"kv_transfer_params": {"do_remote_decode": True}})
    sent = vllm.requests[-1]["kv_transfer_params"]
    assert sent["do_remote_decode"] is True
    assert sent["prompt_token_ids"][: len(prompt_of([user("say a")]))] == prompt_of([user("say a")])


def test_conversations_that_take_turns_are_stored_once(
    start_recorder: StartRecorder, vllm: Engine, service: Service, run: str, tmp_path: Path
) -> None:
    """As an agent's and its sub-agent's."""
    recorder = start_recorder(vllm.url, service.grpc_address, "--splice", "on")
    agents = [[user(f"say {name * 1000}")] for name in "ab"]
    agents = [converse(recorder, run, *messages) for messages in agents]
    for _ in range(4):
        agents = [converse(recorder, run, user("say on"), history=messages) for messages in agents]
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as journal:
        shared = [count for (count,) in journal.execute("SELECT shared FROM steps ORDER BY step")]
    assert min(shared[2:]) > 1000
    recorder.finish(run)
    assert len(trained(service.grpc_address, run)) == 2


def test_a_conversation_stays_one_row_through_a_kill(
    start_recorder: StartRecorder, vllm: Engine, service: Service, run: str
) -> None:
    first = start_recorder(vllm.url, service.grpc_address, "--splice", "on")
    messages = converse(first, run, *SCRIPT[:3])
    first.kill()
    second = start_recorder(vllm.url, service.grpc_address, "--splice", "on")
    converse(second, run, *SCRIPT[3:], history=messages)
    assert second.finish(run) == {"steps": 4, "outcome": "accepted"}
    (row,) = trained(service.grpc_address, run)
    assert row.tokens == row_of(4)


def test_verify_sends_calls_unchanged_and_counts_what_splicing_would_have_saved(
    start_recorder: StartRecorder, vllm: Engine, service: Service, run: str
) -> None:
    recorder = start_recorder(vllm.url, service.grpc_address, "--splice", "verify")
    results = Results(recorder)
    messages = converse(recorder, run, user("say a"), user("think b; c"), user("say d"))
    assert results.counted() == {"start": 1, "verified": 2}
    assert all("kv_transfer_params" not in request for request in vllm.requests[-3:])
    assert recorder.metric('splice_differences_total{place="none"}') == 1
    assert recorder.metric('splice_differences_total{place="answer"}') == 1
    assert recorder.metric("splice_saved_tokens_total") == len(prompt_of(messages[:-1]))


def test_a_call_that_the_engine_refuses_is_refused_by_the_engine(splicer: Recorder, run: str) -> None:
    body = {"model": "toy", "messages": [user("fail 400")]}
    assert post(f"{splicer.base(run)}/v1/chat/completions", body)[0] == 400


@pytest.mark.parametrize("messages", [None, "words", ["words"], [{"role": "assistant", "tool_calls": [{}]}]])
def test_a_call_that_is_no_conversation_goes_as_it_came(messages: Any) -> None:
    nothing: Any = None
    request = {"messages": messages}
    plan = asyncio.run(Splicer("on", VLLM, nothing, Metrics()).plan(CHAT, request, nothing, {}))
    assert (plan.request, plan.conversation) == (request, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_transfer_params": 3},
        {"kv_transfer_params": "x"},
        {"chat_template_kwargs": "x"},
        {"messages": [{"role": [], "content": "fail 400"}]},
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_call_with_fields_of_wrong_types_gets_the_engines_error(
    splicer: Recorder, vllm: Engine, run: str, wrong: dict[str, Any], is_first: bool
) -> None:
    messages = [] if is_first else converse(splicer, run, user("say hi"))
    call = {"model": "toy", "messages": [user("fail 400")], **wrong}
    # A recorder of another test may still ask the engine what it gives.
    asked = [request for request in vllm.requests if request["messages"][-1]["content"] == "fail 400"]
    url = f"{splicer.base(run)}/v1/chat/completions"
    assert post(url, {**call, "messages": [*messages, *call["messages"]]})[0] == 400
    assert len([each for each in vllm.requests if each["messages"][-1]["content"] == "fail 400"]) == len(asked) + 1
    assert "Traceback" not in splicer.log.read_text()
