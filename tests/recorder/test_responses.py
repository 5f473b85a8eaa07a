"""OpenAI's responses through a recorder, in front of an engine that knows chat completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.on_loop import Service
from tests.recorder.engine import END, Engine, Words, answer_of, logprobs_for, prompt_of
from tests.recorder.recorders import Recorder, post, trained

TOOLS: Any = [{"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}]
PATCH: Any = {"type": "custom", "name": "patch", "description": "Patch.", "format": {"type": "text"}}
NAMESPACES: Any = [{"type": "namespace", "name": "eyes", "tools": TOOLS}]
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}


def call(client: openai.OpenAI, given: Any, stream: bool = False, **more: Any) -> Any:
    """Calls, and returns the response: a streamed one as the library puts it together."""
    if not stream:
        return client.responses.create(model="toy", input=given, **more)
    with client.responses.stream(model="toy", input=given, **more) as events:
        for _ in events:
            pass
        return events.get_final_response()


def sent_back(response: Any) -> list[Any]:
    return [item.to_dict() for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_reasoning_and_a_tool_is_trained_where_the_model_spoke(
    recorder: Recorder, engine: Engine, service: Service, run: str, stream: bool
) -> None:
    with recorder.openai(run) as client:
        more: Any = {"instructions": "Be brief.", "tools": TOOLS, "max_output_tokens": 100, "stream": stream}
        items: list[Any] = [{"role": "user", "content": 'call look {"at": "clock"}'}]
        looked = call(client, items, **more)
        assert [(item.type, item.name, item.arguments) for item in looked.output] == [
            ("function_call", "look", '{"at": "clock"}')
        ]
        items += sent_back(looked)
        items.append({"type": "function_call_output", "call_id": looked.output[0].call_id, "output": "think hm; noon"})
        thought = call(client, items, **more)
        assert [item.type for item in thought.output] == ["reasoning", "message"]
        assert (thought.output[0].content[0].text, thought.output_text, thought.status) == ("hm", "noon", "completed")
        assert thought.usage.output_tokens == len(answer_of(Words("hm", "noon")))
        items += [*sent_back(thought), {"role": "user", "content": [{"type": "input_text", "text": "say bye"}]}]
        assert call(client, items, **more).output_text == "bye"
    sent = engine.requests[-1]
    assert (sent["max_completion_tokens"], sent["tool_choice"], sent["messages"][0]["role"]) == (100, "auto", "system")
    assert recorder.finish(run) == {"steps": 3, "outcome": "accepted"}
    (row,) = trained(service.grpc_address, run)
    spoken = (Words(tool=("look", '{"at": "clock"}')), Words("hm", "noon"), Words(text="bye"))
    assert row.trained == [token for words in spoken for token in answer_of(words)]
    assert row.tokens == [*prompt_of(sent["messages"]), *b"bye", END]
    assert row.logprobs == [logprob for words in spoken for logprob in logprobs_for(len(answer_of(words)))]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_words_has_an_item_that_can_be_sent_back(
    recorder: Recorder, engine: Engine, run: str, stream: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": "say "}]
    with recorder.openai(run) as client:
        said = call(client, items, stream)
        assert [(item.type, item.content[0].text) for item in said.output] == [("message", "")]
        call(client, [*items, *sent_back(said), {"role": "user", "content": "say bye"}], stream)
    assert [message["role"] for message in engine.requests[-1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_its_input_as_text(recorder: Recorder, engine: Engine, run: str, stream: bool) -> None:
    with recorder.openai(run) as client:
        tools = [{**PATCH, "format": GRAMMAR}]
        items: list[Any] = [{"role": "user", "content": 'call patch {"input": "+ \\"a\\""}'}]
        patched = call(client, items, stream, tools=tools)
        (item,) = patched.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", '+ "a"')
        output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "say done"}
        assert call(client, [*items, *sent_back(patched), output], stream, tools=tools).output_text == "done"
    sent = engine.requests[-1]
    assert sent["tools"][0]["function"]["parameters"]["required"] == ["input"]
    assert "start: WORD" in sent["tools"][0]["function"]["description"]
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"input": "+ \\"a\\""}'


def test_a_custom_tool_gets_what_the_model_wrote_if_it_is_no_input(recorder: Recorder, run: str) -> None:
    with recorder.openai(run) as client:
        (item,) = call(client, "call patch + b", tools=[PATCH]).output
        assert item.input == "+ b"
        (item,) = call(client, 'call patch {"input": "+ b", "at": 1}', tools=[PATCH]).output
    assert item.input == '{"input": "+ b", "at": 1}'


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_a_namespace_has_a_longer_name_for_the_model_alone(
    recorder: Recorder, engine: Engine, run: str, stream: bool
) -> None:
    tools: Any = [{"type": "namespace", "name": "eyes", "description": "Senses.", "tools": [*TOOLS, PATCH]}]
    items: list[Any] = [{"role": "user", "content": 'call eyes__look {"at": "clock"}'}]
    with recorder.openai(run) as client:
        looked = call(client, items, stream, tools=tools)
        (item,) = looked.output
        assert (item.type, item.namespace, item.name) == ("function_call", "eyes", "look")
        items += [*sent_back(looked), {"type": "function_call_output", "call_id": item.call_id, "output": "say noon"}]
        assert call(client, items, stream, tools=tools).output_text == "noon"
    sent = engine.requests[-1]
    functions = [tool["function"] for tool in sent["tools"]]
    assert [each["name"] for each in functions] == ["eyes__look", "eyes__patch"]
    assert [each["description"] for each in functions] == ["Senses.\n\nLook.", "Patch."]
    assert sent["messages"][1]["tool_calls"][0]["function"]["name"] == "eyes__look"


def test_the_events_of_a_stream_are_numbered_and_each_item_ends_as_it_is_in_the_response(
    recorder: Recorder, run: str
) -> None:
    with recorder.openai(run) as client:
        events: Any = list(client.responses.create(model="toy", input="think hm; noon", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "noon"
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in events[-1].response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_incomplete(recorder: Recorder, run: str, stream: bool) -> None:
    with recorder.openai(run) as client:
        said: Any = client.responses.create(model="toy", input="short it is", stream=stream)
        response = list(said)[-1].response if stream else said
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_what_the_developer_says_before_an_answer_is_one_system_message_and_later_words_stay_in_their_place(
    recorder: Recorder, engine: Engine, run: str
) -> None:
    def said(role: str, text: str) -> Any:
        return {"role": role, "content": [{"type": "input_text", "text": text}]}

    first = [said("user", "say hi"), said("developer", "Never ask.")]
    later = [{"role": "assistant", "content": "hi"}, said("developer", "say so")]
    with recorder.openai(run) as client:
        call(client, [*first, *later], instructions="Be brief.")
    assert engine.requests[-1]["messages"] == [
        {"role": "system", "content": "Be brief.\n\nNever ask."},
        {"role": "user", "content": "say hi"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "say so"},
    ]


def test_a_thought_without_words_is_its_summary_and_nulls_are_nothing(
    recorder: Recorder, engine: Engine, run: str
) -> None:
    thought = {"type": "reasoning", "content": None, "encrypted_content": "a", "summary": [{"text": "Hm."}]}
    message = {"type": None, "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": None}
    with recorder.openai(run) as client:
        call(client, [{"role": "user", "content": "say hi"}, thought, message, {"role": "user", "content": "say ho"}])
    assert engine.requests[-1]["messages"][1] == {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "look"}},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
        (
            {"tools": NAMESPACES, "tool_choice": {"type": "function", "name": "look", "namespace": "eyes"}},
            {"tool_choice": {"type": "function", "function": {"name": "eyes__look"}}},
        ),
        ({"max_output_tokens": 0}, {"max_completion_tokens": 0}),
        ({"truncation": "auto", "store": True, "service_tier": "flex", "max_tool_calls": 1}, {}),
        (dict.fromkeys(("reasoning", "text", "tools", "tool_choice", "include", "instructions", "metadata", "n")), {}),
        ({"top_k": 5, "temperature": 0.5}, {"top_k": 5, "temperature": 0.5}),
    ],
)
def test_settings_are_those_of_a_chat_completion(
    recorder: Recorder, engine: Engine, run: str, more: dict[str, Any], sent: dict[str, Any]
) -> None:
    post(f"{recorder.base(run)}/v1/responses", {"model": "toy", "input": "say hi", **more})
    assert sent.items() <= engine.requests[-1].items()


@pytest.mark.parametrize("stream", [False, True])
def test_errors_reach_the_library_as_its_own(recorder: Recorder, run: str, stream: bool) -> None:
    with recorder.openai(run) as client:
        with pytest.raises(openai.UnprocessableEntityError, match="failed on request"):
            call(client, "fail 422", stream)
        with pytest.raises(openai.APIError, match="token ids"):
            call(client, "tokenless hi", stream)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"background": True}, "background is set"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"include": ["message.output_text.logprobs"]}, "rows have logprobs without them"),
        ({"tools": [{"type": "web_search"}]}, "type web_search, one of OpenAI's own"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice has type file_search"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "records only tokens"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]}, "tokens"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "an input item has type item_reference"),
        ({"input": 3}, "does not follow OpenAI's API"),
        ({"n": 2}, "n is 2; call once for each answer"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format has type grammar"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]}, "records only tokens"),
        ({"input": [{"role": "user", "content": [{"type": "computer_screenshot"}]}]}, "has no text"),
        ({"input": [{"role": "assistant", "content": [{"type": "thing"}]}]}, "a part of type thing has no text"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "thing"}]}]}, "no text"),
        ({"input": [{"role": "assistant", "type": "thing", "content": "a"}]}, "an input item has type thing"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "a"}]}, "only encrypted_content"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "an input item has type web_search_call"),
        ({"tools": [{"type": "local_shell"}]}, "type local_shell, one of OpenAI's own"),
    ],
)
def test_what_no_chat_completion_has_is_refused(
    recorder: Recorder, run: str, more: dict[str, Any], problem: str
) -> None:
    status, answer = post(f"{recorder.base(run)}/v1/responses", {"model": "toy", "input": "say hi", **more})
    assert (status, problem in answer["error"]["message"]) == (400, True), answer


def test_a_response_repeats_the_settings_of_its_call_zero_and_false_too(recorder: Recorder, run: str) -> None:
    settings: Any = {"temperature": 0.0, "parallel_tool_calls": False, "top_p": 0.5}
    with recorder.openai(run) as client:
        response = call(client, "say hi", **settings).to_dict()
    assert {name: response[name] for name in settings} == settings
    assert (response["store"], response["truncation"]) == (False, "disabled")
