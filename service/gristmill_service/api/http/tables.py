"""A batch's table of numbers as JSON and as a safetensors file. Blocking: call these functions in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import orjson
from safetensors.numpy import save

from gristmill._wire.batch_table import BatchTable


def json_pieces(table: bytes) -> Iterator[bytes]:
    """Yields an object with one list per column, in which null stands for NaN. Each piece is one column, because orjson
    holds the GIL."""
    before = b"{"
    for name, column in BatchTable.decode(table).columns_by_row().items():
        if isinstance(column, np.ndarray):
            values = column.tolist()
        else:
            values = [column.texts[number] for number in column.numbers.tolist()]
        yield before + orjson.dumps(name) + b":" + orjson.dumps(values)
        before = b","
    yield b"}"


def safetensors_file(table: bytes) -> bytes:
    """Returns a file with one tensor per column. The tensor of a text column has indices into the list of texts, which
    is in the metadata as JSON, under the column's name."""
    tensors, texts = {}, {}
    for name, column in BatchTable.decode(table).columns_by_row().items():
        if isinstance(column, np.ndarray):
            tensors[name] = column
        else:
            tensors[name], texts[name] = column.numbers, orjson.dumps(column.texts).decode()
    return save(tensors, texts)
