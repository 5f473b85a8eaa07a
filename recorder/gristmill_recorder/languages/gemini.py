"""Translates Gemini's `generateContent` and `streamGenerateContent` into chat completions, and the answers back
(https://ai.google.dev/api/generate-content)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.images import data_url, image_part, results
from gristmill_recorder.languages.language import Asking, Document, refuse, unrecorded
from gristmill_recorder.languages.translation import Block, Completion, TranslatedStream, translating
from gristmill_recorder.refusals import WrongCall

_SETTINGS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
# VALIDATED is AUTO whose calls follow their schemas: whether they do is the engine's.
_CHOICES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_SNAKE = {"inlineData": "inline_data", "fileData": "file_data", "mimeType": "mime_type", "fileUri": "file_uri"}
_STOPS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}


class GeminiForm(ChatForm):
    """A call of `generateContent`. Raises WrongCall for fields without a counterpart in a chat completion.

    model: from the path. stream: whether it is `streamGenerateContent`.
    """

    def __init__(self, document: Document, asking: Asking, *, model: str, stream: bool) -> None:
        refuse(document, "cachedContent", "the recorder does not store contents")
        with translating("Gemini"):
            chat = _chat_of(document) | {"model": model}
        if stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        super().__init__("chat/completions", chat, asking)
        self.api = "generateContent"

    def whole(self, answer: Document) -> Document:
        completion = Completion.of(answer)
        return _content(completion, [_part(block) for block in completion.blocks], is_last=True)

    def stream(self) -> TranslatedStream:
        return TranslatedStream(self, GeminiWriter())


# Calls.


def _chat_of(document: Document) -> Document:
    config = document.get("generationConfig") or {}
    if (config.get("candidateCount") or 1) != 1:
        raise WrongCall(f"candidateCount is {config['candidateCount']}; call once for each candidate")
    refuse(config, "responseLogprobs", "the recorder does not translate logprobs, and rows have them without it")
    chat = {name: config[ours] for ours, name in _SETTINGS.items() if config.get(ours) is not None}
    chat["messages"] = [*_system(document), *_messages(document["contents"])]
    if config.get("responseMimeType") == "application/json":
        schema = config.get("responseJsonSchema") or _schema(config.get("responseSchema"))
        named = {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
        chat["response_format"] = named if schema else {"type": "json_object"}
    if tools := [_tool(function) for tool in document.get("tools") or () for function in _functions(tool)]:
        chat |= {"tools": tools, "tool_choice": _choice(document)}
    return chat


def _system(document: Document) -> Iterator[Document]:
    given = document.get("systemInstruction") or {}
    if words := "".join(part["text"] for part in given.get("parts") or ()):
        yield {"role": "system", "content": words}


def _messages(contents: Any) -> Iterator[Document]:
    """Yields the contents as messages. A result names its call by the id; older clients give the name alone, which
    means the first open call of this name."""
    open_calls: list[Document] = []
    count = 0
    for content in [contents] if isinstance(contents, dict) else contents:
        parts = content.get("parts") or ()
        if content.get("role") == "model":
            message = _answer(parts, count)
            called = message.get("tool_calls") or ()
            open_calls += called
            count += len(called)
            yield message
            continue
        for part in parts:
            if (result := part.get("functionResponse")) is not None:
                yield from _result(result, open_calls)
        shown = [_shown(part) for part in parts if part.get("functionResponse") is None]
        words = "".join(part.get("text", "") for part in shown)
        if any("text" not in part for part in shown):
            yield {"role": "user", "content": shown}
        elif words:
            yield {"role": "user", "content": words}


def _answer(parts: Sequence[Mapping[str, Any]], count: int) -> Document:
    """Returns the model's message. count: of the earlier calls."""
    said, thoughts = (
        "".join(part["text"] for part in parts if "text" in part and bool(part.get("thought")) is is_thought)
        for is_thought in (False, True)
    )
    calls = [part["functionCall"] for part in parts if part.get("functionCall")]
    called = [
        {
            "id": call.get("id") or f"call_{count + number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call.get("args") or {})},
        }
        for number, call in enumerate(calls)
    ]
    message: Document = {"role": "assistant", "content": said}
    return message | ({"reasoning": thoughts} if thoughts else {}) | ({"tool_calls": called} if called else {})


def _shown(part: Mapping[str, Any]) -> Document:
    """Returns a text or an image as part of a message."""
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    data, file = _field(part, "inlineData") or {}, _field(part, "fileData") or {}
    media_type = str(_field(data or file, "mimeType"))
    if not media_type.startswith("image/"):
        raise unrecorded(f"part with {', '.join(part) or 'nothing'}")
    if file:
        return image_part(_field(file, "fileUri"))
    # Google's libraries send base64 of URLs.
    return image_part(data_url(media_type, data["data"].replace("-", "+").replace("_", "/")))


def _field(part: Mapping[str, Any], name: str) -> Any:
    """Returns a field by this name, or by the one in snake case that Google's library gives to some."""
    return part.get(name) or part.get(_SNAKE[name])


def _result(result: Mapping[str, Any], open_calls: list[Document]) -> Iterator[Document]:
    name, identity = result["name"], result.get("id")
    matching = [
        call for call in open_calls if identity == call["id"] or (not identity and name == call["function"]["name"])
    ]
    if not matching:
        raise WrongCall(f"a functionResponse of {name!r} has no functionCall before it; send the whole conversation")
    open_calls.remove(matching[0])
    said = result.get("response") or {}
    # Clients wrap a text, because a response is an object.
    words = said["result"] if said.keys() == {"result"} and isinstance(said["result"], str) else json.dumps(said)
    return results(matching[0]["id"], words, [_shown(part) for part in result.get("parts") or ()])


def _functions(tool: Mapping[str, Any]) -> Sequence[Document]:
    if others := sorted(tool.keys() - {"functionDeclarations"}):
        raise WrongCall(f"tool {others[0]} is one of Google's own, which the engine does not provide; omit this tool")
    declared: Sequence[Document] = tool.get("functionDeclarations") or ()
    return declared


def _tool(function: Mapping[str, Any]) -> Document:
    parameters = function.get("parametersJsonSchema") or _schema(function.get("parameters"))
    described = {"name": function["name"], "description": function.get("description") or ""}
    return {"type": "function", "function": described | ({"parameters": parameters} if parameters else {})}


def _choice(document: Document) -> Any:
    config = (document.get("toolConfig") or {}).get("functionCallingConfig") or {}
    names, mode = config.get("allowedFunctionNames") or (), config.get("mode") or "AUTO"
    if mode not in _CHOICES or len(names) > (mode == "ANY"):
        raise WrongCall(
            f"functionCallingConfig has mode {mode} with {len(names)} names; set one of {', '.join(_CHOICES)}, and at "
            "most one name, for ANY"
        )
    return {"type": "function", "function": {"name": names[0]}} if names else _CHOICES[mode]


def _schema(schema: Any) -> Any:
    """Returns a schema with the types of JSON Schema: Gemini's are in capital letters."""
    if isinstance(schema, list):
        return [_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    lower = {"type": schema["type"].lower()} if isinstance(schema.get("type"), str) else {}
    return {name: _schema(value) for name, value in schema.items()} | lower


# Answers.


class GeminiWriter:
    """Writes the chunks of a streamed answer. A call is one part."""

    def __init__(self) -> None:
        self._answer = Completion()

    def begun(self, answer: Completion) -> Iterator[bytes]:
        self._answer = answer
        yield from ()

    def opened(self, block: Block) -> Iterator[bytes]:
        yield from ()

    def extended(self, block: Block, text: str) -> Iterator[bytes]:
        if block.kind != "call":
            yield self._chunk([_part(Block(block.kind, block.number, text))])

    def closed(self, block: Block) -> Iterator[bytes]:
        if block.kind == "call":
            yield self._chunk([_part(block)])

    def ended(self, answer: Completion) -> Iterator[bytes]:
        yield self._chunk([{"text": ""}], is_last=True)

    def failed(self, message: str) -> Iterator[bytes]:
        error = {"code": 500, "message": message, "status": "INTERNAL"}
        yield b"data: " + orjson.dumps({"error": error}) + b"\r\n\r\n"

    def _chunk(self, parts: list[Document], *, is_last: bool = False) -> bytes:
        return b"data: " + orjson.dumps(_content(self._answer, parts, is_last=is_last)) + b"\r\n\r\n"


def _part(block: Block) -> Document:
    if block.kind == "call":
        return {"functionCall": {"id": block.id, "name": block.name, "args": block.arguments}}
    return {"text": block.text, **({"thought": True} if block.kind == "thought" else {})}


def _content(answer: Completion, parts: list[Document], *, is_last: bool) -> Document:
    candidate: Document = {"index": 0, "content": {"role": "model", "parts": parts}}
    more: Document = {}
    if is_last:
        prompt, said = (answer.usage.get(f"{kind}_tokens", 0) for kind in ("prompt", "completion"))
        candidate["finishReason"] = _STOPS.get(answer.finish, "STOP")
        counts = {"promptTokenCount": prompt, "candidatesTokenCount": said, "totalTokenCount": prompt + said}
        more = {"usageMetadata": counts}
    return {"candidates": [candidate], **more, "modelVersion": answer.model, "responseId": answer.id}
