"""Anthropic's library through a recorder, in front of an engine that knows chat completions."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.on_loop import Service
from tests.recorder.engine import END, Engine, Words, answer_of, prompt_of
from tests.recorder.recorders import Recorder, post, trained

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://images/cat.png"}}
TOOLS: Any = [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]


def agent(recorder: Recorder, run: str, uid: str = "a") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=recorder.base(run, uid), api_key="key", max_retries=0)


def ask(client: anthropic.Anthropic, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(model="toy", max_tokens=100, messages=messages, **more)


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_thinking_and_a_tool_is_trained_where_the_model_spoke(
    recorder: Recorder, engine: Engine, service: Service, run: str, stream: bool
) -> None:
    def call(messages: list[Any]) -> Any:
        more: Any = {"system": "Be brief.", "tools": TOOLS, "stop_sequences": ["!"]}
        if not stream:
            return ask(client, messages, **more)
        with client.messages.stream(model="toy", max_tokens=100, messages=messages, **more) as events:
            return events.get_final_message()

    with agent(recorder, run) as client:
        messages = [user('call look {"at": "clock"}')]
        looked = call(messages)
        assert (looked.stop_reason, looked.content[0].type) == ("tool_use", "tool_use")
        assert (looked.content[0].name, looked.content[0].input) == ("look", {"at": "clock"})
        result = {"type": "tool_result", "tool_use_id": looked.content[0].id, "content": "think hm; noon"}
        messages += [{"role": "assistant", "content": [block.to_dict() for block in looked.content]}, user([result])]
        thought = call(messages)
        assert [block.type for block in thought.content] == ["thinking", "text"]
        assert (thought.content[0].thinking, thought.content[1].text) == ("hm", "noon")
        assert (thought.stop_reason, thought.usage.output_tokens) == ("end_turn", len(answer_of(Words("hm", "noon"))))
        messages += [{"role": "assistant", "content": [block.to_dict() for block in thought.content]}, user("say bye")]
        assert call(messages).content[0].text == "bye"
    sent = engine.requests[-1]
    assert (sent["max_tokens"], sent["stop"], sent["tool_choice"]) == (100, ["!"], "auto")
    assert recorder.finish(run) == {"steps": 3, "outcome": "accepted"}
    (row,) = trained(service.grpc_address, run)
    spoken = (Words(tool=("look", '{"at": "clock"}')), Words("hm", "noon"), Words(text="bye"))
    assert row.trained == [token for words in spoken for token in answer_of(words)]
    assert row.tokens == [*prompt_of(sent["messages"]), *b"bye", END]


def test_the_key_goes_to_the_engine_as_it_looks_for_it(recorder: Recorder, engine: Engine, run: str) -> None:
    with agent(recorder, run) as client:
        ask(client, [user("say hi")])
    assert {name.lower(): value for name, value in engine.headers[-1].items()}["authorization"] == "Bearer key"


def test_texts_of_the_system_are_one_and_a_line_that_changes_with_each_call_is_left_out(
    recorder: Recorder, engine: Engine, run: str
) -> None:
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief."},
    ]
    with agent(recorder, run) as client:
        ask(client, [user([{"type": "text", "text": "say hi"}])], system=system)
    assert engine.requests[-1]["messages"] == [{"role": "system", "content": "Be brief."}, user("say hi")]


def test_a_system_text_after_an_answer_stays_in_its_place(recorder: Recorder, engine: Engine, run: str) -> None:
    first: Any = [user("say hi"), {"role": "system", "content": "Be brief."}]
    with agent(recorder, run) as client:
        ask(client, [*first, {"role": "assistant", "content": "hi"}, {"role": "system", "content": "say so"}])
    assert engine.requests[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        *(user("say hi"), {"role": "assistant", "content": "hi"}, user("say so")),
    ]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_the_choice_of_a_tool_is_passed_on(
    recorder: Recorder, engine: Engine, run: str, choice: Any, sent: Any
) -> None:
    with agent(recorder, run) as client:
        ask(client, [user("say hi")], tools=TOOLS, tool_choice=choice)
    assert engine.requests[-1]["tool_choice"] == sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_writes_no_json_is_passed_on_and_trained_all_the_same(
    recorder: Recorder, service: Service, run: str, stream: bool
) -> None:
    with agent(recorder, run) as client:
        answer = ask(client, [user("call look {oops")], tools=TOOLS, stream=stream)
        if stream:
            parts = [event.delta.partial_json for event in answer if event.type == "content_block_delta"]
            assert parts == ["{oops"]
        else:
            assert answer.content[0].input == {"invalid_json": "{oops"}
    recorder.finish(run)
    assert trained(service.grpc_address, run)[0].trained == answer_of(Words(tool=("look", "{oops")))


@pytest.mark.parametrize("stream", [False, True])
def test_errors_reach_the_library_as_its_own(recorder: Recorder, run: str, stream: bool) -> None:
    with agent(recorder, run) as client:
        with pytest.raises(anthropic.RateLimitError, match="failed on request"):
            ask(client, [user("fail 429")], stream=stream)
        with pytest.raises(anthropic.APIStatusError, match="token ids"):
            ask(client, [user("tokenless hi")], stream=stream)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"messages": [user([IMAGE])]}, "records only tokens"),
        ({"messages": [user([{"type": "tool_result", "content": [IMAGE]}])]}, "records only tokens"),
        ({"messages": [user([{"type": "thing"}])]}, "a part of type thing"),
        ({"messages": 3}, "does not follow Anthropic's API"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "set input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
    ],
)
def test_what_no_chat_completion_has_is_refused(
    recorder: Recorder, run: str, more: dict[str, Any], problem: str
) -> None:
    document = {"model": "toy", "max_tokens": 5, "messages": [user("say hi")], **more}
    status, answer = post(f"{recorder.base(run)}/v1/messages", document)
    assert (status, answer["type"]) == (400, "error")
    assert problem in answer["error"]["message"]
