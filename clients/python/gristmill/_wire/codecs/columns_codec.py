"""Encodes and decodes the messages of WriteColumns without protobuf's copies of large tensors.

The encoding is protobuf's, so other protobuf libraries can read these messages, and this module can read theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from google.protobuf.message import DecodeError

from gristmill._wire.codecs import tensor_file
from gristmill._wire.codecs.varints import fields, varint
from gristmill.v1 import trainer_pb2

_LENGTH_DELIMITED = 2
_TENSORS = trainer_pb2.WriteColumnsRequest.DESCRIPTOR.fields_by_name["tensors"].number << 3 | _LENGTH_DELIMITED
_ALIGNMENT = 8

PART_BYTES = 1 << 20
"""The size of a part. Large enough to be fast, and smaller than the usual `max_message_bytes`."""


def messages(request: trainer_pb2.WriteColumnsRequest, file: bytes | memoryview) -> Iterator[bytes]:
    """Yields the messages that write a safetensors file: one, or several for a large file.

    request: the request without its tensors.
    """
    if len(file) <= PART_BYTES:
        yield request.SerializeToString() + _tensors(file)
        return
    head = trainer_pb2.WriteColumnsRequest(size_bytes=len(file))
    head.MergeFrom(request)
    yield head.SerializeToString()
    yield from parts(file)


def parts(file: bytes | memoryview) -> Iterator[bytes]:
    """Yields the messages after the first one of a file in parts."""
    view = memoryview(file)
    for start in range(0, len(view), PART_BYTES):
        yield _tensors(view[start : start + PART_BYTES])


def part_of(data: bytes) -> memoryview:
    """Returns the tensors of a message, a view if possible. Raises google.protobuf.message.DecodeError for invalid
    bytes."""
    small, begin, end = _cut(data)
    trainer_pb2.WriteColumnsRequest.FromString(small)
    return memoryview(data)[begin:end]


class ColumnsRequest:
    """A received request: its only message, or the first of several, whose tensors are assigned later.

    tensors: a safetensors file, a view of the message if possible.
    """

    def __init__(self, data: bytes) -> None:
        """Decodes the message. Raises google.protobuf.message.DecodeError for invalid bytes."""
        self._data = data
        small, begin, end = _cut(data)
        request = trainer_pb2.WriteColumnsRequest.FromString(small)
        self.tensors = memoryview(data)[begin:end]
        if (begin + tensor_file.begin_of_data(self.tensors)) % _ALIGNMENT:
            # numpy copies without the GIL.
            self.tensors = np.array(self.tensors).data
        self.run, self.batch, self.mini_batch = request.run, request.batch, request.mini_batch
        self.rank, self.incarnation, self.size_bytes = request.rank, request.incarnation, request.size_bytes

    def messages(self) -> Iterator[bytes]:
        """Yields the messages again, to forward them."""
        yield self._data
        if self.size_bytes:
            yield from parts(self.tensors)


def _tensors(file: bytes | memoryview) -> bytes:
    return b"".join((varint(_TENSORS), varint(len(file)), file))


def _cut(data: bytes) -> tuple[bytes, int, int]:
    """Returns the request without its tensors, and the offsets where the tensors begin and end; 0 and 0 without any.
    Raises google.protobuf.message.DecodeError for invalid bytes."""
    begin = end = 0
    rest: list[bytes] = []
    try:
        for tag, start, at, after in fields(data):
            if tag == _TENSORS:
                begin, end = at, after
            else:
                rest.append(data[start:after])
    except IndexError:
        raise DecodeError("it ends within a field") from None
    return b"".join(rest), begin, end
