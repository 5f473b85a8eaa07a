"""Encode and decode events and states for a run's log, as MessagePack of the classes' fields; nothing is unpickled.

A new field needs a default, so that logs of older versions can be read; any other change requires a new format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine import events as kinds
from gristmill_service.run.machine.archived_groups import ArchivedGroups, Segment
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State

FORMAT = 4


def _encode_archive(value: object) -> list[int]:
    """Encodes the sizes of the segments of archived groups, whose content is not part of the document."""
    if not isinstance(value, ArchivedGroups):
        raise TypeError(f"{type(value).__name__} cannot be encoded")
    return [len(segment) for segment in value.segments]


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_archive)
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in vars(kinds).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_record = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, msgspec.Raw]]])
_start = msgspec.msgpack.Decoder(tuple[int, int])

# The bytes of a piece of a snapshot.
_PIECE_BYTES = 1 << 20


EncodedEvent = tuple[str, msgspec.Raw]
"""The name of an event's class, and the event's encoded fields."""


def encode_event(event: Event) -> EncodedEvent:
    """Encodes an event. Raises InvalidArgumentError for a value that cannot be encoded."""
    try:
        return type(event).__name__, msgspec.Raw(_encoder.encode(event))
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise InvalidArgumentError(
            f"the request cannot be written to the run's log: {error}; send valid Unicode, and 64-bit integers"
        ) from None


def record_of(events: Sequence[EncodedEvent]) -> bytes:
    """Encodes these events as one record of the log, so that either all of them are stored or none."""
    return _encoder.encode((FORMAT, events))


def decode_events(record: bytes) -> list[Event]:
    """Decodes a record. Raises InvalidArgumentError if this version cannot read it."""
    try:
        version, events = _record.decode(record)
        _check(version)
        return [_decoders[kind].decode(fields) for kind, fields in events]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise InvalidArgumentError(
            f"a record of the run's log cannot be read: {error!r}; restore it, or delete the run"
        ) from None


def snapshot_of(state: State) -> Iterator[bytes]:
    """Returns the pieces of a snapshot of the state as it is now, each of at most a megabyte. The iterator is for a
    thread: it copies the archived groups, of which there may be millions, and whose segments never change."""
    segments = state.closed.archive.segments
    encoded = memoryview(_encoder.encode(state))

    def pieces() -> Iterator[bytes]:
        starts = range(0, len(encoded), _PIECE_BYTES)
        yield _encoder.encode((FORMAT, len(starts)))
        for start in starts:
            yield bytes(encoded[start : start + _PIECE_BYTES])
        for segment in segments:
            yield from segment.pieces(_PIECE_BYTES)

    return pieces()


def decode_state(pieces: Iterable[bytes]) -> State:
    """Decodes the pieces of a snapshot, one after the other. Raises InvalidArgumentError if this version cannot read
    it."""
    left = iter(pieces)

    def read_archive(_: type, sizes: list[int]) -> ArchivedGroups:
        return ArchivedGroups([Segment.read(size, left) for size in sizes])

    try:
        version, count = _start.decode(next(left, b""))
        _check(version)
        head = b"".join(islice(left, count))
        return msgspec.msgpack.decode(head, type=State, dec_hook=read_archive)
    except (msgspec.MsgspecError, UnicodeDecodeError, EOFError) as error:
        raise InvalidArgumentError(
            f"the run's snapshot cannot be read: {error}; restore it, or delete the run"
        ) from None


def _check(version: int) -> None:
    if version != FORMAT:
        raise InvalidArgumentError(
            f"the run's log has format {version} and this version reads {FORMAT}; use the version that wrote it"
        )
