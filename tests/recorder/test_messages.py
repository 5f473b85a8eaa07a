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


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "secret"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": {"type": "object"}}}


def agent(recorder: Recorder, run: str, uid: str = "a") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=recorder.base(run, uid), api_key="key", max_retries=0)


def ask(client: anthropic.Anthropic, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(model="toy", max_tokens=100, messages=messages, **more)


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def said(content: Any) -> Any:
    return {"role": "assistant", "content": content}


def result_of(content: Any) -> Any:
    return user([{"type": "tool_result", "tool_use_id": "a", "content": content}])


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
    line = "x-anthropic-billing-header: cc_version=1; cch=abc"
    blocks: Any = [{"type": "text", "text": text} for text in (line, "Be ", "brief.")]
    with agent(recorder, run) as client:
        for system in (blocks, f"{line}\nBe brief."):
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


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking_token_budget": 1024}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"format": SCHEMA}}, {"response_format": FORMAT}),
        ({"output_format": SCHEMA}, {"response_format": FORMAT}),
        ({"vllm_xargs": {"a": 1}}, {"vllm_xargs": {"a": 1}}),
        ({"system": None, "tools": None, "tool_choice": None, "thinking": None, "output_config": None}, {}),
    ],
)
def test_settings_are_those_of_a_chat_completion(
    recorder: Recorder, engine: Engine, run: str, more: dict[str, Any], sent: dict[str, Any]
) -> None:
    document = {"model": "toy", "max_tokens": 5, "messages": [user("say hi")], **more}
    assert post(f"{recorder.base(run)}/v1/messages", document)[0] == 200
    assert sent.items() <= engine.requests[-1].items()


def test_tools_are_strict_and_load_later_as_the_agent_says(recorder: Recorder, engine: Engine, run: str) -> None:
    empty = {"type": "text", "text": ""}
    content = [{"type": "text", "text": "Found."}, empty, {"type": "tool_reference", "tool_name": "look"}]
    with agent(recorder, run) as client:
        tools: Any = [{**TOOLS[0], "input_schema": {}, "strict": True, "defer_loading": True}]
        ask(
            client,
            [user("Search."), said([{"type": "tool_use", "id": "a", "name": "find", "input": {}}]), result_of(content)],
            tools=tools,
        )
    sent = engine.requests[-1]
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert sent["tools"][0]["function"] == {**function, "strict": True, "defer_loading": True}
    assert [message["content"] for message in sent["messages"][2:]] == [
        "Found.\n",
        [{"type": "tool_reference", "name": "look"}],
    ]


def test_thoughts_that_anthropic_encrypted_are_left_out(recorder: Recorder, engine: Engine, run: str) -> None:
    blocks = [{"type": "redacted_thinking", "data": "abc"}, {"type": "text", "text": "hi"}]
    empty = {"type": "thinking", "thinking": "", "signature": "abc"}
    with agent(recorder, run) as client:
        ask(client, [user("say hi"), said(blocks), user("say ho"), said([empty, *blocks]), user("say so")])
    messages = engine.requests[-1]["messages"]
    assert messages[:3] == [user("say hi"), said("hi"), user("say ho")]
    assert messages[3] == {**said("hi"), "reasoning_content": ""}


def test_anthropics_loop_of_tools_sends_the_whole_conversation_because_no_server_stores_it(
    recorder: Recorder, engine: Engine, run: str
) -> None:
    @anthropic.beta_tool
    def look(at: str) -> str:
        """Looks."""
        return f"say {at}"

    with agent(recorder, run) as client:
        messages = [user('call look {"at": "noon"}')]
        loop: Any = client.beta.messages.tool_runner(model="toy", max_tokens=9, messages=messages, tools=[look])
        (block,) = loop.until_done().content
    assert (block.type, block.text) == ("text", "noon")
    assert [message["role"] for message in engine.requests[-1]["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("stream", [False, True])
def test_integers_of_any_size_stay_as_the_model_wrote_them(
    recorder: Recorder, engine: Engine, run: str, stream: bool
) -> None:
    messages = [user('call pay {"wei": 100000000000000000001}')]
    with agent(recorder, run) as client:
        with client.messages.stream(model="toy", max_tokens=9, messages=messages) as events:
            answer: Any = events.get_final_message() if stream else ask(client, messages)
        (block,) = answer.content
        assert block.input == {"wei": 10**20 + 1}
        ask(client, [*messages, said([block.to_dict()]), result_of("say done")])
    (call,) = engine.requests[-1]["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == '{"wei": 100000000000000000001}'
    tools = [{**TOOLS[0], "input_schema": {"type": "integer", "maximum": 2**256}}]
    document = {"model": "toy", "max_tokens": 5, "messages": [user("say hi")], "tools": tools}
    status, answer = post(f"{recorder.base(run)}/v1/messages", document)
    assert (status, "integers of more than 64 bits as texts" in answer["error"]["message"]) == (400, True)


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
        ({"messages": [user([{"type": "thing"}])]}, "Input tag 'thing'"),
        ({"messages": [user([DOCUMENT])]}, "Input tag 'document'"),
        ({"messages": [result_of([DOCUMENT])]}, "Input tag 'document'"),
        (
            {"messages": [result_of([{"type": "search_result", "source": "a", "content": []}])]},
            "Input tag 'search_result'",
        ),
        (
            {"messages": [said([{"type": "server_tool_use", "name": "web_search", "input": {}}])]},
            "Input tag 'server_tool_use'",
        ),
        ({"messages": [said([{"type": "tool_result", "content": "a"}])]}, "Input tag 'tool_result'"),
        ({"messages": [said([IMAGE])]}, "records only tokens"),
        ({"messages": [user([{"type": "thinking", "thinking": "hm"}])]}, "Input tag 'thinking'"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]}, "Input tag 'tool_addition'"),
        ({"messages": [{"role": "tool", "content": [{"type": "text", "text": "a"}]}]}, "role 'tool'"),
        ({"system": [{"type": "image"}]}, "records only tokens"),
        ({"messages": 3}, "does not follow Anthropic's API"),
        ({"messages": [said([{"type": "tool_use", "input": '{"at": 1}'}])]}, "'str' object is not a mapping"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "set input_schema"),
        ({"tools": [{**TOOLS[0], "input_examples": [{"at": "clock"}]}]}, "input_examples is set"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is set"),
        ({"thread": {"type": "continue", "previous_message_id": "a"}}, "thread is set"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'"),
        ({"output_config": {"format": {"type": "grammar"}}}, "has type grammar"),
    ],
)
def test_what_no_chat_completion_has_is_refused(
    recorder: Recorder, run: str, more: dict[str, Any], problem: str
) -> None:
    document = {"model": "toy", "max_tokens": 5, "messages": [user("say hi")], **more}
    status, answer = post(f"{recorder.base(run)}/v1/messages", document)
    assert (status, answer["type"]) == (400, "error")
    assert problem in answer["error"]["message"]
