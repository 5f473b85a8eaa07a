"""Tables of rows as bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.storage import row_tables
from tests.run.harness import row, table
from tests.storage.tables import any_table, same
from tests.strategies import Row, rollouts


@given(rollouts())
def test_tables_come_back_as_they_were(rows: list[Row]) -> None:
    steps = from_rows(rows, step_wise=True)
    encoded = row_tables.encode(steps)
    data = b"".join(encoded.buffers)
    assert len(data) == encoded.size
    assert same(row_tables.decode(memoryview(data)), steps)


def test_tables_are_views_of_the_bytes_that_they_are_read_from() -> None:
    data = bytearray(b"".join(row_tables.encode(any_table()).buffers))
    read = row_tables.decode(memoryview(data))
    assert np.shares_memory(read.tokens.values, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(("cut", "is_copied"), [(500, False), (40_000, True)])
def test_a_large_table_is_copied_only_where_it_keeps_much_that_is_not_its_own(cut: int, is_copied: bool) -> None:
    steps = table(row("u", prompt_token_ids=range(50_000), response=range(100_000)))
    tokens = Ragged(steps.tokens.values, steps.tokens.starts + cut, steps.tokens.lengths - cut)
    cut_off = replace(steps, tokens=tokens, prefix_lengths=np.array([cut]))
    held = row_tables.held(cut_off)
    assert isinstance(held, bytes) == is_copied
    assert np.array_equal(row_tables.steps_of(held).tokens[0], tokens[0])


@given(st.binary(max_size=200))
def test_what_is_no_table_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        row_tables.decode(memoryview(data))


def test_a_cut_table_is_refused() -> None:
    data = b"".join(row_tables.encode(any_table()).buffers)
    for size in range(0, len(data) - 8, 7):
        with pytest.raises(InvalidArgumentError):
            row_tables.decode(memoryview(data[:size]))


def test_a_table_without_tokens_or_with_an_unknown_column_is_refused() -> None:
    data = b"".join(row_tables.encode(any_table()).buffers)
    assert row_tables.decode(data).tokens.total
    other = data.replace(b"tokens", b"tokenz")
    with pytest.raises(InvalidArgumentError, match="are no table of rows"):
        row_tables.decode(other)
