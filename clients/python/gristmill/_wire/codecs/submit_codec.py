"""Encodes and decodes SubmitRowsRequest without protobuf's copies of its buffers.

The encoding is protobuf's, so other protobuf libraries can read these requests, and this module can read theirs.
Buffers are copied once by the writer and not by the reader, while protobuf's classes copy them two or three times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from gristmill._wire.codecs import row_codec
from gristmill._wire.codecs.varints import LENGTH_BYTES, fields, varint
from gristmill._wire.codecs.zstd_frames import zstandard
from gristmill._wire.columns import Array, Int64s, Ragged, bytes_of
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError, TooLargeError
from gristmill.v1 import rollout_pb2, rows_pb2

MESSAGE_BYTES = 64 << 20
"""The largest message that clients and the service send or accept."""

Buffer = bytes | memoryview

_ROWS = rollout_pb2.SubmitRowsRequest.DESCRIPTOR.fields_by_name["rows"].number
_APART = (*row_codec.BUFFERS, row_codec.COLUMN_VALUES, "padding")
_NUMBERS = {name: rows_pb2.Rows.DESCRIPTOR.fields_by_name[name].number for name in _APART}
_LENGTH_DELIMITED = 2
_BY_TAG = {number << 3 | _LENGTH_DELIMITED: name for name, number in _NUMBERS.items()}
_ALIGNMENT = 8
_SMALL_BYTES = 256 << 10
"""So few bytes at the end of a request are not searched for buffers: `encode` puts the other fields there."""
# Token ids use about 17 of their 32 bits. A higher level takes longer and gains little.
_ZSTD_LEVEL = 1


class Submission:
    """A received request. Its rows are read on demand. nbytes: the uncompressed size."""

    def __init__(
        self, data: bytes, most_bytes: int = MESSAGE_BYTES, check: Callable[[bytes], None] = lambda data: None
    ) -> None:
        """Decodes the request. most_bytes: the limit of its uncompressed size. check: called with a request that was
        compressed before it is decoded.

        Raises InvalidArgumentError for bytes that are not a SubmitRowsRequest, TooLargeError if it exceeds most_bytes.
        """
        self._data = data
        try:
            self._read(data)
            if self._zstd:
                content = decompressed(self._zstd, most_bytes)
                check(content)
                self._read(content)
        except DecodeError as error:
            raise InvalidArgumentError(
                f"the request is not a message of gristmill.v1: {error}; encode it as the proto files define"
            ) from None

    def _read(self, data: Buffer) -> None:
        parts, self.nbytes = _parts(data), len(data)
        request = rollout_pb2.SubmitRowsRequest.FromString(parts.rest)
        self._rows = request.rows if request.HasField("rows") else rows_pb2.Rows.FromString(parts.small)
        self._buffers, self._column_values = parts.buffers, parts.column_values
        self._zstd: bytes = request.zstd
        self.run: str = request.run
        self.refuses_by_row: bool = request.refuse_by_row

    def rows(self) -> row_codec.Sent:
        """Reads the rows. Raises InvalidArgumentError like `gristmill._wire.codecs.row_codec.read`."""
        return row_codec.read(self._rows, self._buffers, self._column_values)

    def SerializeToString(self) -> bytes:  # noqa: N802  the interface of protobuf's messages
        return self._data


def encode(
    run: str,
    tables: Sequence[Steps],
    prefixes: row_codec.Prefixes | None = None,
    left_out: Mapping[str, Int64s] | None = None,
    *,
    by_row: bool = False,
) -> bytes:
    """Encodes a request for the rows of all tables, which must have the same built-in columns. Each buffer starts at a
    multiple of 8 bytes, so that the service need not copy it.

    prefixes: the first tokens of rows, which are not sent. left_out: for each declared column, how many values of each
        row are not sent. by_row: whether the service refuses only invalid rows, instead of the whole request.
    """
    parts: list[Buffer] = []
    at = 1 + LENGTH_BYTES
    small, extras = row_codec.small_fields(tables, prefixes), _extras(tables, left_out or {})
    small.columns.extend(column for column, _ in extras)
    buffers = [*_buffers(tables, prefixes).items(), *((row_codec.COLUMN_VALUES, memory) for _, memory in extras)]
    for name, memory in buffers:
        head = _head(_NUMBERS[name], sum(map(len, memory)))
        fill = -(at + len(_head(_NUMBERS["padding"], 0)) + len(head)) % _ALIGNMENT
        field = [_head(_NUMBERS["padding"], fill), bytes(fill), head, *memory]
        at += sum(map(len, field))
        parts += field
    parts.append(small.SerializeToString())
    head = varint(_ROWS << 3 | _LENGTH_DELIMITED) + varint(sum(map(len, parts)), LENGTH_BYTES)
    return b"".join([head, *parts, rollout_pb2.SubmitRowsRequest(run=run, refuse_by_row=by_row).SerializeToString()])


def compressed(request: bytes) -> bytes:
    """Compresses a request. Raises InvalidArgumentError if zstandard is not installed."""
    frame = zstandard().ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(request)
    return rollout_pb2.SubmitRowsRequest(zstd=frame).SerializeToString()


def decompressed(frame: bytes, most_bytes: int) -> bytes:
    """Decompresses a request. Allocates at most `most_bytes`. Raises TooLargeError for a larger frame, and
    InvalidArgumentError for an invalid one."""
    module = zstandard()
    try:
        size = module.frame_content_size(frame)
        if size > most_bytes:
            # Do not raise ResourceExhaustedError, because clients would send the same request again.
            raise TooLargeError(
                f"zstd: the uncompressed request has {size} bytes, and max_message_bytes is {most_bytes}; send fewer "
                "rows per request, or raise the setting"
            )
        if size < 0:
            raise InvalidArgumentError(
                "zstd: the frame does not contain its content size; enable the content size in the compressor"
            )
        content: bytes = module.ZstdDecompressor().decompress(frame, max_output_size=size)
        return content
    except module.ZstdError as error:
        raise InvalidArgumentError(
            f"zstd: the {len(frame)} bytes are not a zstd frame: {error}; compress the request with zstd"
        ) from None


def check_zstd() -> None:
    """Raises InvalidArgumentError if zstandard is not installed."""
    zstandard()


def _buffers(tables: Sequence[Steps], prefixes: row_codec.Prefixes | None) -> dict[str, list[Buffer]]:
    """Returns each buffer to send, as pieces of memory."""
    by_table = [row_codec.buffers(table) for table in tables]
    memory: dict[str, list[Buffer]] = {}
    for name in row_codec.BUFFERS:
        if not any(name in columns for columns in by_table):
            continue
        # A mask of ones is sent if other rows have a different mask.
        columns = [columns.get(name, table.loss_mask) for columns, table in zip(by_table, tables, strict=True)]
        memory[name] = _memory(columns)
    if prefixes is not None:
        rows = [row for columns in by_table for row in columns["tokens"].arrays()]
        memory["tokens"] = [bytes_of(row[length:]) for row, length in zip(rows, prefixes.lengths.tolist(), strict=True)]
    return memory


def _extras(tables: Sequence[Steps], left_out: Mapping[str, Int64s]) -> list[tuple[rows_pb2.Column, list[Buffer]]]:
    """Returns each declared column of the rows, and the pieces of memory of its values."""
    extras = []
    for name in dict.fromkeys(name for table in tables for name in table.extras):
        columns = [table.extras[name].values for table in tables if name in table.extras]
        if (counts := left_out.get(name)) is None:
            memory = _memory(columns)
        else:
            # Rows without the column have empty arrays, so they omit nothing.
            rows = [row for table in tables for row in _rows_of(table, name)]
            memory = [bytes_of(row[count:]) for row, count in zip(rows, counts.tolist(), strict=True)]
        extras.append((row_codec.described(name, tables, counts), memory))
    return extras


def _rows_of(table: Steps, name: str) -> list[Array]:
    extra = table.extras.get(name)
    return [np.empty(0, np.uint8)] * len(table) if extra is None else extra.values.arrays()


def _memory(columns: Sequence[Ragged]) -> list[Buffer]:
    dtype = np.result_type(*(column.values.dtype for column in columns))
    arrays: list[Array] = []
    for column in columns:
        arrays += [column.values] if column.is_compact() else column.arrays()
    return [bytes_of(array.astype(dtype, copy=False)) for array in arrays]


class _Parts(NamedTuple):
    """The parts of an encoded request.

    buffers, column_values: views of the rows' large fields. small: the other fields of the rows. rest: the request's
        other fields.
    """

    buffers: dict[str, memoryview]
    column_values: list[memoryview]
    small: bytes
    rest: bytes


def _parts(data: Buffer) -> _Parts:
    """Splits a request without copying its buffers. A request that contains `rows` twice is not split, because protobuf
    merges them; it must be small. Raises google.protobuf.message.DecodeError for invalid bytes."""
    buffers, column_values, view = dict[str, memoryview](), list[memoryview](), memoryview(data)
    small: list[memoryview] = []
    rest: list[memoryview] = []
    try:
        for tag, start, begin, end in fields(data):
            if tag != _ROWS << 3 | _LENGTH_DELIMITED:
                rest.append(view[start:end])
            elif small and len(data) > _SMALL_BYTES:
                raise DecodeError("rows occurs twice")
            elif small:
                return _Parts({}, [], b"", bytes(data))
            else:
                small = _small(data, begin, end, buffers, column_values)
    except IndexError:
        raise DecodeError("it ends within a field") from None
    return _Parts(buffers, column_values, b"".join(small), b"".join(rest))


def _small(
    data: Buffer, at: int, end: int, buffers: dict[str, memoryview], column_values: list[memoryview]
) -> list[memoryview]:
    """Returns the fields of the rows between these offsets but the large ones, which it adds to the others."""
    small, view = [memoryview(b"")], memoryview(data)
    for tag, start, begin, after in fields(data, at, end):
        if tag not in _BY_TAG:
            if end - start <= _SMALL_BYTES:
                break
            continue
        small.append(view[at:start])
        at = after
        if (name := _BY_TAG[tag]) == row_codec.COLUMN_VALUES:
            column_values.append(view[begin:after])
        else:
            buffers[name] = view[begin:after]
    return [*small, view[at:end]]


def read_rows(data: Buffer) -> row_codec.Sent:
    """Reads an encoded Rows message without copying its buffers. Raises like `row_codec.read`, and
    google.protobuf.message.DecodeError for invalid bytes."""
    buffers, column_values = dict[str, memoryview](), list[memoryview]()
    try:
        small = _small(data, 0, len(data), buffers, column_values)
    except IndexError:
        raise DecodeError("it ends within a field") from None
    return row_codec.read(rows_pb2.Rows.FromString(b"".join(small)), buffers, column_values)


def _head(number: int, size: int) -> bytes:
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(size)
