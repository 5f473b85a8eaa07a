"""Encodes and decodes WriteColumnsRequest without protobuf's copies of its tensors.

The encoding is protobuf's, so other protobuf libraries can read these requests, and this module can read theirs.
Tensors are copied once by the writer and not by the reader, while protobuf's classes copy them four times.
"""

from __future__ import annotations

from collections.abc import Mapping

from gristmill._wire.codecs import tensor_file
from gristmill._wire.codecs.varints import LENGTH_BYTES, read_varint, varint
from gristmill._wire.columns import Array
from gristmill.v1 import trainer_pb2

_VARINT, _LENGTH_DELIMITED = 0, 2
_TENSORS = trainer_pb2.WriteColumnsRequest.DESCRIPTOR.fields_by_name["tensors"].number << 3 | _LENGTH_DELIMITED
_ALIGNMENT = 8


def encode(request: trainer_pb2.WriteColumnsRequest, tensors: Mapping[str, Array]) -> bytes:
    """Encodes a request with these tensors. They start at a multiple of 8 bytes, so that the reader need not copy them.

    request: the request without tensors.
    """
    small, tag = request.SerializeToString(), varint(_TENSORS)
    file = tensor_file.pieces(tensors, len(small) + len(tag) + LENGTH_BYTES)
    return b"".join([small, tag, varint(sum(map(len, file)), LENGTH_BYTES), *file])


class ColumnsRequest:
    """A received request. tensors: a safetensors file, a view of the request if possible."""

    def __init__(self, data: bytes) -> None:
        """Decodes the request. Raises google.protobuf.message.DecodeError for invalid bytes."""
        self._data = data
        small, begin, end = _cut(data)
        request = trainer_pb2.WriteColumnsRequest.FromString(small)
        self.tensors = memoryview(data)[begin:end] if end else memoryview(request.tensors)
        if end and (begin + tensor_file.begin_of_data(self.tensors)) % _ALIGNMENT:
            self.tensors = memoryview(bytes(self.tensors))
        self.run, self.batch, self.mini_batch = request.run, request.batch, request.mini_batch
        self.rank, self.incarnation = request.rank, request.incarnation

    def SerializeToString(self) -> bytes:  # noqa: N802  the interface of protobuf's messages
        return self._data


def _cut(data: bytes) -> tuple[bytes, int, int]:
    """Returns the request without its tensors, and the offsets where the tensors begin and end. If the request has an
    unusual form, returns the whole request and 0, 0, and protobuf then reads or refuses it.
    """
    at = begin = end = 0
    rest: list[bytes] = []
    try:
        while at < len(data):
            field = at
            tag, at = read_varint(data, at)
            size, at = read_varint(data, at)
            if tag & 7 == _LENGTH_DELIMITED:
                at += size
            elif tag & 7 != _VARINT:
                return data, 0, 0
            if tag == _TENSORS:
                begin, end = at - size, at
            else:
                rest.append(data[field:at])
    except IndexError:
        return data, 0, 0
    return (b"".join(rest), begin, end) if at == len(data) else (data, 0, 0)
