"""Encode and decode events and states for a run's log, as MessagePack of the classes' fields; nothing is unpickled.

A new field needs a default, so that logs of older versions can be read; any other change requires a new format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import msgspec

from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine import events as kinds
from gristmill_service.run.machine.closed_groups import ClosedGroups
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State

FORMAT = 2

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in vars(kinds).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_state = msgspec.msgpack.Decoder(State)
_record = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, msgspec.Raw]]])
_snapshot = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


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


def encode_state(state: State) -> bytes:
    return snapshot_of(state)()


def snapshot_of(state: State) -> Callable[[], bytes]:
    """Returns a function that encodes the state as it is now, to be called in a thread. Only what is small is encoded
    here. The closed groups are encoded in the thread in parts, because encoding holds the interpreter's lock."""
    closed = {name: cast(ClosedGroups[Any], getattr(state, name)).parts() for name in ("closed", "closed_tags")}
    rest = {field.name: getattr(state, field.name) for field in fields(state) if field.name not in closed}
    start = b"\x92" + _encoder.encode(FORMAT) + _map_header(len(rest) + len(closed)) + _content(rest)

    def encode() -> bytes:
        pieces = [start]
        for name, (count, parts) in closed.items():
            # The content of a map is that of an array of its keys and values, and the last of equal keys counts.
            pieces += [_encoder.encode(name), _map_header(count), *map(_content, parts)]
        # Joining many bytes releases the interpreter's lock.
        return b"".join(pieces)

    return encode


def _map_header(count: int) -> bytes:
    """Returns the header of a map with a length of 32 bits."""
    return b"\xdf" + count.to_bytes(4, "big")


def _content(values: Mapping[Any, Any] | Sequence[Any]) -> bytes:
    """Encodes a map or an array without its header, whose size depends on the length."""
    return _encoder.encode(values)[1 if len(values) < 1 << 4 else 3 if len(values) < 1 << 16 else 5 :]


def decode_state(snapshot: bytes) -> State:
    """Decodes a snapshot. Raises InvalidArgumentError if this version cannot read it."""
    try:
        version, fields = _snapshot.decode(snapshot)
        _check(version)
        return _state.decode(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"the run's snapshot cannot be read: {error}; restore it, or delete the run"
        ) from None


def _check(version: int) -> None:
    if version != FORMAT:
        raise InvalidArgumentError(
            f"the run's log has format {version} and this version reads {FORMAT}; use the version that wrote it"
        )
