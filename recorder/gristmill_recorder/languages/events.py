"""The events of an engine's stream, of limited size."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill._engines import events
from gristmill._engines.events import Event
from gristmill_recorder.refusals import NotRecorded


class EventSplitter(events.EventSplitter):
    """Splits a stream into events. Raises NotRecorded for an event of more than most_bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def feed(self, received: bytes) -> Iterator[Event]:
        yield from super().feed(received)
        if self.buffered_bytes > self._most_bytes:
            raise NotRecorded(
                f"an event of the engine's stream is larger than --max-body-bytes, {self._most_bytes}; raise "
                "--max-body-bytes"
            )
