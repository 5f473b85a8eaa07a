"""Encode and decode events and states for a run's log, as MessagePack of the classes' fields; nothing is unpickled.

A new field needs a default, so that logs of older versions can be read; any other change requires a new format. Format
1 stored rows in events; it was never released, and cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine import events as kinds
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
    return _encoder.encode((FORMAT, state))


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
