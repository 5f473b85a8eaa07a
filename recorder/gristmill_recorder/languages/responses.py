"""Translates OpenAI's `/v1/responses` into chat completions, and the answers back.

vLLM's own route does not return the logprobs of all tokens (https://platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import orjson

from gristmill._engines.refusals import refuse, refuse_media
from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.images import image_part, results
from gristmill_recorder.languages.language import Asking, Document
from gristmill_recorder.languages.translation import Block, Completion, TranslatedStream, in_one_system, translating
from gristmill_recorder.refusals import WrongCall

# Fields of a call that a chat completion does not have, or has in another form. All others stay as they are.
_TRANSLATED = frozenset(
    (
        *("input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "include"),
        *("background", "conversation", "previous_response_id", "prompt", "store", "truncation", "max_tool_calls"),
        *("metadata", "client_metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "stream_options", "top_logprobs", "user"),
    )
)
# What an answer repeats of its call, with the values of calls that do not set it.
_REPEATED: Document = {
    **dict.fromkeys(("instructions", "max_output_tokens", "metadata", "previous_response_id", "user")),
    "parallel_tool_calls": True,
    "store": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "truncation": "disabled",
    "tool_choice": "auto",
    "tools": [],
    "reasoning": {},
    "text": {"format": {"type": "text"}},
}
_WHOLE = ("", "stop", "tool_calls")
_REASONS = {"length": "max_output_tokens"}
_STATEFUL = "the recorder does not store responses"
_LOGPROBS = "message.output_text.logprobs"
_CALLS = ("function_call", "custom_tool_call")
_NAMES = ("namespace", "name")
_IMAGE = "input_image"
# The argument that stands for the input of a custom tool, which is a text.
_INPUT = "input"


class ResponsesForm(ChatForm):
    """A call of `/v1/responses`. Raises WrongCall for fields without a counterpart in a chat completion."""

    def __init__(self, document: Document, asking: Asking) -> None:
        refuse(document, "background", "the answer of a background call cannot be recorded")
        for name in ("previous_response_id", "conversation", "prompt"):
            refuse(document, name, f"{_STATEFUL}, so send the whole conversation as input")
        with translating("OpenAI"):
            if (document.get("n") or 1) != 1:
                raise WrongCall(f"n is {document['n']}; call once for each answer")
            if document.get("top_logprobs") or _LOGPROBS in (document.get("include") or ()):
                raise WrongCall(
                    "the call asks for logprobs, which the recorder does not translate; omit top_logprobs and "
                    f"{_LOGPROBS}: the rows have logprobs without them"
                )
            chat = _chat_of(document)
        super().__init__("chat/completions", chat, asking)
        self.api = "responses"
        self._repeated = {**_REPEATED, **{name: document[name] for name in _REPEATED if document.get(name) is not None}}
        self._tools = {_full_name(tool): tool for tool in _tools(document)}

    def whole(self, answer: Document) -> Document:
        completion = Completion.of(answer)
        add_words(completion)
        return self.response(completion)

    def stream(self) -> TranslatedStream:
        return TranslatedStream(self, ResponseWriter(self))

    def response(self, answer: Completion, status: str = "") -> Document:
        """Returns the answer as a response. status: set while the answer is incomplete."""
        reason = None if answer.finish in _WHOLE else _REASONS.get(answer.finish, answer.finish)
        return {
            **self._repeated,
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.model,
            "status": status or ("incomplete" if reason else "completed"),
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [] if status else [self.item(block, answer) for block in answer.blocks],
            "usage": None if status else _usage(answer.usage),
        }

    def item(self, block: Block, answer: Completion, status: str = "completed") -> Document:
        """Returns the output item of a block. An item in progress is empty."""
        is_whole = status == "completed"
        text = block.text if is_whole else ""
        item: Document = {"id": f"item_{answer.id}_{block.number}", "type": self.kind(block), "status": status}
        if block.kind == "thought":
            return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}] if is_whole else []}
        if block.kind == "text":
            return {**item, "role": "assistant", "content": [_part(text)] if is_whole else []}
        call = {**item, "call_id": block.id, **self.name(block)}
        if item["type"] == "custom_tool_call":
            return {**call, "input": custom_input(block) if is_whole else ""}
        return {**call, "arguments": text}

    def name(self, block: Block) -> Document:
        """Returns the name of the tool of a call, and its namespace if it has one."""
        tool = self._tools.get(block.name) or {"name": block.name}
        return {name: tool[name] for name in _NAMES if name in tool}

    def kind(self, block: Block) -> str:
        if block.kind == "call":
            tool = self._tools.get(block.name) or {}
            return "custom_tool_call" if tool.get("type") == "custom" else "function_call"
        return "reasoning" if block.kind == "thought" else "message"


def add_words(answer: Completion) -> list[Block]:
    """Adds an empty text to an answer without words and calls, and returns it: agents send back only items, and without
    one the conversation would lose the answer."""
    return [] if any(block.kind != "thought" for block in answer.blocks) else [answer.add("text", {})]


def custom_input(block: Block) -> str:
    """Returns the input of a custom tool; what the model wrote, if it is not the only argument."""
    arguments = block.arguments
    value = arguments.get(_INPUT)
    return value if isinstance(value, str) and len(arguments) == 1 else block.text


def _part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> Document:
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + completion,
    }


# Calls.


def _chat_of(document: Document) -> Document:
    chat = {name: value for name, value in document.items() if name not in _TRANSLATED}
    chat["messages"] = [*_messages(document)]
    if (most := document.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    if document.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if effort := (document.get("reasoning") or {}).get("effort"):
        chat["reasoning_effort"] = effort
    if response_format := _format((document.get("text") or {}).get("format")):
        chat["response_format"] = response_format
    if tools := _tools(document):
        chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = _choice(document.get("tool_choice") or "auto")
    return chat


def _format(asked: Mapping[str, Any] | None) -> Document | None:
    if asked is None or asked["type"] == "text":
        return None
    if asked["type"] == "json_object":
        return {"type": "json_object"}
    if asked["type"] != "json_schema":
        raise WrongCall(f"text.format has type {asked['type']}; set it to text, json_object or json_schema")
    schema = {name: asked[name] for name in ("name", "description", "schema", "strict") if asked.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _tools(document: Document) -> list[Document]:
    """Returns the tools of a call. Those of a namespace, as Codex groups them, are returned each with its name."""
    return [member for tool in document.get("tools") or () for member in _members(tool)]


def _members(tool: Document) -> Iterator[Document]:
    """Yields the tools of a namespace, the first with the description of all; another tool as it is."""
    if tool["type"] != "namespace":
        yield tool
        return
    shared = tool.get("description")
    for member in tool["tools"]:
        described = "\n\n".join(filter(None, (shared, member.get("description"))))
        yield {**member, "namespace": tool["name"], "description": described}
        shared = None


def _full_name(tool: Mapping[str, Any]) -> str:
    """Returns a chat completion's name of a tool or call: namespace and name joined."""
    return "__".join(tool[name] for name in _NAMES if tool.get(name))


def _tool(tool: Mapping[str, Any]) -> Document:
    kind = tool["type"]
    if kind == "function":
        names = ("description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        return {"type": "function", "function": {"name": _full_name(tool), **function}}
    if kind == "custom":
        parameters = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
        described = "\n\n".join(text for text in (tool.get("description"), _grammar(tool)) if text)
        function = {"name": _full_name(tool), "description": described, "parameters": parameters}
        return {"type": "function", "function": function}
    raise WrongCall(
        f"a tool has type {kind}, one of OpenAI's own, which the engine does not provide; omit this tool, or turn it "
        "off in the agent"
    )


def _grammar(tool: Mapping[str, Any]) -> str:
    """Returns the grammar of a custom tool's input as words for the model. The engine does not enforce it."""
    definition = (tool.get("format") or {}).get("definition")
    return f"The input follows this grammar:\n{definition}" if definition else ""


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice["type"] not in ("function", "custom"):
        raise WrongCall(f"tool_choice has type {choice['type']}; set it to auto, none, required, or a function's name")
    return {"type": "function", "function": {"name": _full_name(choice)}}


def _messages(document: Document) -> Iterator[Document]:
    """Yields the instructions and the items as messages: all that the model said at once is one."""
    given = document.get("input") or ()
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    instructions = document.get("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += [each for is_said, group in groupby(items, _is_said) for each in _of_group(is_said, [*group])]
    return in_one_system(messages, "\n\n")


def _of_group(is_said: bool, items: Sequence[Document]) -> Iterator[Document]:
    if is_said:
        refuse_media(items)
        yield _answer(items)
    else:
        for item in items:
            yield from _given(item)


def _kind(item: Mapping[str, Any]) -> str:
    return item.get("type") or "message"


def _is_said(item: Mapping[str, Any]) -> bool:
    """Returns whether the model said this item."""
    return _kind(item) in ("reasoning", *_CALLS) or (_kind(item) == "message" and item["role"] == "assistant")


def _given(item: Mapping[str, Any]) -> Iterator[Document]:
    kind = _kind(item)
    if kind in ("function_call_output", "custom_tool_call_output"):
        refuse_media([{"content": item["output"]}], (_IMAGE,))
        yield from results(item["call_id"], _text(item["output"]), _images(item["output"]))
        return
    if kind != "message":
        raise WrongCall(f"an input item has type {kind}, which chat completions do not have; omit this item")
    role, content = "system" if item["role"] == "developer" else item["role"], item.get("content")
    refuse_media([item], (_IMAGE,) if role == "user" else ())
    yield {"role": role, "content": _parts(content) if _images(content) else _text(content)}


def _answer(items: Sequence[Mapping[str, Any]]) -> Document:
    said = "".join(_text(item.get("content")) for item in items if _kind(item) == "message")
    thoughts = "".join(_thought(item) for item in items if _kind(item) == "reasoning")
    calls = [_call(item) for item in items if _kind(item) in _CALLS]
    message: Document = {"role": "assistant", "content": said}
    # vLLM's own name is `reasoning`, but SGLang takes only this one.
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _thought(item: Mapping[str, Any]) -> str:
    """Returns the words of a thought; without them its summary, as vLLM does."""
    words = _text(item.get("content")) or _text(item.get("summary"))
    if not words and item.get("encrypted_content"):
        raise WrongCall("a reasoning item has only encrypted_content, which no engine can read; omit this item")
    return words


def _call(item: Mapping[str, Any]) -> Document:
    is_custom = item["type"] == "custom_tool_call"
    arguments = json.dumps({_INPUT: item["input"]}) if is_custom else item["arguments"]
    return {"id": item["call_id"], "type": "function", "function": {"name": _full_name(item), "arguments": arguments}}


def _images(content: Any) -> list[Document]:
    return [part for part in _parts(content) if part["type"] != "text"]


def _text(content: Any) -> str:
    return "".join(part["text"] for part in _parts(content) if part["type"] == "text")


def _parts(content: Any) -> list[Document]:
    """Returns the texts and images of a content."""
    return [_shown(part) for part in ([{"text": content}] if isinstance(content, str) else content or ())]


def _shown(part: Any) -> Document:
    if part.get("type") == _IMAGE:
        return image_part(part.get("image_url"))
    if not part.keys() & {"text", "refusal"}:
        raise WrongCall(f"a part of type {part.get('type')} has no text; omit this part")
    return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}


# Answers.


class ResponseWriter:
    """Writes the events of a streamed response."""

    def __init__(self, form: ResponsesForm) -> None:
        self._form, self._answer, self._number = form, Completion(), 0

    def begun(self, answer: Completion) -> Iterator[bytes]:
        self._answer = answer
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._form.response(answer, "in_progress"))

    def opened(self, block: Block) -> Iterator[bytes]:
        item = self._form.item(block, self._answer, "in_progress")
        yield self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind == "text":
            yield self._of(block, "content_part.added", content_index=0, part=_part(""))

    def extended(self, block: Block, text: str) -> Iterator[bytes]:
        name, _, more = _EVENTS[self._form.kind(block)]
        # The input of a custom tool is known only at the end.
        if name != _CUSTOM:
            yield self._of(block, f"{name}.delta", delta=text, **more)

    def closed(self, block: Block) -> Iterator[bytes]:
        item = self._form.item(block, self._answer)
        name, field, more = _EVENTS[item["type"]]
        text = item["input"] if name == _CUSTOM else block.text
        if name == _CUSTOM:
            yield self._of(block, f"{name}.delta", delta=text)
        elif block.kind == "call":
            more = {"name": item["name"]}
        yield self._of(block, f"{name}.done", **{field: text}, **more)
        if block.kind == "text":
            yield self._of(block, "content_part.done", content_index=0, part=_part(text))
        yield self._event("response.output_item.done", output_index=block.number, item=item)

    def ended(self, answer: Completion) -> Iterator[bytes]:
        for block in add_words(answer):
            yield from self.opened(block)
            yield from self.closed(block)
        response = self._form.response(answer)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, message: str) -> Iterator[bytes]:
        response = self._form.response(self._answer, "failed")
        yield self._event(
            "response.failed", response={**response, "error": {"code": "server_error", "message": message}}
        )

    def _of(self, block: Block, kind: str, **content: Any) -> bytes:
        item = f"item_{self._answer.id}_{block.number}"
        return self._event(f"response.{kind}", item_id=item, output_index=block.number, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + orjson.dumps(event) + b"\n\n"


_CUSTOM = "custom_tool_call_input"
# The name of the events with the text of an item, the field of the whole text, and the other fields.
_EVENTS: dict[str, tuple[str, str, Document]] = {
    "reasoning": ("reasoning_text", "text", {"content_index": 0}),
    "message": ("output_text", "text", {"content_index": 0, "logprobs": []}),
    "function_call": ("function_call_arguments", "arguments", {}),
    "custom_tool_call": (_CUSTOM, "input", {}),
}
