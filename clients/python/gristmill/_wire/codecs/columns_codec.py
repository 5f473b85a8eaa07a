"""WriteColumnsRequest as bytes, by hand: its tensors are copied once when it is written, and viewed when it is read.

Any protobuf library reads what is written here, and what any of them wrote is read here. protobuf's own classes would
copy the tensors four times on their way.
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
    """The request with these tensors, which stand at a multiple of 8 bytes, so that they can be used where they are.

    request: without its tensors.
    """
    small, tag = request.SerializeToString(), varint(_TENSORS)
    file = tensor_file.pieces(tensors, len(small) + len(tag) + LENGTH_BYTES)
    return b"".join([small, tag, varint(sum(map(len, file)), LENGTH_BYTES), *file])


class ColumnsRequest:
    """One request as it came. tensors: a safetensors file, a view of the request where its tensors can be used so."""

    def __init__(self, data: bytes) -> None:
        """Raises google.protobuf.message.DecodeError for what is no WriteColumnsRequest."""
        self._data = data
        small, begin, end = _cut(data)
        request = trainer_pb2.WriteColumnsRequest.FromString(small)
        self.tensors = memoryview(data)[begin:end] if end else memoryview(request.tensors)
        if end and (begin + tensor_file.begin_of_data(self.tensors)) % _ALIGNMENT:
            self.tensors = memoryview(bytes(self.tensors))
        self.run, self.batch, self.mini_batch = request.run, request.batch, request.mini_batch
        self.rank, self.incarnation = request.rank, request.incarnation

    def SerializeToString(self) -> bytes:  # noqa: N802  as protobuf's own messages have it
        return self._data


def _cut(data: bytes) -> tuple[bytes, int, int]:
    """The request without its tensors, and where these stand in it. Where that cannot be told, all of it, and nowhere:
    protobuf reads it, or refuses it."""
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
