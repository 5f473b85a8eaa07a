"""Encodes and decodes `ReadShardResponse` without protobuf's copies.

protobuf copies a `bytes` field when it is set, serialized, parsed and accessed. A shard is one such field, so these
copies would be most of the cost of reading it.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from gristmill._wire.codecs.varints import read_varint, varint
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import trainer_pb2

_DATA, _IS_ZSTD = 0x0A, 0x18
"""Tags of the fields: their numbers (1 and 3) and encodings (length-delimited and varint)."""


def message_of(data: bytes | memoryview, *, is_zstd: bool) -> bytes:
    """Encodes a piece of a shard. Copies it once."""
    flags = bytes((_IS_ZSTD, 1)) if is_zstd else b""
    return b"".join((flags, bytes((_DATA,)), varint(len(data)), data))


def piece_of(message: bytes) -> tuple[memoryview, bool]:
    """Returns a view of the piece of a shard in a message, and whether the piece is a zstd frame.

    Raises InvalidArgumentError for an invalid message.
    """
    view, at = memoryview(message), 0
    data, is_zstd = view[:0], False
    try:
        while at < len(view):
            tag = view[at]
            value, at = read_varint(view, at + 1)
            if tag == _DATA and at + value <= len(view):
                data, at = view[at : at + value], at + value
            elif tag == _IS_ZSTD:
                is_zstd = value != 0
            else:
                return _parsed(message)
    except IndexError:
        return _parsed(message)
    return data, is_zstd


def _parsed(message: bytes) -> tuple[memoryview, bool]:
    """Parses a message that `message_of` did not encode: an invalid message, or one of a newer service."""
    try:
        response = trainer_pb2.ReadShardResponse.FromString(message)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"a message of {len(message)} bytes is not a ReadShardResponse: {error}; read the shard again"
        ) from None
    return memoryview(response.data), response.is_zstd
