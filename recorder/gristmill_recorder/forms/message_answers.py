"""Chat completions as Anthropic's messages, whole and streamed (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gristmill_recorder.forms.events import Event
from gristmill_recorder.forms.forms import ChatForm, ChatStream, Document

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DONE = "message_stop"


def message_of(completion: Document) -> Document:
    """The message that a chat completion of one choice is."""
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
    """vLLM and SGLang each have a name for it."""
    return part.get("reasoning") or part.get("reasoning_content") or ""


def _input(arguments: str) -> Document:
    """What a model wrote need not be an object in JSON: then it is told as it stands."""
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"invalid_json": arguments}


def _stop(finish: str | None, sequence: Any) -> Document:
    """The engine says which of the `stop_sequences` it met."""
    if finish == "stop" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _STOPS.get(finish or "stop", "end_turn"), "stop_sequence": None}


class MessageStream(ChatStream):
    """Chunks of a completion, of which the agent gets events of a message."""

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
                # Nothing of what may follow is told: the error ends the message.
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
            yield _told("message_start", message=message)
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
            yield _told("content_block_start", index=self._index, content_block={"type": kind, **content})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=uuid.uuid4().hex)
        if self._open:
            yield _told("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, kind: str, **content: Any) -> bytes:
        return _told("content_block_delta", index=self._index, delta={"type": kind, **content})

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        usage = self._usage
        counts = {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}
        yield _told("message_delta", delta=_stop(self._finish, self._sequence), usage=counts)
        yield _told(_DONE)


def _told(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **content}) + b"\n\n"


def _failure(event: Event) -> bytes:
    """The engine's own words, as Anthropic's libraries read an error."""
    found = orjson.loads(event.data)
    told = found.get("error") if isinstance(found.get("error"), dict) else found
    message = str(told.get("message", "the engine failed"))
    return _told("error", error={"type": "api_error", "message": message})
