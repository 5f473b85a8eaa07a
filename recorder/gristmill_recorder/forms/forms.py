"""Translates requests, so that the engine returns token ids, and removes these from the answers for agents.

A form belongs to one call. It implements the call's API, and reads the answer, whole or streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from gristmill.completions import ChunkReader, Sampled, sampled
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.refusals import NotRecorded, WrongCall
from gristmill_recorder.splicing.conversation import ChoiceReader

Document = dict[str, Any]
DONE = b"[DONE]"

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_END_LENGTH = 4

_MEDIA = ("image", "audio", "video", "file")
_IDS, _VERSIONS, _ROUTES = "return_token_ids", "return_weight_versions", "return_routed_experts"
_SGLANG_IDS = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
# Fields of answers that an agent gets only if its request set the flag named here. SGLang can be started with a flag
# that adds routed experts to every answer.
_ASKED_BY = {
    **dict.fromkeys(("token_ids", "response_token_ids", "prompt_token_ids"), _IDS),
    **dict(zip(("input_ids", "output_ids"), _SGLANG_IDS, strict=True)),
    "weight_versions": _VERSIONS,
    "routed_experts": _ROUTES,
}


class Event(NamedTuple):
    """A server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    raw: the whole event, including the empty line at its end. data: its `data` lines, joined.
    """

    raw: bytes
    data: bytes


class EventSplitter:
    """Splits a stream into events. Raises NotRecorded for an event of more than most_bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._rest = bytearray()
        self._most_bytes = most_bytes

    def feed(self, received: bytes) -> Iterator[Event]:
        """Adds received bytes. Yields the events that are complete now."""
        # An event may arrive in a thousand parts: do not search earlier parts again.
        seen, start = max(0, len(self._rest) - _END_LENGTH), 0
        self._rest += received
        for end in _END.finditer(self._rest, seen):
            yield _event(bytes(self._rest[start : end.end()]))
            start = end.end()
        del self._rest[:start]
        if len(self._rest) > self._most_bytes:
            raise NotRecorded(
                f"an event of the engine's stream is larger than --max-body-bytes, {self._most_bytes}; raise "
                "--max-body-bytes"
            )


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and b"\r" not in raw:
        return Event(raw, raw[6:-2])
    lines = [line[5:] for line in raw.splitlines() if line.startswith(b"data:")]
    return Event(raw, b"\n".join(line.removeprefix(b" ") for line in lines))


class Asking(NamedTuple):
    """The data that the recorder requests. engine: selects the API for token ids. logprobs: whether to request them."""

    engine: Literal["vllm", "sglang"]
    logprobs: bool


class Stream(Protocol):
    """Reads a streamed answer event by event."""

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended. From then on, events are buffered until the answer is recorded."""

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended."""

    @property
    def has_failed(self) -> bool:
        """Whether the engine reported an error. Then nothing is recorded."""

    def read(self, event: Event) -> bytes:
        """Returns the bytes to send to the agent. Raises InvalidArgumentError if token ids are missing."""

    def choices(self) -> list[Document]:
        """Returns the choices of a chat completion, without their tokens; none of another answer."""

    def sampled(self) -> list[Sampled]:
        """Returns the sampled choices. Raises InvalidArgumentError like `gristmill.completions.sampled`."""


class Form(Protocol):
    """A call. api: its label in metrics. path: its path at the engine."""

    api: str
    path: str

    @property
    def request(self) -> Document:
        """The request body for the engine."""

    def whole(self, answer: Document) -> Document:
        """Converts an answer that is not streamed into the answer for the agent. May change it in place."""

    def stream(self) -> Stream: ...


class ChatForm:
    """A call of `/v1/chat/completions` or `/v1/completions`. Raises WrongCall if its answer could not be recorded."""

    def __init__(self, api: str, document: Document, asking: Asking) -> None:
        self.api, self.path = api, f"v1/{api}"
        self._document, self._asking = document, asking
        self._is_chat = api == "chat/completions"
        _refuse(document, "use_beam_search", "beam search does not sample tokens")
        _refuse(document, "echo", "the prompt would be recorded as sampled")
        if document.get("include_reasoning") is False:
            raise WrongCall("include_reasoning is false, and the engine would omit token ids; omit include_reasoning")
        refuse_media(document.get("messages"))
        _refuse(document, "prompt_embeds", "embeddings have no token ids")
        self.choices = _count(document.get("n")) * (1 if self._is_chat else _prompts(document.get("prompt")))
        self._keeps_logprobs = _wants_logprobs(document)
        self._hidden = [part for part, asked in _ASKED_BY.items() if not document.get(asked)]

    @property
    def request(self) -> Document:
        more: Document = {}
        is_sglang = self._asking.engine == "sglang"
        if not (is_sglang and self._is_chat and self._document.get("stream")):
            more[_IDS] = True
        if is_sglang and self._is_chat:
            more |= dict.fromkeys(_SGLANG_IDS, True)
        if not is_sglang:
            more[_VERSIONS] = True
        if self._asking.logprobs and not self._keeps_logprobs:
            # Request the logprob of the sampled token only. SGLang takes 0 to mean no logprobs.
            more["logprobs"] = True if self._is_chat else int(is_sglang)
        return {**self._document, **more}

    def whole(self, answer: Document) -> Document:
        self._strip(answer)
        return answer

    def stream(self) -> ChatStream:
        return ChatStream(self)

    def strip_chunk(self, chunk: Document) -> Document | None:
        """Removes the recorder's fields from a chunk. Returns None if nothing is left for the agent."""
        had_extension = "sglext" in chunk
        self._strip(chunk)
        is_empty = had_extension and "sglext" not in chunk and not chunk.get("choices") and not chunk.get("usage")
        return None if is_empty else chunk

    @property
    def comes_first(self) -> bool:
        """Whether the first chunk of a stream contains the prompt's token ids, as with vLLM."""
        return self._asking.engine == "vllm"

    def _strip(self, answer: Document) -> None:
        for part in (answer, answer.get("sglext") or {}, *(answer.get("choices") or ())):
            for name in self._hidden:
                part.pop(name, None)
        if "sglext" in answer and not answer["sglext"]:
            del answer["sglext"]
        for choice in answer.get("choices") or ():
            if not self._keeps_logprobs and "logprobs" in choice:
                choice["logprobs"] = None


class ChatStream:
    """Reads the chunks of a completion."""

    def __init__(self, form: ChatForm) -> None:
        self._form, self._reader, self._choices = form, ChunkReader(), ChoiceReader()
        self.is_over = self.has_failed = False
        self._is_first = form.comes_first

    @property
    def is_complete(self) -> bool:
        return self._reader.finished >= self._form.choices

    def choices(self) -> list[Document]:
        return self._choices.choices()

    def sampled(self) -> list[Sampled]:
        return self._reader.sampled()

    def read(self, event: Event) -> bytes:
        chunk = self.read_chunk(event)
        if chunk is None:
            return event.raw
        kept = self._form.strip_chunk(chunk)
        return b"" if kept is None else b"data: " + orjson.dumps(kept) + b"\n\n"

    def read_chunk(self, event: Event) -> Document | None:
        """Reads the event's chunk, and returns it; None if the event contains none, or an error."""
        if event.data == DONE:
            self.is_over = True
        if not event.data.startswith(b"{"):
            return None
        chunk: Document = orjson.loads(event.data)
        if "error" in chunk or chunk.get("object") == "error":
            self.has_failed = True
            return None
        self._reader.read(chunk)
        self._choices.read(chunk)
        if self._is_first and chunk.get("choices"):
            self._is_first = False
            if not self._reader.has_prompt:
                raise InvalidArgumentError("the first chunk of the stream does not contain the prompt's token ids")
        return chunk


class ResponsesForm:
    """A call of `/v1/responses`. vLLM returns token ids for it, but not all logprobs."""

    api, path = "responses", "v1/responses"

    def __init__(self, document: Document, asking: Asking) -> None:
        if asking.engine != "vllm" or asking.logprobs:
            raise WrongCall(
                "answers of /v1/responses do not contain the logprobs of all tokens; use chat completions, or start "
                "the recorder with --no-logprobs and --engine vllm"
            )
        _refuse(document, "background", "the answer of a background call cannot be recorded")
        if not isinstance(items := document.get("input"), str):
            refuse_media(items)
        self._document, self._keeps = document, bool(document.get("enable_response_messages"))

    @property
    def request(self) -> Document:
        return {**self._document, "enable_response_messages": True}

    def whole(self, answer: Document) -> Document:
        if not self._keeps:
            answer.pop("input_messages", None)
            answer.pop("output_messages", None)
        return answer

    def stream(self) -> ResponseStream:
        return ResponseStream(self)


class ResponseStream:
    """Reads the events of a response. The last event contains the whole response."""

    def __init__(self, form: ResponsesForm) -> None:
        self._form, self._answer = form, dict[str, Any]()
        self._sampled: list[Sampled] = []
        self.is_complete = self.is_over = self.has_failed = False

    def choices(self) -> list[Document]:
        return []

    def sampled(self) -> list[Sampled]:
        return self._sampled

    def read(self, event: Event) -> bytes:
        if not event.data.startswith(b"{"):
            return event.raw
        content: Document = orjson.loads(event.data)
        kind = content.get("type", "")
        if kind in ("error", "response.failed"):
            self.has_failed = True
        if kind in ("response.completed", "response.incomplete"):
            self._sampled = sampled(content["response"])
            self.is_complete = self.is_over = True
        if "response" not in content:
            return event.raw
        self._form.whole(content["response"])
        return f"event: {kind}\n".encode() + b"data: " + orjson.dumps(content) + b"\n\n"


def refuse_media(items: Any) -> None:
    """Raises WrongCall for images, audio, video and files: the row would be trained without them."""
    for item in items if isinstance(items, list) else ():
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type", "")) if isinstance(part, dict) else ""
            if any(medium in kind for medium in _MEDIA):
                raise WrongCall(
                    f"a message contains a part of type {kind}, but the recorder records only tokens; submit these "
                    "rows with a client, and declare columns for the images"
                )


def _refuse(document: Document, name: str, reason: str) -> None:
    if document.get(name):
        raise WrongCall(f"{name} is set, but {reason}; omit {name}")


def _wants_logprobs(document: Document) -> bool:
    asked = document.get("logprobs")
    return asked is not None and asked is not False


def _count(n: Any) -> int:
    """Returns the number of choices per prompt. The engine refuses an invalid n."""
    return n if isinstance(n, int) and n > 0 else 1


def _prompts(prompt: Any) -> int:
    """Returns the number of prompts in a call of `/v1/completions`."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
