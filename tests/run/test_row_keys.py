"""Rows are named all at once as each would be by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.named_tuples import made_of
from gristmill._wire.steps import TrajectoryKey
from gristmill_service.run.machine.described_rows import RowKeys
from gristmill_service.run.machine.events import RowName, RowRef, StoredRow
from gristmill_service.run.machine.groups import by_group
from tests.run.harness import row, table

NAMES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 1)), min_size=1)


@given(NAMES)
def test_keys_are_those_of_each_row(named: list[tuple[int, str, int, int]]) -> None:
    keys = RowKeys.of(table(*(row(uid, sample, attempt=tries, round=round_) for round_, uid, sample, tries in named)))
    assert keys.trajectories == [TrajectoryKey(round_, uid, sample) for round_, uid, sample, _ in named]
    assert keys.names == [RowName(sample, tries, 0) for _, _, sample, tries in named]


def test_rows_of_a_group_share_its_name() -> None:
    keys = RowKeys.of(table(row("a" * 100, 0), row("a" * 100, 1), row("b")))
    first, second, _ = keys.trajectories
    assert first.uid is second.uid, "runs keep it as long as the rows"


@given(NAMES)
def test_rows_by_group_are_all_rows_in_their_order(named: list[tuple[int, str, int, int]]) -> None:
    rows = [
        StoredRow(TrajectoryKey(round_, uid, sample), 0, tries, True, RowRef(0, at), b"", 0, 1, 0, None)
        for at, (round_, uid, sample, tries) in enumerate(named)
    ]
    grouped = list(by_group(rows))
    assert [one for _, of_group in grouped for one in of_group] == rows
    assert all(one.group == key for key, of_group in grouped for one in of_group)


def test_named_tuples_are_made_of_a_column_for_each_of_their_fields() -> None:
    assert made_of(RowRef, [7, 7], range(2)) == [RowRef(7, 0), RowRef(7, 1)]
    with pytest.raises(AssertionError, match="an omitted field would not get its default"):
        made_of(RowRef, [7, 7])
