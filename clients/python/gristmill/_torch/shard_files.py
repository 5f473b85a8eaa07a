"""Tensors over a shard's bytes, mapped or in memory, without a copy."""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill._wire.addresses import Header, read_header
from gristmill.errors import InvalidArgumentError

Tensors = dict[str, torch.Tensor]

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    # The bits of bfloat16, which NumPy does not support.
    "BF16": np.uint16,
    "F32": np.float32,
    "F64": np.float64,
}


def map_shard(path: str) -> tuple[Tensors, dict[str, Any]]:
    """Map a shard's file privately; return its tensors and metadata. Does not copy, so it takes < 1 ms for any size.

    Raises OSError and InvalidArgumentError.
    """
    with Path(path).open("rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, path)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return _tensors(data, header, path, "create it again"), header.metadata


def parse_shard(data: NDArray[np.uint8], where: str) -> tuple[Tensors, dict[str, Any]]:
    """Return a shard's tensors, which are views of its bytes, and its metadata. data: the bytes, uint8 (size,). Raises
    InvalidArgumentError."""
    head = data[: 8 + int.from_bytes(data[:8].tobytes(), "little")]
    header = read_header(io.BytesIO(head.tobytes()), len(data), where)
    return _tensors(data, header, where, "read it again"), header.metadata


def _tensors(data: mmap.mmap | NDArray[np.uint8], header: Header, where: str, remedy: str) -> Tensors:
    """Return views of a shard's bytes. Each view keeps the bytes alive. The reader of safetensors takes 6 times as
    long, which is tens of milliseconds if each micro-batch has its own tensors."""
    try:
        tensors = {name: _view(data, header.size, **entry) for name, entry in header.entries.items()}
        size = len(data) - header.size
        if sum(tensor.nbytes for tensor in tensors.values()) != size:
            raise ValueError(f"the tensors do not fill its {size} bytes")
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise InvalidArgumentError(f"{where} is not a whole shard: {error}; {remedy}") from None
    return tensors


def _view(
    data: mmap.mmap | NDArray[np.uint8], start: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> torch.Tensor:
    begin, end = data_offsets
    if not 0 <= begin <= end <= len(data) - start:
        raise ValueError(f"a tensor is at {begin}:{end} of {len(data) - start} bytes")
    # Creating a view in NumPy takes half as long as in PyTorch, and there may be thousands of views.
    array: NDArray[Any] = np.ndarray(shape, _DTYPES[dtype], data, start + begin)
    if array.nbytes != end - begin:
        raise ValueError(f"a tensor of {array.nbytes} bytes is at {begin}:{end}")
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor
