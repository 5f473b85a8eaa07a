"""A row alone in its table is read as tables are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.storage import row_tables
from gristmill_service.storage.row_tables import Opened, OpenedRow
from gristmill_service.storage.single_rows import single_row
from tests.storage.tables import any_table
from tests.strategies import Row, rollouts


def check_same(found: OpenedRow, opened: Opened) -> None:
    assert found.columns == opened.columns
    assert found.memory == opened.memory
    assert [found.stop_reason] == opened.header.strings.get("stop_reasons", [""])


@given(rollouts())
def test_it_is_the_row_that_its_table_has(rows: list[Row]) -> None:
    steps = from_rows(rows, step_wise=True)
    for row in range(len(steps)):
        data = row_tables.encode(steps.take(np.array([row]))).joined()
        found = single_row(memoryview(data))
        assert found is not None
        check_same(found, row_tables.opened(data))


def test_of_several_rows_there_is_none() -> None:
    assert single_row(row_tables.encode(any_table(rows=2)).joined()) is None


def test_of_a_table_that_was_removed_there_is_none() -> None:
    data = row_tables.encode(any_table(rows=1)).joined()
    assert single_row(bytes(8) + data[8:]) is None
    assert single_row(bytes(len(data))) is None


@given(st.data())
def test_what_is_refused_as_a_table_is_no_row(data: st.DataObject) -> None:
    whole = row_tables.encode(any_table(rows=1)).joined()
    spoilt = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(12, 120), max_size=2)):
        spoilt[min(at, max(0, len(spoilt) - 1)) : at + 1] = bytes([data.draw(st.integers(0, 255))])
    found = single_row(bytes(spoilt))
    if found is None:
        return
    # It reads less than all of the description: what it does read, it reads as the table does.
    try:
        opened = row_tables.opened(bytes(spoilt))
    except InvalidArgumentError:
        assert all(len(memory) <= len(spoilt) for memory in found.memory.values())
    else:
        check_same(found, opened)


@given(st.binary(max_size=200))
def test_other_bytes_are_no_row(data: bytes) -> None:
    assert single_row(data) is None
