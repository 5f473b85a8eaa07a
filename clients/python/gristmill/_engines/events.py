"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

DONE = b"[DONE]"

_END, _USUAL_END = re.compile(rb"\r\n\r\n|\n\n|\r\r"), re.compile(rb"\n\n")
_END_LENGTH = 4


class Event(NamedTuple):
    """raw: the whole event, including the empty line at its end. data: its `data` lines, joined."""

    raw: bytes
    data: bytes


class EventSplitter:
    """Splits a stream into events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """The size of the event that is not complete yet."""
        return len(self._rest)

    def feed(self, received: bytes) -> Iterator[Event]:
        """Adds received bytes. Yields the events that are complete now."""
        # An event may arrive in a thousand parts: do not search earlier parts again.
        seen, start = max(0, len(self._rest) - _END_LENGTH), 0
        self._rest += received
        # Several times as fast, and no engine sends carriage returns.
        pattern = _END if self._rest.find(b"\r", seen) >= 0 else _USUAL_END
        for end in pattern.finditer(self._rest, seen):
            yield _event(bytes(self._rest[start : end.end()]))
            start = end.end()
        del self._rest[:start]

    def rest(self) -> bytes:
        """Returns what follows the last complete event."""
        return bytes(self._rest)


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and b"\r" not in raw:
        return Event(raw, raw[6:-2])
    lines = [line[5:] for line in raw.splitlines() if line.startswith(b"data:")]
    return Event(raw, b"\n".join(line.removeprefix(b" ") for line in lines))
