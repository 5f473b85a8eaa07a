"""First-fit packing and splitting, against the specification's sentences carried out one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill_service.pipeline.scheduling.packing import WholeRows, first_fit
from tests.plans import naive_first_fit, naive_split

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
CAPS = st.integers(1, 60)


def packed(lengths: list[int], cap: int) -> list[list[int]]:
    numbers = first_fit(lengths, cap).tolist()
    return [[row for row, at in enumerate(numbers) if at == number] for number in range(max(numbers, default=-1) + 1)]


def split_until(micro_batches: list[list[int]], target: int, lengths: list[int]) -> list[list[int]]:
    return WholeRows(np.array(lengths), None).split_until(micro_batches, target)


@given(LENGTHS, CAPS)
def test_first_fit_equals_the_scan_of_every_micro_batch(lengths: list[int], cap: int) -> None:
    assert packed(lengths, cap) == naive_first_fit(range(len(lengths)), lengths, cap)


@given(LENGTHS, CAPS, st.data())
def test_the_packing_of_a_prefix_is_the_prefix_of_the_packing(
    lengths: list[int], cap: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(0, len(lengths)))
    assert first_fit(lengths, cap)[:rows].tolist() == first_fit(lengths[:rows], cap).tolist()


def test_first_fit_equals_the_scan_when_there_are_many_micro_batches() -> None:
    random = np.random.default_rng(7)
    for lengths in (random.integers(1, 1000, 1000).tolist(), random.lognormal(5, 1, 1000).astype(int).tolist()):
        assert packed(lengths, 700) == naive_first_fit(range(len(lengths)), lengths, 700)


@given(LENGTHS, CAPS, st.integers(0, 70))
def test_splitting_equals_the_rule_carried_out_step_by_step(lengths: list[int], cap: int, target: int) -> None:
    micro_batches = naive_first_fit(range(len(lengths)), lengths, cap)
    assert split_until(micro_batches, target, lengths) == naive_split(micro_batches, target, lengths)


@given(LENGTHS, CAPS, st.integers(0, 70))
def test_splitting_reaches_the_target_unless_every_row_stands_alone(lengths: list[int], cap: int, target: int) -> None:
    micro_batches = naive_first_fit(range(len(lengths)), lengths, cap)
    split = split_until(micro_batches, target, lengths)
    assert len(split) == max(len(micro_batches), min(target, len(lengths)))
    assert all(split)
    assert sorted(row for rows in split for row in rows) == list(range(len(lengths)))


@given(LENGTHS, CAPS, st.integers(0, 70))
def test_a_split_micro_batch_is_longest_first_and_one_that_is_not_keeps_row_order(
    lengths: list[int], cap: int, target: int
) -> None:
    micro_batches = naive_first_fit(range(len(lengths)), lengths, cap)
    for place, rows in enumerate(split_until(micro_batches, target, lengths)):
        if place < len(micro_batches) and rows == micro_batches[place]:
            assert all(a < b for a, b in pairwise(rows))
        else:
            assert all((-lengths[a], a) < (-lengths[b], b) for a, b in pairwise(rows))
