"""Server-sent events, split as they come (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gristmill_recorder.refusals import NotRecorded

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Event(NamedTuple):
    """raw: as it came, with the empty line that ends it. data: its `data` lines, joined."""

    raw: bytes
    data: bytes


class EventSplitter:
    """most_bytes: of one event."""

    def __init__(self, most_bytes: int) -> None:
        self._rest = b""
        self._most_bytes = most_bytes

    def feed(self, received: bytes) -> Iterator[Event]:
        """The events that are complete with what was received now."""
        text = self._rest + received if self._rest else received
        start = 0
        for found in _END.finditer(text):
            yield _event(text[start : found.end()])
            start = found.end()
        self._rest = text[start:]
        if len(self._rest) > self._most_bytes:
            raise NotRecorded(f"the engine sent an event of more than {self._most_bytes} bytes; raise --max-body-bytes")


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and b"\r" not in raw:
        return Event(raw, raw[6:-2])
    lines = [line[5:] for line in raw.splitlines() if line.startswith(b"data:")]
    return Event(raw, b"\n".join(line.removeprefix(b" ") for line in lines))
