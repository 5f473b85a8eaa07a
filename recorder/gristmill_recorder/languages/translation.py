"""Translates an answer of the engine, a chat completion, into another language block by block.

A block is a thought, a text or a call of a tool: what other languages call an item or a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from gristmill._engines.events import Event
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.languages.chat import ChatForm, ChatStream
from gristmill_recorder.languages.integers import loads
from gristmill_recorder.languages.language import Document
from gristmill_recorder.refusals import WrongCall


@dataclass(slots=True)
class Block:
    """A part of an answer. number: its position. text: its words, or the arguments of a call. id, name: of a call."""

    kind: Literal["thought", "text", "call"]
    number: int
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def arguments(self) -> Document:
        """The arguments of a call. If they are not a JSON object, they are a text in the field `invalid_json`."""
        parsed = self._parsed()
        return parsed if isinstance(parsed, dict) else {"invalid_json": self.text}

    @property
    def is_whole(self) -> bool:
        """Whether the arguments of a call are JSON."""
        return bool(self.text) and self._parsed() is not None

    def _parsed(self) -> Any:
        try:
            return loads(self.text.encode() or b"{}")
        except (orjson.JSONDecodeError, RecursionError):
            return None


@dataclass(slots=True)
class Completion:
    """An answer, or what has arrived of it. id, model: of the engine. finish: the stop reason. stop: a stop string, if
    the engine names it. usage: counts of tokens."""

    id: str = ""
    model: str = ""
    blocks: list[Block] = field(default_factory=list)
    finish: str = ""
    stop: Any = None
    usage: Document = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Document) -> Completion:
        """Reads a chat completion with one choice."""
        completion = cls()
        (choice,) = answer["choices"]
        completion.note(answer, choice)
        for kind, text, call in _pieces(choice["message"]):
            completion.add(kind, call).text += text
        return completion

    def note(self, answer: Document, choice: Mapping[str, Any]) -> None:
        self.id, self.model = answer.get("id") or self.id, answer.get("model") or self.model
        self.usage = answer.get("usage") or self.usage
        self.finish = choice.get("finish_reason") or self.finish
        self.stop = choice.get("stop_reason") or self.stop

    def add(self, kind: Any, call: Mapping[str, Any]) -> Block:
        name = (call.get("function") or {}).get("name") or ""
        if kind == "call" and not name:
            raise ValueError("it calls a tool without a name")
        block = Block(kind, len(self.blocks), id=call.get("id") or "", name=name)
        self.blocks.append(block)
        return block


class Writer(Protocol):
    """Writes a streamed answer in a language. All methods yield events for the agent."""

    def begun(self, answer: Completion) -> Iterator[bytes]: ...

    def opened(self, block: Block) -> Iterator[bytes]: ...

    def extended(self, block: Block, text: str) -> Iterator[bytes]: ...

    def closed(self, block: Block) -> Iterator[bytes]: ...

    def ended(self, answer: Completion) -> Iterator[bytes]: ...

    def failed(self, message: str) -> Iterator[bytes]: ...


class TranslatedStream(ChatStream):
    """Reads the chunks of a chat completion with one choice, and hands its blocks to a writer."""

    def __init__(self, form: ChatForm, writer: Writer) -> None:
        super().__init__(form)
        self._writer, self._answer = writer, Completion()
        self._has_begun = False
        self._open: Block | None = None
        self._call = 0
        self._later = ""

    def read(self, event: Event) -> bytes:
        return b"".join(self._written(event))

    def _written(self, event: Event) -> Iterator[bytes]:
        had_failed = self.has_failed
        chunk = self.read_chunk(event)
        if chunk is not None:
            yield from self._chunk(chunk)
        elif self.has_failed:
            # The error ends the answer: later chunks are not forwarded.
            if not had_failed:
                yield from self._writer.failed(_message(event))
        elif self.is_over:
            yield from self._close()
            yield from self._writer.ended(self._answer)

    def _chunk(self, chunk: Document) -> Iterator[bytes]:
        choices: Sequence[Document] = chunk.get("choices") or ({},)
        if any(choice.get("index") for choice in choices):
            raise ValueError("it has several choices, and the call asks for one")
        for choice in choices:
            self._answer.note(chunk, choice)
        if not self._has_begun:
            self._has_begun = True
            yield from self._writer.begun(self._answer)
        for kind, text, call in (piece for choice in choices for piece in _pieces(choice.get("delta") or {})):
            if kind == "text" and self._open is not None and self._open.kind == "call":
                # Engines stream spaces within a call. As in vLLM, they follow it.
                self._later += text
            else:
                yield from self._extend(kind, text, call)

    def _extend(self, kind: str, text: str, call: Mapping[str, Any]) -> Iterator[bytes]:
        index = call["index"] if kind == "call" else 0
        if self._open is None or self._open.kind != kind or self._call != index:
            yield from self._close()
            self._open, self._call = self._answer.add(kind, call), index
            yield from self._writer.opened(self._open)
        if text:
            self._open.text += text
            yield from self._writer.extended(self._open, text)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield from self._writer.closed(self._open)
        self._open, later, self._later = None, self._later, ""
        if later:
            yield from self._extend("text", later, {})
            yield from self._close()


@contextmanager
def translating(language: str) -> Iterator[None]:
    """Raises WrongCall if the block cannot read a request."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WrongCall(
            f"the call does not follow {language}'s API: {type(error).__name__}: {error}; correct this field"
        ) from None


def in_one_system(messages: Sequence[Document], between: str) -> Iterator[Document]:
    """Yields one message with the system texts before the first answer, joined by `between`; then the other messages. A
    later system message stays in its place, so that earlier prompts do not change, as the user's: many templates take a
    system message only at the start."""
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    if words := [message["content"] for message in messages[:first] if message["role"] == "system"]:
        yield {"role": "system", "content": between.join(words)}
    for place, message in enumerate(messages):
        if message["role"] != "system":
            yield message
        elif place > first:
            yield {**message, "role": "user"}


def _pieces(part: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields the kind and the text of each block in a message, or in a delta of one; and the call if it is one. Raises
    ValueError for what no other language has."""
    if unknown := [name for name in ("audio", "function_call") if part.get(name)]:
        raise ValueError(f"it has the field {unknown[0]}, which is not translated")
    # vLLM and SGLang use different names for thoughts.
    if thought := part.get("reasoning") or part.get("reasoning_content"):
        yield "thought", thought, {}
    for text in (part.get("content"), part.get("refusal")):
        if text:
            yield "text", text, {}
    for call in part.get("tool_calls") or ():
        yield "call", (call.get("function") or {}).get("arguments") or "", call


def _message(event: Event) -> str:
    content = orjson.loads(event.data)
    error = content.get("error")
    return str((error if isinstance(error, dict) else content).get("message", "the engine failed"))
