"""The messages of ReadShard, written and read by hand: the bytes of `ReadShardResponse`, without its copies.

protobuf copies a `bytes` field when it is set, when the message is serialized, when it is parsed, and at each access.
A shard is nothing else, so that these would be most of what a pull costs.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from gristmill.errors import InvalidArgumentError
from gristmill.v1 import trainer_pb2

_DATA, _IS_ZSTD = 0x0A, 0x18
"""The tags of the fields: their numbers (1, 3), and how they are encoded (length and bytes, varint)."""


def message_of(data: bytes | memoryview, *, is_zstd: bool) -> bytes:
    """The message with a piece of a shard, copied once."""
    head = bytearray((_IS_ZSTD, 1) if is_zstd else ())
    head.append(_DATA)
    rest = len(data)
    while rest > 0x7F:
        head.append(rest & 0x7F | 0x80)
        rest >>= 7
    head.append(rest)
    return b"".join((head, data))


def piece_of(message: bytes) -> tuple[memoryview, bool]:
    """The piece of a shard that a message brings, as a view of it, and whether that is a frame of zstd.

    Raises InvalidArgumentError for bytes that are no message.
    """
    view, at = memoryview(message), 0
    data, is_zstd = view[:0], False
    try:
        while at < len(view):
            tag = view[at]
            value, at = _varint(view, at + 1)
            if tag == _DATA and at + value <= len(view):
                data, at = view[at : at + value], at + value
            elif tag == _IS_ZSTD:
                is_zstd = value != 0
            else:
                return _parsed(message)
    except IndexError:
        return _parsed(message)
    return data, is_zstd


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number that stands there, and where it ends."""
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _parsed(message: bytes) -> tuple[memoryview, bool]:
    """Reads a message that `message_of` did not make: one of a newer service with more fields, or none at all."""
    try:
        response = trainer_pb2.ReadShardResponse.FromString(message)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"a message of {len(message)} bytes is no ReadShardResponse: {error}; read the shard again"
        ) from None
    return memoryview(response.data), response.is_zstd
