"""Encode and decode events and states for a run's log, as MessagePack of the classes' fields; nothing is unpickled.

A new field needs a default, so that logs of older versions can be read; any other change requires a new format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, Literal, cast

import msgspec

from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine import events as kinds
from gristmill_service.run.machine.closed_groups import ClosedGroups
from gristmill_service.run.machine.events import Event, GroupKey
from gristmill_service.run.machine.state import State

FORMAT = 3

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in vars(kinds).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_state = msgspec.msgpack.Decoder(State)
_record = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, msgspec.Raw]]])
_start = msgspec.msgpack.Decoder(tuple[int, int])
_part = msgspec.msgpack.Decoder(tuple[Literal["closed", "closed_tags"], list[GroupKey | int | str]])

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
    """Returns the pieces of a snapshot of the state as it is now, each of about a megabyte. Only what is small is
    encoded here. The iterator, which is for a thread, encodes the closed groups in parts, because encoding holds the
    interpreter's lock."""
    closed = {name: cast(ClosedGroups[Any], getattr(state, name)).parts() for name in ("closed", "closed_tags")}
    rest = {field.name: getattr(state, field.name) for field in fields(state) if field.name not in closed}
    encoded = memoryview(_encoder.encode(rest))

    def pieces() -> Iterator[bytes]:
        starts = range(0, len(encoded), _PIECE_BYTES)
        yield _encoder.encode((FORMAT, len(starts)))
        for start in starts:
            yield bytes(encoded[start : start + _PIECE_BYTES])
        for name, parts in closed.items():
            for part in parts:
                yield _encoder.encode((name, part))

    return pieces()


def decode_state(pieces: Iterable[bytes]) -> State:
    """Decodes the pieces of a snapshot, one after the other. Raises InvalidArgumentError if this version cannot read
    it."""
    left = iter(pieces)
    try:
        version, count = _start.decode(next(left, b""))
        _check(version)
        state = _state.decode(b"".join(islice(left, count)))
        for name, part in map(_part.decode, left):
            cast(ClosedGroups[Any], getattr(state, name)).extend(part)
        return state
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"the run's snapshot cannot be read: {error}; restore it, or delete the run"
        ) from None


def _check(version: int) -> None:
    if version != FORMAT:
        raise InvalidArgumentError(
            f"the run's log has format {version} and this version reads {FORMAT}; use the version that wrote it"
        )
