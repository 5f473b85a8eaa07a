"""Large arrays of a client stand in memory that is used again, and never while anything views it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.columns import Ragged, bytes_of
from gristmill._wire.reused_memory import ReusedMemory

LARGE = 300_000


def numbers(first: int, count: int = LARGE) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_next_array_stands_where_the_one_before_was() -> None:
    memory = ReusedMemory()
    first = memory.joined([numbers(0), numbers(5)], np.int32)
    place = address(first)
    del first
    # It may be a little smaller.
    assert address(memory.joined([numbers(9), numbers(7, LARGE - 9)], np.int32)) == place


@pytest.mark.parametrize(
    "view_of",
    [
        lambda array: array[7:9],
        lambda array: array.reshape(2, -1)[1],
        lambda array: array.view(np.uint8)[1:],
        lambda array: bytes_of(array[3:]),
        lambda array: Ragged.from_lengths(array, np.array([len(array)])).part(slice(0, 1)).arrays()[0],
        lambda array: np.frombuffer(memoryview(array), np.int16),
    ],
)
def test_nothing_that_is_viewed_is_written_over(view_of: Any) -> None:
    memory = ReusedMemory()
    view = view_of(memory.joined([numbers(0)], np.int32))
    gc.collect()
    before = bytes(view)
    others = [memory.joined([numbers(1_000_000 + other)], np.int32) for other in range(20)]
    assert bytes(view) == before
    assert len({address(other) for other in others}) == len(others)


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 3)), max_size=12),
    st.sampled_from([np.uint8, np.int32, np.float32, np.float64]),
)
def test_arrays_are_as_numpy_joins_them(parts: list[tuple[int, int]], dtype: Any) -> None:
    memory, kept = ReusedMemory(), list[tuple[np.ndarray, np.ndarray]]()
    for count, keeps in parts:
        arrays = [np.arange(count).astype(dtype), np.arange(count // 2).astype(dtype)]
        found, expected = memory.ragged(arrays, dtype), Ragged.from_arrays(arrays, dtype)
        assert found.values.dtype == expected.values.dtype
        assert found.starts.tolist() == expected.starts.tolist()
        if keeps:
            kept.append((found.values, expected.values))
        assert all(np.array_equal(*pair) for pair in kept)


def test_values_of_more_than_one_axis_keep_it() -> None:
    arrays = [np.ones((40_000, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)]
    assert np.array_equal(ReusedMemory().joined(arrays, np.float32), np.concatenate(arrays))


def test_what_does_not_convert_safely_is_refused_as_numpy_refuses_it() -> None:
    with pytest.raises(TypeError, match="same_kind"):
        ReusedMemory().joined([np.ones(LARGE, np.float64)], np.int32)


def test_threads_share_it() -> None:
    memory, wrong = ReusedMemory(), list[int]()

    def work(own: int) -> None:
        for _ in range(50):
            array = memory.joined([np.full(LARGE, own, np.int32)], np.int32)
            if array.min() != own or array.max() != own:
                wrong.append(own)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert wrong == []
