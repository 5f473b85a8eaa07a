"""Server-sent events are split alike, however they come."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from gristmill._engines.events import EventSplitter

LINES = st.lists(st.sampled_from(["data: {}", "data:x", ": ping", "event: message", "id: 1", "data: ä"]), min_size=1)


@given(st.lists(LINES), st.sampled_from(["\n", "\r\n"]), st.data())
def test_it_does_not_matter_where_a_stream_was_cut(blocks: list[list[str]], newline: str, data: st.DataObject) -> None:
    text = "".join(newline.join([*lines, "", ""]) for lines in blocks).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    splitter = EventSplitter()
    events = [event for part in parts for event in splitter.feed(part)]
    assert b"".join(event.raw for event in events) == text
    wanted = [[line[5:].removeprefix(" ") for line in lines if line.startswith("data:")] for lines in blocks]
    assert [event.data for event in events] == ["\n".join(lines).encode() for lines in wanted]


def test_a_long_event_in_many_parts_is_searched_once() -> None:
    """A prompt of a million tokens is one: what was searched for its end again with each part took its square."""
    part = b"1234567," * 1024
    splitter = EventSplitter()
    began = time.process_time()
    for _ in range(2000):
        assert not list(splitter.feed(part))
    (event,) = splitter.feed(b"\n\n")
    assert len(event.raw) == 2000 * len(part) + 2
    assert time.process_time() - began < 5
