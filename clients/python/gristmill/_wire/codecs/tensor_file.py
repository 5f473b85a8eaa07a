"""Encodes and decodes small safetensors files, in which trainers write columns back. Decoding does not copy tensors.

Tensors are NumPy arrays. uint16 stores the bits of bfloat16, as in `gristmill._wire.column_spec`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from gristmill._wire.columns import Array, bytes_of
from gristmill.errors import InvalidArgumentError

NAMES: dict[np.dtype[Any], str] = {
    np.dtype(name): code
    for name, code in (
        *(("bool", "BOOL"), ("uint8", "U8"), ("int8", "I8"), ("int16", "I16"), ("int32", "I32"), ("int64", "I64")),
        *(("float16", "F16"), ("uint16", "BF16"), ("float32", "F32"), ("float64", "F64")),
    )
}
"""The names of columns' types in safetensors files."""

_DTYPES = {code: dtype for dtype, code in NAMES.items()}
_HEAD, _LONGEST_HEADER, _MOST_AXES = 8, 64 << 10, 16


def encode(tensors: Mapping[str, Array]) -> bytes:
    """Returns the bytes of a file with these tensors, which begin at a multiple of 8 bytes."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, values in tensors.items():
        end = offset + values.nbytes
        entries[name] = {"dtype": NAMES[values.dtype], "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _HEAD)
    return b"".join((len(header).to_bytes(_HEAD, "little"), header, *map(bytes_of, tensors.values())))


def begin_of_data(file: bytes | memoryview) -> int:
    """Returns the offset of the first tensor. file: at least the first 8 bytes of the file."""
    return _HEAD + int.from_bytes(file[:_HEAD], "little")


def decode(data: bytes | memoryview) -> dict[str, Array]:
    """Returns views of the tensors, by name. Raises InvalidArgumentError for invalid bytes."""
    try:
        length = begin_of_data(data) - _HEAD
        if not 2 <= length <= min(len(data) - _HEAD, _LONGEST_HEADER):
            raise ValueError(f"the length of its header is {length}")
        entries = json.loads(bytes(data[_HEAD : _HEAD + length]))
        entries.pop("__metadata__", None)
        tensors = {str(name): _tensor(data, _HEAD + length, **entry) for name, entry in entries.items()}
        if sum(values.nbytes for values in tensors.values()) != len(data) - _HEAD - length:
            raise ValueError("its tensors do not fill the file")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{len(data)} bytes are not a safetensors file of columns: {str(error)[:200]}; write the file with `save` "
            "of safetensors"
        ) from None
    return tensors


def _tensor(data: bytes | memoryview, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
    kind, (begin, end) = _DTYPES.get(dtype), data_offsets
    if kind is None:
        raise ValueError(f"a tensor has dtype {dtype!r}, which columns do not support")
    if len(shape) > _MOST_AXES or not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"a tensor has shape {shape!r} at {begin!r}:{end!r}")
    count = prod(shape)
    if not begin <= end <= len(data) - start or end - begin != count * kind.itemsize:
        raise ValueError(f"a tensor of shape {shape} is at {begin}:{end} of {len(data) - start} bytes")
    values: Array = np.frombuffer(data, kind if kind != np.bool_ else np.uint8, count, start + begin)
    if kind == np.bool_:
        if values.size and values.max() > 1:
            raise ValueError("a tensor of bools has a byte that is neither 0 nor 1")
        values = values.view(np.bool_)
    return values.reshape(shape)
