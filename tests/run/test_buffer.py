"""The rows that a run holds: memory goes with the rows that need it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.column_spec import specs_of
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.machine.decisions.ingest import describe_rows
from gristmill_service.run.machine.events import StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.row_digests import row_digests
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer, compacted, not_held
from gristmill_service.run.rows.row_gathering import gather
from gristmill_service.storage.row_tables import steps_of
from tests.run.harness import Bench, contents, group_rows, key, row, table


def _nothing_stored(number: int) -> Steps:
    raise AssertionError(f"every table is held, and table {number} is asked for")


def described_rows(steps: Steps, number: int) -> list[StoredRow]:
    """As a request's, of which all is stored."""
    return describe_rows(steps, number, row_digests(steps), [b""] * len(steps), [None] * len(steps))


def picked(buffer: RowBuffer, rows: Iterable[StoredRow]) -> list[PickedRow]:
    return buffer.pick((Group(one.group, 1, 0.0), [one]) for one in rows)


def test_a_request_is_forgotten_with_its_last_row() -> None:
    buffer, steps = RowBuffer(compacts=True), table(row("a"), row("b"))
    described = described_rows(steps, 0)
    buffer.add(0, steps, 2, [0, 1])
    buffer.release([described[0].ref])
    assert len(buffer) == 2
    buffer.release([described[1].ref])
    assert len(buffer) == 0
    assert buffer.take_sparse() == []


def test_a_table_of_which_half_is_not_needed_shrinks_to_the_rest() -> None:
    bench = Bench(train_batch_size=9)
    uids = [f"u{index}" for index in range(8)]
    bench.submit(*(one for uid in uids for one in group_rows(uid, response=range(100))))
    held = bench.rows
    assert len(held) == 16
    bench.run.abort_groups(0, uids[:4], "")
    assert len(held) == 8
    stored = held._tables[0].stored
    assert stored is not None
    chunk = steps_of(stored)
    assert len(chunk.tokens.values) == chunk.tokens.total == 8 * 102, "a copy, not a view of all that was sent"
    bench.run.seal(None)
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["tokens"][:2] == [[1, 2, *range(100)]] * 2


def test_repeated_rows_of_a_request_are_not_held_a_second_time() -> None:
    bench = Bench()
    sent = [row("a", 0, step, last=False) for step in range(10)]
    bench.submit(*sent)
    bench.submit(*sent, row("a", 0, 10))
    assert len(bench.rows) == 11


def test_a_table_may_shrink_while_its_rows_are_gathered() -> None:
    buffer, steps = RowBuffer(compacts=True), table(*(row(f"u{index}", response=[index]) for index in range(6)))
    described = described_rows(steps, 0)
    buffer.add(0, steps, 6, range(6))
    wanted = [described[5], described[1]]
    before = picked(buffer, wanted)
    buffer.release([one.ref for one in described if one not in wanted])
    [(number, table_before, live)] = buffer.take_sparse()
    buffer.replace(number, table_before, *compacted(steps_of(table_before), live))
    after = picked(buffer, wanted)
    assert contents(gather(before, False, _nothing_stored)) == contents(gather(after, False, _nothing_stored))
    assert contents(gather(after, False, _nothing_stored))["tokens"] == [[1, 2, 5], [1, 2, 1]]


def test_a_table_that_is_not_as_the_state_knows_it_gives_no_rows() -> None:
    buffer, steps = RowBuffer(compacts=True), table(row("a", response=[1, 2, 3]))
    buffer.add(0, table(row("a", response=[1, 2])), 1, [0])
    with pytest.raises(InvalidArgumentError, match="have 4 values of tokens, and the run's log says 5"):
        gather(picked(buffer, described_rows(steps, 0)), False, _nothing_stored)


def test_the_log_is_asked_for_the_tables_of_all_that_rows_begin_as() -> None:
    rows, held = described_rows(table(*group_rows("a")), 1), table(row("b"))
    first, second = rows[0], rows[-1]
    begun = PickedRow(3, None, 0, first, PickedRow(2, None, 0, first))
    picked = [PickedRow(1, None, 0, first), PickedRow(1, None, 1, second, begun), PickedRow(4, held, 0, first, begun)]
    assert not_held(picked) == {1, 2, 3}
    assert not_held([PickedRow(4, held, 0, first)]) == set()


def test_a_copy_that_comes_late_replaces_nothing_and_keeps_what_was_released_meanwhile_away() -> None:
    buffer, steps = RowBuffer(compacts=True), table(*(row(f"u{index}") for index in range(6)))
    described = described_rows(steps, 0)
    buffer.add(0, steps, 6, range(6))
    buffer.release([one.ref for one in described[:3]])
    [(number, before, live)] = buffer.take_sparse()
    copy = compacted(steps_of(before), live)
    buffer.release([described[3].ref])
    buffer.replace(number, before, *copy)
    assert sorted(buffer._tables[0].live) == [4, 5]
    buffer.replace(number, before, before, {row: row for row in range(6)})
    assert len(buffer) == 3, "what it would replace is gone"
    buffer.release([one.ref for one in described[4:]])
    buffer.replace(number, before, *copy)
    assert len(buffer) == 0


def test_a_table_that_is_left_to_the_book_is_read_again_whatever_shrank_before() -> None:
    buffer, steps = RowBuffer(compacts=True), table(*(row(f"u{index}", response=[index]) for index in range(6)))
    described = described_rows(steps, 7)
    buffer.add(7, steps, 6, range(6))
    buffer.release([one.ref for one in described[:4]])
    [(number, before, live)] = buffer.take_sparse()
    buffer.replace(number, before, *compacted(steps_of(before), live))
    buffer.unload([described[4].ref])
    gathered = gather(picked(buffer, described[4:]), False, {7: steps}.__getitem__)
    assert contents(gathered)["tokens"] == [[1, 2, 4], [1, 2, 5]]


@given(st.permutations(range(12)), st.lists(st.integers(1, 11), max_size=4), st.booleans())
def test_rows_are_gathered_in_the_order_asked_for_from_however_many_requests(
    order: list[int], cuts: list[int], token_rewards: bool
) -> None:
    rows = [
        row(f"u{index}", response=range(index + 1), reward=[float(index)] * (index + 1) if token_rewards else index)
        for index in range(12)
    ]
    buffer, described = RowBuffer(compacts=True), []
    edges = [0, *sorted(set(cuts)), 12]
    for chunk, (start, end) in enumerate(pairwise(edges)):
        steps = table(*rows[start:end])
        described += described_rows(steps, chunk)
        buffer.add(chunk, steps, end - start, range(end - start))
    gathered = gather(picked(buffer, (described[index] for index in order)), token_rewards, _nothing_stored)
    assert contents(gathered) == contents(table(*(rows[index] for index in order)))


def test_widths_of_rewards_per_token_may_differ_between_requests() -> None:
    bench = Bench(train_batch_size=1)
    for sample, width in enumerate((np.float32, np.float64)):
        bench.submit(row("a", sample, reward=np.array([0.5], width)))
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["token_rewards"] == [[0.5], [0.5]]


def test_an_aborted_trajectorys_late_rewards_go_with_it() -> None:
    bench = Bench()
    bench.submit(row("a", 1, last=False, reward=None))
    held = bench.state.row_bytes
    bench.submit(row("a", reward=None))
    before = bench.state.row_bytes
    bench.run.set_rewards([RewardUpdate(key("a"), None, None, np.ones(1))])
    assert bench.state.row_bytes == before + 8
    bench.run.abort_trajectories([key("a")], "")
    assert bench.state.row_bytes == held


def test_bytes_that_move_from_one_column_to_the_next_are_another_content() -> None:
    columns = specs_of([{"name": name, "dtype": "uint8", "scope": "items", "required": False} for name in "ab"])
    rows = [
        row("a", a=list(b"x"), b=list(b"by")),
        row("a", a=list(b"xb"), b=list(b"y")),
        row("a", a=list(b"xbby")),
        row("a", a=list(b"xbby"), b=[]),
        row("a", b=list(b"xby")),
    ]
    assert len({row_digests(from_rows([one], columns=columns))[0] for one in rows}) == len(rows)
