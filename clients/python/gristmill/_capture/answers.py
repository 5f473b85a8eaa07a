"""Answers of an engine: reads their samples, and returns what the agent gets of them. Does no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gristmill._engines.completion_calls import CompletionCall, CompletionStream
from gristmill._engines.events import EventSplitter
from gristmill._engines.fields import EngineFields
from gristmill.completions import Sampled, sampled
from gristmill.errors import InvalidArgumentError


class WholeAnswer:
    """An answer that is not streamed."""

    def __init__(self, call: CompletionCall, fields: EngineFields) -> None:
        self._call, self._fields = call, fields
        self._body = bytearray()

    def feed(self, part: bytes) -> bytes:
        """Adds a part. Returns the bytes that the agent may have before the answer is recorded."""
        self._body += part
        return b""

    def end(self) -> tuple[Sequence[Sampled], bytes]:
        """Returns the samples to record after the last part, and the bytes that the agent gets once they are recorded.
        Raises InvalidArgumentError if they cannot be recorded."""
        with _readable(self._fields):
            answer: Any = json.loads(self._body)
            samples = _checked(sampled(answer))
            return samples, json.dumps(self._call.whole(answer), separators=(",", ":")).encode()


class StreamedAnswer:
    """An answer in events. The agent gets the event that completes the answer, and later ones, after it is recorded."""

    def __init__(self, call: CompletionCall, fields: EngineFields) -> None:
        self._stream, self._fields = CompletionStream(call), fields
        self._splitter, self._withheld = EventSplitter(), bytearray()

    def feed(self, part: bytes) -> bytes:
        ready = bytearray()
        with _readable(self._fields):
            for event in self._splitter.feed(part):
                read = self._stream.read(event)
                (self._withheld if self._stream.is_complete else ready).extend(read)
        return bytes(ready)

    def end(self) -> tuple[Sequence[Sampled], bytes]:
        with _readable(self._fields):
            samples = () if self._stream.has_failed else _checked(self._stream.sampled())
        return samples, bytes(self._withheld) + self._splitter.rest()


Answer = WholeAnswer | StreamedAnswer


@contextmanager
def _readable(fields: EngineFields) -> Iterator[None]:
    """Raises InvalidArgumentError if the block cannot read the engine's answer."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"the engine's answer cannot be recorded: {error}; check the argument engine, and {fields.remedy}"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the engine's answer is invalid: {type(error).__name__}: {error}; check that the URL is an engine's"
        ) from None


def _checked(samples: Sequence[Sampled]) -> Sequence[Sampled]:
    for sample in samples:
        if sample.rollout_logprobs is None:
            raise InvalidArgumentError("the answer contains no logprobs")
    return samples
