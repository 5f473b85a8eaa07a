"""Translates Gemini's `generateContent` and `streamGenerateContent` into chat completions, and the answers back
(https://ai.google.dev/api/generate-content)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import orjson

from gristmill._engines.refusals import refuse, unrecorded
from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.images import data_url, image_part, results
from gristmill_recorder.languages.integers import written
from gristmill_recorder.languages.language import Asking, Document
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
_JSON = "application/json"
# The fields of a call, of its configuration, of a part and so on. Some are not read: they are not for the model, or, as
# the schema of a function's results, engines do not show them to it.
_OF_CALL = frozenset(
    (
        *("contents", "generationConfig", "labels", "model", "safetySettings", "serviceTier", "store"),
        *("systemInstruction", "toolConfig", "tools"),
    )
)
_OF_CONFIG = frozenset(
    (
        *(*_SETTINGS, "candidateCount", "mediaResolution", "responseJsonSchema", "responseMimeType"),
        *("responseModalities", "responseSchema", "thinkingConfig"),
    )
)
_OF_MODEL = frozenset(("functionCall", "text"))
_OF_USER = frozenset(("fileData", "functionResponse", "inlineData", "text"))
_OF_SYSTEM = frozenset(("text",))
_OF_PART = frozenset(("mediaResolution", "partMetadata", "thought", "thoughtSignature"))
_OF_RESULT = frozenset(("id", "name", "parts", "response", "scheduling", "willContinue"))
_OF_FUNCTION = frozenset(
    ("behavior", "description", "name", "parameters", "parametersJsonSchema", "response", "responseJsonSchema")
)
_ROLES = ("user", "function", "tool")
# Of a schema: schemas by name, values, and counts, which clients in Go send as texts.
_BY_NAME, _VALUES = ("properties", "defs", "$defs"), ("default", "enum", "example")
_COUNTS = tuple(f"{end}{what}" for end in ("max", "min") for what in ("Items", "Length", "Properties"))
_STOPS = {"": "STOP", "stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


class GeminiForm(ChatForm):
    """A call of `generateContent`. Raises WrongCall for fields without a counterpart in a chat completion.

    model: from the path. stream: whether it is `streamGenerateContent`.
    """

    def __init__(self, document: Document, asking: Asking, *, model: str, stream: bool) -> None:
        with translating("Gemini"):
            chat = _chat_of(_fields(document)) | {"model": model}
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
    refuse(document, "cachedContent", "the recorder does not store contents")
    _check("the call", document, _OF_CALL)
    chat = _settings(_fields(document.get("generationConfig") or {}))
    chat["messages"] = [*_system(document), *_messages(document["contents"])]
    if tools := [_tool(function) for tool in document.get("tools") or () for function in _functions(_fields(tool))]:
        chat |= {"tools": tools, "tool_choice": _choice(document)}
    return chat


def _settings(config: Document) -> Document:
    refuse(config, "responseLogprobs", "the recorder does not translate logprobs, and rows have them without it")
    _check("generationConfig", config, _OF_CONFIG)
    if (config.get("candidateCount") or 1) != 1:
        raise WrongCall(f"candidateCount is {config['candidateCount']}; call once for each candidate")
    if any(modality != "TEXT" for modality in config.get("responseModalities") or ()):
        raise WrongCall(f"responseModalities is {config['responseModalities']}; the engine answers with TEXT alone")
    chat = {name: config[ours] for ours, name in _SETTINGS.items() if ours in config}
    chat |= _thinking(_fields(config.get("thinkingConfig") or {}))
    schema = config.get("responseJsonSchema") or _schema(config.get("responseSchema"))
    media_type = config.get("responseMimeType") or (_JSON if schema else "text/plain")
    if media_type not in (_JSON, "text/plain"):
        raise WrongCall(f"responseMimeType is {media_type}; set it to text/plain or {_JSON}")
    if media_type == _JSON:
        named = {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
        chat["response_format"] = named if schema else {"type": "json_object"}
    return chat


def _thinking(config: Document) -> Document:
    budget, level = config.get("thinkingBudget", -1), str(config.get("thinkingLevel", "THINKING_LEVEL_UNSPECIFIED"))
    if budget == 0:
        return {"reasoning_effort": "none"}
    chat = {"thinking_token_budget": budget} if budget != -1 else {}
    return chat if level == "THINKING_LEVEL_UNSPECIFIED" else {**chat, "reasoning_effort": level.lower()}


def _system(document: Document) -> Iterator[Document]:
    if words := "".join(part.get("text", "") for part in _parts(document.get("systemInstruction") or {}, _OF_SYSTEM)):
        yield {"role": "system", "content": words}


def _messages(contents: Any) -> Iterator[Document]:
    """Yields the contents as messages. A result names its call by the id; older clients give the name alone, which
    means the first open call of this name."""
    open_calls: list[Document] = []
    count = 0
    for content in [contents] if isinstance(contents, dict) else contents:
        role = content.get("role") or "user"
        if role == "model":
            message = _answer(_parts(content, _OF_MODEL), count)
            called = message.get("tool_calls") or ()
            open_calls += called
            count += len(called)
            yield message
        elif role in _ROLES:
            yield from _given(_parts(content, _OF_USER), open_calls)
        else:
            raise WrongCall(f"a content has role {role!r}; set it to user or model")


def _given(parts: Sequence[Document], open_calls: list[Document]) -> Iterator[Document]:
    """Yields each result of a function as a message, and then the texts and images as another."""
    for part in parts:
        if "functionResponse" in part:
            yield from _result(_fields(part["functionResponse"]), open_calls)
    shown = [_shown(part) for part in parts if "functionResponse" not in part]
    words = "".join(part.get("text", "") for part in shown)
    if any("text" not in part for part in shown):
        yield {"role": "user", "content": shown}
    elif words:
        yield {"role": "user", "content": words}


def _answer(parts: Sequence[Document], count: int) -> Document:
    """Returns the model's message. count: of the earlier calls."""
    said, thoughts = (
        "".join(part.get("text", "") for part in parts if bool(part.get("thought")) is is_thought)
        for is_thought in (False, True)
    )
    calls = [_fields(part["functionCall"]) for part in parts if "functionCall" in part]
    for call in calls:
        _check("a functionCall", call, ("args", "id", "name"))
    called = [
        {
            "id": call.get("id") or f"call_{count + number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps({**(call.get("args") or {})})},
        }
        for number, call in enumerate(calls)
    ]
    message: Document = {"role": "assistant", "content": said}
    # vLLM's own name is `reasoning`, but SGLang takes only this one.
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": called} if called else {})


def _parts(content: Mapping[str, Any], kinds: frozenset[str]) -> list[Document]:
    """Returns the parts of a content that are not empty. Raises WrongCall for a part of another kind than these, or of
    several."""
    given = content.get("parts") or ()
    parts = [_fields(part) for part in ([given] if isinstance(given, dict) else given)]
    for part in parts:
        _check(f"a part of role {content.get('role') or 'user'}", part, kinds | _OF_PART)
        if len(several := sorted(part.keys() & kinds)) > 1:
            raise WrongCall(f"a part has {' and '.join(several)}; send a part for each")
    return [part for part in parts if part.keys() & kinds]


def _shown(part: Mapping[str, Any]) -> Document:
    """Returns a text or an image as part of a message."""
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    file, data = _fields(part.get("fileData") or {}), _fields(part.get("inlineData") or {})
    media_type = str((file or data).get("mimeType"))
    if not media_type.startswith("image/"):
        raise unrecorded(f"part with {', '.join(part) or 'nothing'}")
    if file:
        return image_part(file["fileUri"])
    # Google's libraries send base64 of URLs.
    return image_part(data_url(media_type, data["data"].replace("-", "+").replace("_", "/")))


def _fields(value: Mapping[str, Any]) -> Document:
    """Returns the fields that are not null by their names in camel case. Google's API takes those in snake case too."""
    return {re.sub("_([a-z])", _capital, name): each for name, each in value.items() if each is not None}


def _capital(found: re.Match[str]) -> str:
    return found[1].upper()


def _check(what: str, fields: Document, known: Collection[str]) -> None:
    """Raises WrongCall if a field is set that is not known."""
    if unknown := sorted(name for name, value in fields.items() if value and name not in known):
        raise WrongCall(f"{what} has the field {unknown[0]}, which chat completions do not have; omit it")


def _result(result: Document, open_calls: list[Document]) -> Iterator[Document]:
    _check("a functionResponse", result, _OF_RESULT)
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
    return results(matching[0]["id"], words, [_shown(_fields(part)) for part in result.get("parts") or ()])


def _functions(tool: Mapping[str, Any]) -> Sequence[Document]:
    if others := sorted(tool.keys() - {"functionDeclarations"}):
        raise WrongCall(f"tool {others[0]} is one of Google's own, which the engine does not provide; omit this tool")
    declared: Sequence[Document] = tool.get("functionDeclarations") or ()
    return declared


def _tool(declared: Mapping[str, Any]) -> Document:
    function = _fields(declared)
    _check("a function", function, _OF_FUNCTION)
    parameters = function.get("parametersJsonSchema") or _schema(function.get("parameters"))
    described = {"name": function["name"], "description": function.get("description") or ""}
    return {"type": "function", "function": described | ({"parameters": parameters} if parameters else {})}


def _choice(document: Document) -> Any:
    config = _fields(_fields(document.get("toolConfig") or {}).get("functionCallingConfig") or {})
    names, mode = config.get("allowedFunctionNames") or (), config.get("mode") or "AUTO"
    if mode not in _CHOICES or len(names) > (mode == "ANY"):
        raise WrongCall(
            f"functionCallingConfig has mode {mode} with {len(names)} names; set one of {', '.join(_CHOICES)}, and at "
            "most one name, for ANY"
        )
    return {"type": "function", "function": {"name": names[0]}} if names else _CHOICES[mode]


def _schema(given: Any) -> Any:
    """Returns a schema as JSON Schema. Gemini's has types in capital letters, and whether null is allowed apart."""
    if isinstance(given, list):
        return [_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    schema = {name: _member(name, value) for name, value in _fields(given).items()}
    is_nullable, kind = schema.pop("nullable", False), schema.get("type")
    if isinstance(kind, str):
        schema["type"] = kind.lower()
    return _with_null(schema) if is_nullable else schema


def _with_null(schema: Document) -> Document:
    """Returns a schema that allows null, too."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    values = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **values, "type": [schema["type"], "null"]} if "type" in schema else schema


def _member(name: str, value: Any) -> Any:
    """Returns a field of a schema: a schema, schemas by name, a count, or a value as it is."""
    if name in _BY_NAME:
        return {key: _schema(each) for key, each in value.items()}
    if name in _COUNTS:
        return int(value)
    return value if name in _VALUES else _schema(value)


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
        return {"functionCall": {"id": block.id, "name": block.name, "args": written(block.arguments)}}
    return {"text": block.text, **({"thought": True} if block.kind == "thought" else {})}


def _content(answer: Completion, parts: list[Document], *, is_last: bool) -> Document:
    candidate: Document = {"index": 0, "content": {"role": "model", "parts": parts}}
    more: Document = {}
    if is_last:
        prompt, said = (answer.usage.get(f"{kind}_tokens", 0) for kind in ("prompt", "completion"))
        candidate["finishReason"] = _STOPS.get(answer.finish, "OTHER")
        counts = {"promptTokenCount": prompt, "candidatesTokenCount": said, "totalTokenCount": prompt + said}
        more = {"usageMetadata": counts}
    return {"candidates": [candidate], **more, "modelVersion": answer.model, "responseId": answer.id}
