"""Translates Anthropic's `/v1/messages` into chat completions, and the answers back.

Engines translate messages into chat completions too, but return no token ids for them. This module translates like
vLLM's `entrypoints/anthropic/serving.py`, so that prompts are the same (https://docs.anthropic.com/en/api/messages).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gristmill_recorder.forms.forms import Asking, ChatForm, ChatStream, Document, Event, refuse_media
from gristmill_recorder.refusals import WrongCall

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "chat_template_kwargs")
# Claude Code sends this text with a number that changes with each request. It is removed, because otherwise no prompt
# would extend the previous one.
_BILLING = "x-anthropic-billing-header"
_JSON = "output_config"
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesForm(ChatForm):
    """A call of `/v1/messages`. Raises WrongCall for fields without a counterpart in a chat completion."""

    def __init__(self, document: Document, asking: Asking) -> None:
        try:
            chat = _chat_of(document)
        except (AttributeError, KeyError, TypeError) as error:
            raise WrongCall(
                f"the call does not follow Anthropic's API: {type(error).__name__}: {error}; correct this field"
            ) from None
        super().__init__("chat/completions", chat, asking)
        self.api = "messages"

    def whole(self, answer: Document) -> Document:
        return message_of(answer)

    def stream(self) -> MessageStream:
        return MessageStream(self)


def _chat_of(document: Document) -> Document:
    refuse_media(document.get("messages"))
    chat: Document = {name: document[name] for name in _SAME if document.get(name) is not None}
    chat["messages"] = [*_system(document), *_messages(document.get("messages") or ())]
    if stop := document.get("stop_sequences"):
        chat["stop"] = stop
    if document.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if document.get(_JSON):
        chat |= _output(document[_JSON])
    if tools := document.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = "auto"
    if choice := document.get("tool_choice"):
        chat["tool_choice"] = _tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _system(document: Document) -> Iterator[Document]:
    """Yields one system message with all system texts, or nothing."""
    contents = [document.get("system") or (), *(m["content"] for m in document.get("messages") or () if _is_system(m))]
    parts = [part for content in contents for part in _texts(content) if not part.startswith(_BILLING)]
    if parts:
        yield {"role": "system", "content": "".join(parts)}


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part.get("type") == "text" and part.get("text")]


def _messages(messages: Any) -> Iterator[Document]:
    for message in messages:
        if _is_system(message):
            continue
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _assistant(content or ())
        else:
            yield from _user(content or ())


def _assistant(blocks: Any) -> Document:
    message: Document = {"role": "assistant"}
    if texts := _texts(blocks):
        message["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    thoughts = [block["thinking"] for block in blocks if block.get("type") == "thinking" and block.get("thinking")]
    if thoughts:
        # vLLM's own name is `reasoning`, but it also accepts this one.
        message["reasoning_content"] = "".join(thoughts)
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any]) -> Document:
    arguments = json.dumps(block.get("input") or {})
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _user(blocks: Any) -> Iterator[Document]:
    """Yields each tool result as a message, and then the text as another."""
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            refuse_media([block])
            said = "\n".join(_texts(block.get("content") or ""))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
        elif kind != "text":
            raise WrongCall(
                f"a message contains a part of type {kind}, which chat completions do not have; omit this part"
            )
    if texts := _texts(blocks):
        yield {
            "role": "user",
            "content": texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts],
        }


def _tool(tool: Mapping[str, Any]) -> Document:
    if "input_schema" not in tool:
        raise WrongCall(
            f"tool {tool.get('name')!r} has no input_schema: it is one of Anthropic's own tools, which the engine does "
            "not provide; set input_schema, or omit the tool"
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise WrongCall(f"tool_choice.type is {kind!r}; expected one of tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind]


def _output(config: Mapping[str, Any]) -> Document:
    chat: Document = {}
    if schema := (config.get("format") or {}).get("schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    if effort := config.get("effort"):
        chat["reasoning_effort"] = effort
    return chat


# Answers.


def message_of(completion: Document) -> Document:
    """Translates a chat completion with one choice into a message."""
    (choice,) = completion["choices"]
    usage = completion.get("usage") or {}
    return {
        "id": completion.get("id"),
        "type": "message",
        "role": "assistant",
        "model": completion.get("model"),
        "content": list(_blocks(choice["message"])),
        **_stop(choice.get("finish_reason"), choice.get("stop_reason")),
        "usage": {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)},
    }


def _blocks(message: Mapping[str, Any]) -> Iterator[Document]:
    if thought := _thought(message):
        yield {"type": "thinking", "thinking": thought, "signature": uuid.uuid4().hex}
    if text := message.get("content"):
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}


def _thought(part: Mapping[str, Any]) -> str:
    """Returns the reasoning text. vLLM and SGLang use different field names for it."""
    return part.get("reasoning") or part.get("reasoning_content") or ""


def _input(arguments: str) -> Document:
    """Parses a tool's arguments. If they are not a JSON object, returns them as text in the field `invalid_json`."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"invalid_json": arguments}


def _stop(finish: str | None, sequence: Any) -> Document:
    """Returns the stop reason, and the stop sequence if the engine names one."""
    if finish == "stop" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _STOPS.get(finish or "stop", "end_turn"), "stop_sequence": None}


class MessageStream(ChatStream):
    """Translates the chunks of a completion into events of a message."""

    def __init__(self, form: ChatForm) -> None:
        super().__init__(form)
        self._index = -1
        self._open = ""
        self._call = -1
        self._finish: str | None = None
        self._sequence: Any = None
        self._has_begun = False
        self._usage: Mapping[str, Any] = {}

    def read(self, event: Event) -> bytes:
        chunk = self.read_chunk(event)
        if chunk is None:
            if self.has_failed:
                # The error ends the message: later chunks are not forwarded.
                return _failure(event) if event.data.startswith(b"{") else b""
            return b"".join(self._end()) if self.is_over else b""
        return b"".join(self._events(chunk))

    def _events(self, chunk: Document) -> Iterator[bytes]:
        self._usage = chunk.get("usage") or self._usage
        if not self._has_begun:
            self._has_begun = True
            usage = {"input_tokens": self._usage.get("prompt_tokens", 0), "output_tokens": 0}
            message = {"id": chunk.get("id"), "type": "message", "role": "assistant", "model": chunk.get("model")}
            message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _event_of("message_start", message=message)
        for choice in chunk.get("choices") or ():
            yield from self._deltas(choice.get("delta") or {})
            self._finish = choice.get("finish_reason") or self._finish
            self._sequence = choice.get("stop_reason") or self._sequence

    def _deltas(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := _thought(delta):
            yield from self._block("thinking", thinking="")
            yield self._delta("thinking_delta", thinking=thought)
        if text := delta.get("content"):
            yield from self._block("text", text="")
            yield self._delta("text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("index", 0) != self._call or self._open != "tool_use":
                yield from self._close()
                self._call = call.get("index", 0)
                yield from self._block("tool_use", id=call.get("id"), name=function.get("name"), input={})
            if arguments := function.get("arguments"):
                yield self._delta("input_json_delta", partial_json=arguments)

    def _block(self, kind: str, **content: Any) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._index, self._open = self._index + 1, kind
            yield _event_of("content_block_start", index=self._index, content_block={"type": kind, **content})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=uuid.uuid4().hex)
        if self._open:
            yield _event_of("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, kind: str, **content: Any) -> bytes:
        return _event_of("content_block_delta", index=self._index, delta={"type": kind, **content})

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        usage = self._usage
        counts = {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}
        yield _event_of("message_delta", delta=_stop(self._finish, self._sequence), usage=counts)
        yield _event_of("message_stop")


def _event_of(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **content}) + b"\n\n"


def _failure(event: Event) -> bytes:
    """Translates the engine's error into the format that Anthropic's clients parse."""
    content = orjson.loads(event.data)
    error = content.get("error") if isinstance(content.get("error"), dict) else content
    message = str(error.get("message", "the engine failed"))
    return _event_of("error", error={"type": "api_error", "message": message})
