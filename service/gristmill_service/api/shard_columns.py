"""Shards without the columns that a trainer does not want: their bytes are not sent.

Works on a shard's bytes as stores give them, whole files or the compact form: what is left is again such a form, of a
file without those tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill._wire.codecs import compact_shards
from gristmill._wire.codecs.compact_shards import PART, Form, Part
from gristmill._wire.column_spec import BUILT_IN, of_column
from gristmill.errors import InvalidArgumentError, UnavailableError


def file_with(columns: Collection[str], pieces: Iterator[bytes]) -> Iterator[bytes | memoryview]:
    """The safetensors file without the declared columns but these. pieces: the file, cut anywhere.

    Raises InvalidArgumentError for a column that it does not have.
    """
    stream = _Stream(pieces)
    header = _header(stream, columns)
    yield header.text
    for begin, end in header.kept:
        yield from stream.span(begin, end)


def compact_with(columns: Collection[str], pieces: Iterator[bytes]) -> Iterator[bytes | memoryview]:
    """The same of a shard's compact form."""
    stream = _Stream(pieces)
    first = stream.take(compact_shards.FIRST_BYTES)
    found = compact_shards.describe(first + stream.take(compact_shards.head_size(first) - len(first)))
    # The first part begins with the file's header.
    header = _header(stream, columns)
    parts, spans = [], list[tuple[int, int]]()
    for part, _, begin, end in found.parts:
        into = max(0, header.was - begin)
        kept = [(max(low, begin + into), min(high, end)) for low, high in header.kept if low < end and high > begin]
        if part.form == Form.VERBATIM:
            own = [(part.at + low - begin, part.at + high - begin) for low, high in kept]
        else:
            # It is one tensor.
            own = [(part.at, part.at + part.nbytes)] if kept else []
        if own or into:
            size = sum(high - low for low, high in own)
            parts.append(part._replace(nbytes=size + (len(header.text) if into else 0)))
            spans += own
    yield _head(parts, found.lengths, len(header.text) + sum(high - low for low, high in header.kept))
    yield header.text
    for begin, end in spans:
        yield from stream.span(begin, end)


def _head(parts: list[Part], lengths: NDArray[np.uint32], size: int) -> bytes:
    table = np.zeros(len(parts), PART)
    for name in PART.names or ():
        if hasattr(Part, name):
            table[name] = [getattr(part, name) for part in parts]
    tokens, responses = lengths.astype(np.int64)
    return compact_shards.head(table, tokens, responses, size)


class _Header(NamedTuple):
    """text: the file's header without some tensors. was: bytes of the one that it had. kept: what stays of the file
    behind that, as ranges of the file."""

    text: bytes
    was: int
    kept: list[tuple[int, int]]


def _header(stream: _Stream, columns: Collection[str]) -> _Header:
    size = int.from_bytes(stream.take(8), "little")
    entries: dict[str, Any] = orjson.loads(stream.take(size))
    declared = {name.rpartition("/")[2] for name in entries.keys() - {"__metadata__"}} - BUILT_IN
    known = declared.difference(*map(of_column, declared))
    if unknown := sorted(set(columns) - known):
        raise InvalidArgumentError(
            f"columns: the shard has no column {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}: ask for "
            "those"
        )
    tensors = declared.difference(columns, *(of_column(name) for name in columns))
    left: dict[str, Any] = {}
    kept: list[tuple[int, int]] = []
    offset, was = 0, 8 + size
    for name, entry in entries.items():
        if name == "__metadata__":
            left[name] = entry
        elif name.rpartition("/")[2] not in tensors:
            begin, end = entry["data_offsets"]
            left[name] = entry | {"data_offsets": [offset, offset + end - begin]}
            offset += end - begin
            if begin < end:
                kept.append((was + begin, was + end))
    text = orjson.dumps(left)
    text += b" " * (-len(text) % 8)
    return _Header(len(text).to_bytes(8, "little") + text, was, kept)


class _Stream:
    """Bytes that come in pieces, read in order."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next bytes. Raises UnavailableError where there are fewer."""
        return b"".join(self.span(self._at, self._at + count))

    def span(self, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes `begin:end` of all, of which none before `begin` are needed any more."""
        while self._at < end:
            if not len(self._piece):
                self._piece = memoryview(next(self._pieces, b""))
                if not len(self._piece):
                    raise UnavailableError(f"a shard ended after {self._at} bytes; read it again")
            taken = self._piece[: (begin if self._at < begin else end) - self._at]
            if self._at >= begin:
                yield taken
            self._at += len(taken)
            self._piece = self._piece[len(taken) :]
