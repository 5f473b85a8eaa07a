"""Tables of rows as bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.storage import row_tables
from tests.run.harness import row, table
from tests.storage.tables import any_table, same
from tests.strategies import LAW, Row, rollouts


@LAW
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


@pytest.mark.parametrize(("tokens", "is_copied"), [(50_000, False), (20_000, True)])
def test_a_large_table_is_not_copied_to_be_stored(tokens: int, is_copied: bool) -> None:
    steps = table(row("u", prompt_token_ids=range(tokens), response=range(tokens // 2)))
    held = row_tables.to_stored(steps)
    assert isinstance(held, bytes) == is_copied
    assert np.array_equal(row_tables.steps_of(held).tokens[0], steps.tokens[0])


@LAW
@given(rollouts())
def test_a_row_alone_in_its_table_has_the_values_that_it_has_among_others(rows: list[Row]) -> None:
    steps = from_rows(rows, step_wise=True)
    for at in range(len(steps)):
        one = steps.take(np.array([at]))
        opened = row_tables.opened(row_tables.encode(one).joined())
        assert [*opened.memory] == [*opened.columns]
        assert opened.memory["tokens"].cast("i").tolist() == steps.tokens[at].tolist()
        assert opened.header.strings.get("stop_reasons", [""]) == [steps.stop_reasons[at]]


def test_components_of_rewards_are_stored_with_their_rows() -> None:
    steps = table(row("u", 1) | {"reward_components": {"b": 1, "a": 0.5}}, row("u", 2))
    stored = row_tables.decode(row_tables.encode(steps).joined())
    assert stored.reward_components == steps.reward_components == ['{"a": 0.5, "b": 1.0}', ""]


def test_keys_of_steps_are_stored_with_their_rows() -> None:
    steps = table(row("u", 1) | {"step_key": "hall"}, row("u", 2))
    stored = row_tables.decode(row_tables.encode(steps).joined())
    assert stored.step_keys == steps.step_keys == ["hall", ""]


def test_a_description_that_has_not_one_value_per_row_is_refused() -> None:
    longer = replace(table(row("u", 1), row("v", 2)), samples=np.array([1, 2, 3], np.int32))
    with pytest.raises(InvalidArgumentError, match="a column does not have one value per row"):
        row_tables.decode(row_tables.encode(longer).joined())


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
    with pytest.raises(InvalidArgumentError, match="are not a table of rows"):
        row_tables.decode(other)
