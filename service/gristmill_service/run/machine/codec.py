"""Events and states as bytes, for a run's log. MessagePack by the classes' own fields; nothing is unpickled.

A field that is added needs a default, so that what an older version wrote can be read; anything else is a new format.
Format 1 had rows whole; it was never released, and is not read.
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
"""An event's kind, and its fields as bytes."""


def encode_event(event: Event) -> EncodedEvent:
    """Raises InvalidArgumentError for a value that no record can hold."""
    try:
        return type(event).__name__, msgspec.Raw(_encoder.encode(event))
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise InvalidArgumentError(
            f"the request cannot be written to the run's log: {error}; send valid Unicode and integers of 64 bits"
        ) from None


def record_of(events: Sequence[EncodedEvent]) -> bytes:
    """Makes one record of the log: all of these events happened, or none."""
    return _encoder.encode((FORMAT, events))


def decode_events(record: bytes) -> list[Event]:
    """Raises InvalidArgumentError for what this version does not read."""
    try:
        version, events = _record.decode(record)
        _check(version)
        return [_decoders[kind].decode(fields) for kind, fields in events]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise InvalidArgumentError(f"a record of the run's log cannot be read: {error!r}") from None


def encode_state(state: State) -> bytes:
    return _encoder.encode((FORMAT, state))


def decode_state(snapshot: bytes) -> State:
    """Raises InvalidArgumentError for what this version does not read."""
    try:
        version, fields = _snapshot.decode(snapshot)
        _check(version)
        return _state.decode(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the snapshot of a run cannot be read: {error}") from None


def _check(version: int) -> None:
    if version != FORMAT:
        raise InvalidArgumentError(
            f"the run's log has format {version} and this version reads {FORMAT}; use the version of gristmill that "
            "wrote it"
        )
