"""Server-sent events, split as they come (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gristmill_recorder.refusals import NotRecorded

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_END_LENGTH = 4


class Event(NamedTuple):
    """raw: as it came, with the empty line that ends it. data: its `data` lines, joined."""

    raw: bytes
    data: bytes


class EventSplitter:
    """most_bytes: of one event."""

    def __init__(self, most_bytes: int) -> None:
        self._rest = bytearray()
        self._most_bytes = most_bytes

    def feed(self, received: bytes) -> Iterator[Event]:
        """The events that are complete with what was received now."""
        # An event may come in a thousand parts: what was searched for its end is not searched again.
        seen, start = max(0, len(self._rest) - _END_LENGTH), 0
        self._rest += received
        for found in _END.finditer(self._rest, seen):
            yield _event(bytes(self._rest[start : found.end()]))
            start = found.end()
        del self._rest[:start]
        if len(self._rest) > self._most_bytes:
            raise NotRecorded(f"the engine sent an event of more than {self._most_bytes} bytes; raise --max-body-bytes")


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and b"\r" not in raw:
        return Event(raw, raw[6:-2])
    lines = [line[5:] for line in raw.splitlines() if line.startswith(b"data:")]
    return Event(raw, b"\n".join(line.removeprefix(b" ") for line in lines))
