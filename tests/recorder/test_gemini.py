"""Google's library through a recorder, in front of an engine that knows chat completions."""

from __future__ import annotations

from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from tests.on_loop import Service
from tests.recorder.engine import END, Engine, Words, answer_of, prompt_of
from tests.recorder.recorders import Recorder, post, trained

LOOK = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="look",
            parameters=types.Schema(type=types.Type.OBJECT, properties={"at": types.Schema(type=types.Type.STRING)}),
        )
    ]
)


def agent(recorder: Recorder, run: str) -> genai.Client:
    options = types.HttpOptions(base_url=recorder.base(run), retry_options=types.HttpRetryOptions(attempts=1))
    return genai.Client(api_key="key", http_options=options)


def call(client: genai.Client, contents: Any, stream: bool = False, **config: Any) -> Any:
    """Calls, and returns the content: of a stream the parts that arrived, with texts of one kind joined."""
    more: Any = {"model": "toy", "contents": contents, "config": config}
    models: Any = client.models
    if not stream:
        return models.generate_content(**more).candidates[0].content
    parts: list[Any] = []
    for chunk in models.generate_content_stream(**more):
        for part in chunk.candidates[0].content.parts or ():
            if parts and part.text is not None and parts[-1].text is not None and part.thought == parts[-1].thought:
                parts[-1].text += part.text
            elif part.text != "":
                parts.append(part)
    return types.Content(role="model", parts=parts)


def user(*parts: Any) -> types.Content:
    return types.Content(role="user", parts=list(parts))


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [part]}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_ids", [True, False])
def test_a_conversation_with_thoughts_and_a_tool_is_trained_where_the_model_spoke(
    recorder: Recorder, engine: Engine, service: Service, run: str, stream: bool, has_ids: bool
) -> None:
    client = agent(recorder, run)
    more: Any = {"system_instruction": "Be brief.", "tools": [LOOK], "max_output_tokens": 100, "top_k": 5}
    contents = [user(types.Part(text='call look {"at": "clock"}'))]
    looked = call(client, contents, stream, **more)
    (part,) = looked.parts
    assert (part.function_call.name, part.function_call.args) == ("look", {"at": "clock"})
    result = types.FunctionResponse(name="look", response={"result": "think hm; noon"})
    if has_ids:
        result.id = part.function_call.id
    contents += [looked, user(types.Part(function_response=result))]
    thought = call(client, contents, stream, **more)
    assert [(part.text, bool(part.thought)) for part in thought.parts] == [("hm", True), ("noon", False)]
    contents += [thought, user(types.Part(text="say "), types.Part(text="bye"))]
    assert call(client, contents, stream, **more).parts[0].text == "bye"
    client.close()
    sent = engine.requests[-1]
    assert (sent["max_tokens"], sent["top_k"], sent["model"]) == (100, 5, "toy")
    assert sent["tools"][0]["function"]["parameters"]["properties"] == {"at": {"type": "string"}}
    assert {name.lower(): value for name, value in engine.headers[-1].items()}["authorization"] == "Bearer key"
    assert recorder.finish(run) == {"steps": 3, "outcome": "accepted"}
    (row,) = trained(service.grpc_address, run)
    spoken = (Words(tool=("look", '{"at": "clock"}')), Words("hm", "noon"), Words(text="bye"))
    assert row.trained == [token for words in spoken for token in answer_of(words)]
    assert row.tokens == [*prompt_of(sent["messages"]), *b"bye", END]


def test_calls_without_ids_are_answered_in_their_order(recorder: Recorder, engine: Engine, run: str) -> None:
    called = {"functionCall": {"name": "look", "args": {}}}
    contents = [
        {"role": "user", "parts": [{"text": "look twice"}]},
        {"role": "model", "parts": [called, called]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"room": n}}} for n in (1, 2)]},
        {"role": "user", "parts": [{"text": "say hi"}]},
    ]
    assert post(f"{recorder.base(run)}/v1beta/models/toy:generateContent", {"contents": contents})[0] == 200
    messages = engine.requests[-1]["messages"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_0", "call_1"]
    assert [(each["tool_call_id"], each["content"]) for each in messages[2:4]] == [
        ("call_0", '{"room": 1}'),
        ("call_1", '{"room": 2}'),
    ]


@pytest.mark.parametrize(
    ("config", "sent"),
    [
        ({"stop_sequences": ["!"]}, {"stop": ["!"]}),
        ({"response_mime_type": "application/json"}, {"response_format": {"type": "json_object"}}),
        (
            {"response_mime_type": "application/json", "response_schema": {"type": "OBJECT"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "response", "schema": {"type": "object"}},
                }
            },
        ),
        (
            {"response_json_schema": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "response", "schema": {"type": "object"}},
                }
            },
        ),
        ({"thinking_config": {"thinking_budget": 0}}, {"reasoning_effort": "none"}),
        ({"thinking_config": {"thinking_budget": 64}}, {"thinking_token_budget": 64}),
        ({"thinking_config": {"include_thoughts": True, "thinking_level": "LOW"}}, {"reasoning_effort": "low"}),
        ({"response_modalities": ["TEXT"], "safety_settings": []}, {}),
        ({"tools": [LOOK]}, {"tool_choice": "auto"}),
        (
            {"tools": [LOOK], "tool_config": {"function_calling_config": {"mode": "VALIDATED"}}},
            {"tool_choice": "auto"},
        ),
        (
            {
                "tools": [LOOK],
                "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["look"]}},
            },
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
    ],
)
def test_settings_are_those_of_a_chat_completion(
    recorder: Recorder, engine: Engine, run: str, config: dict[str, Any], sent: dict[str, Any]
) -> None:
    client = agent(recorder, run)
    call(client, "say hi", **config)
    client.close()
    assert sent.items() <= engine.requests[-1].items()


def test_names_may_be_in_snake_case_and_fields_may_be_null(recorder: Recorder, engine: Engine, run: str) -> None:
    """As in Google's own examples, and as clients of other languages send them."""
    call = {"function_call": {"name": "look", "args": {"at_noon": True}, "id": None}, "text": None}
    result = {"function_response": {"name": "look", "response": {"result": "noon"}}, "inline_data": None}
    nullable = {"type": "STRING", "nullable": True}
    either = {"any_of": [{"type": "STRING"}], "nullable": True}
    properties = {"any_of": {**nullable, "max_length": "5"}, "b": {**nullable, "enum": ["x"]}, "c": either}
    schema = {"type": "OBJECT", "properties": properties}
    document = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "contents": [
            {"parts": [{"text": "Look."}]},
            {"role": "model", "parts": [{"text": "Hm.", "thought": True, "thought_signature": "YWJj"}, call]},
            {"role": "function", "parts": [result]},
        ],
        "generation_config": {"max_output_tokens": 5, "stop_sequences": None},
        "tools": [{"function_declarations": [{"name": "look", "parameters": schema}], "google_search": None}],
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["look"]}},
        "safety_settings": None,
    }
    status, answer = post(f"{recorder.base(run)}/v1beta/models/toy:generateContent", document)
    assert status == 200, answer
    sent = engine.requests[-1]
    called = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at_noon": true}'}}
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_0", "content": "noon"},
    ]
    assert (sent["max_tokens"], sent["tool_choice"]["function"]["name"], "stop" in sent) == (5, "look", False)
    assert sent["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "any_of": {"type": ["string", "null"], "maxLength": 5},
            "b": {"type": ["string", "null"], "enum": ["x", None]},
            "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }


@pytest.mark.parametrize("stream", [False, True])
def test_errors_reach_the_library_as_its_own(recorder: Recorder, run: str, stream: bool) -> None:
    client = agent(recorder, run)
    with pytest.raises(errors.APIError, match="failed on request"):
        call(client, "fail 429", stream)
    with pytest.raises(errors.APIError, match="token ids"):
        call(client, "tokenless hi", stream)
    client.close()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"contents": [{"parts": [{"inlineData": {}}]}]}, "records only tokens"),
        ({"contents": [{"parts": [{"functionResponse": {"name": "look"}}]}]}, "no functionCall before it"),
        ({"contents": 3}, "does not follow Gemini's API"),
        ({"tools": [{"googleSearch": {}}]}, "googleSearch is one of Google's own"),
        ({"generationConfig": {"candidateCount": 2}}, "call once for each candidate"),
        ({"generationConfig": {"responseLogprobs": True}}, "rows have them without it"),
        ({"cachedContent": "a"}, "does not store contents"),
        ({"cached_content": "a"}, "does not store contents"),
        ({"newField": 1}, "the call has the field newField"),
        ({"generationConfig": {"speechConfig": {"a": 1}}}, "generationConfig has the field speechConfig"),
        ({"generationConfig": {"responseModalities": ["TEXT", "IMAGE"]}}, "the engine answers with TEXT alone"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType is text/x.enum"),
        ({"systemInstruction": {"parts": [{"fileData": {"fileUri": "a"}}]}}, "has the field fileData"),
        (said({"inlineData": {"mimeType": "image/png", "data": "YWJj"}}), "has the field inlineData"),
        (said({"executableCode": {"code": "1 + 1"}}), "has the field executableCode"),
        (said({"functionResponse": {"name": "look", "response": {}}}), "has the field functionResponse"),
        (said({"functionCall": {"name": "look", "args": '{"at": 1}'}}), "'str' object is not a mapping"),
        (said({"functionCall": {"name": "look", "partialArgs": [{}]}}), "has the field partialArgs"),
        ({"contents": [{"parts": [{"codeExecutionResult": {"output": "2"}}]}]}, "has the field codeExecutionResult"),
        ({"contents": [{"parts": [{"text": "a", "inlineData": {}}]}]}, "a part has inlineData and text"),
        ({"contents": [{"role": "system", "parts": [{"text": "a"}]}]}, "a content has role 'system'"),
        (
            {
                "tools": [{"functionDeclarations": [{"name": "look"}]}],
                "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["look"]}},
            },
            "has mode VALIDATED with 1 names",
        ),
    ],
)
def test_what_no_chat_completion_has_is_refused(
    recorder: Recorder, run: str, more: dict[str, Any], problem: str
) -> None:
    document = {"contents": [{"role": "user", "parts": [{"text": "say hi"}]}], **more}
    status, answer = post(f"{recorder.base(run)}/v1beta/models/toy:generateContent", document)
    assert (status, problem in answer["error"]["message"]) == (400, True), answer
