"""The files in which columns are written back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save
from safetensors.torch import load as load_torch

from gristmill._wire.codecs import tensor_file
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

DTYPES = [dtype for dtype in tensor_file.NAMES if dtype != np.uint16]
TENSORS = st.dictionaries(
    st.sampled_from(["values", "micro_batch_000/values", "verdict"]),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_side=0, max_side=4))),
)


def check_same(decoded: dict[str, Array], expected: dict[str, Array]) -> None:
    assert decoded.keys() == expected.keys()
    for name, values in expected.items():
        assert decoded[name].dtype == values.dtype
        np.testing.assert_array_equal(decoded[name], values)


@given(TENSORS)
def test_what_is_written_is_read_by_safetensors_and_the_other_way_round(tensors: dict[str, Array]) -> None:
    check_same(load(tensor_file.encode(tensors)), tensors)
    check_same(tensor_file.decode(save(tensors)), tensors)


def test_bits_of_bfloat16_are_bfloat16() -> None:
    values = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    data = tensor_file.encode({"teacher": bits})
    assert torch.equal(load_torch(data)["teacher"], values)
    check_same(tensor_file.decode(data), {"teacher": bits})


def of_header(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        of_header([]),
        of_header({"a": []}),
        of_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        of_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
        of_header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, bytes(4)),
        of_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        of_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(8)),
        of_header({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4)),
        of_header({"a": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, bytes(4)),
        of_header({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
        of_header({"a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}, b"\2"),
        of_header({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        of_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}}, bytes(4)),
        (1 << 63).to_bytes(8, "little") + bytes(8),
        b"[" * 100_000,
    ],
)
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="not a safetensors file of columns"):
        tensor_file.decode(data)


@given(TENSORS, st.data())
def test_a_spoilt_file_is_refused_or_read(tensors: dict[str, Array], data: st.DataObject) -> None:
    spoilt = bytearray(tensor_file.encode(tensors))
    spoilt[data.draw(st.integers(0, len(spoilt) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        tensor_file.decode(bytes(spoilt))
    except InvalidArgumentError:
        pass
