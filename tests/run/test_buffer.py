"""The rows that a run holds: memory goes with the rows that need it."""

from __future__ import annotations

import weakref
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
from gristmill_service.run.machine.described_rows import RowDigests, RowKeys, describe_rows, row_digests
from gristmill_service.run.machine.events import StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.rows import row_gathering
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer, compacted, not_held
from gristmill_service.run.rows.row_gathering import gather
from gristmill_service.storage.memory import MemoryRunLog
from gristmill_service.storage.row_tables import encode, steps_of
from tests.run.harness import Bench, Shelf, contents, group_rows, key, row, table


def _nothing_stored(number: int) -> Steps:
    raise AssertionError(f"every table is held, and table {number} is asked for")


def described_rows(steps: Steps, number: int) -> list[StoredRow]:
    """As a request's, of which all is stored."""
    keys, digests, count = RowKeys.of(steps), RowDigests(steps, {}), len(steps)
    return describe_rows(steps, keys, number, digests, [b""] * count, [None] * count)


def picked(buffer: RowBuffer, rows: Iterable[StoredRow]) -> list[PickedRow]:
    return buffer.pick((Group(one.group, 1, 0.0), [one]) for one in rows)


def test_a_request_is_forgotten_with_its_last_row() -> None:
    buffer, steps = RowBuffer(), table(row("a"), row("b"))
    described = described_rows(steps, 0)
    buffer.add(0, steps, 2, [0, 1])
    buffer.release([described[0].ref])
    assert len(buffer) == 2
    buffer.release([described[1].ref])
    assert len(buffer) == 0
    assert buffer.take_sparse() == []


def test_a_table_of_which_half_is_not_needed_shrinks_to_the_rest() -> None:
    bench = Bench(log=MemoryRunLog(), train_batch_size=9)
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
    buffer, steps = RowBuffer(), table(*(row(f"u{index}", response=[index]) for index in range(6)))
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
    buffer, steps = RowBuffer(), table(row("a", response=[1, 2, 3]))
    buffer.add(0, table(row("a", response=[1, 2])), 1, [0])
    with pytest.raises(InvalidArgumentError, match="have 4 values of tokens instead of 5"):
        gather(picked(buffer, described_rows(steps, 0)), False, _nothing_stored)


def test_the_log_is_asked_for_the_tables_of_all_that_rows_begin_as() -> None:
    rows, held = described_rows(table(*group_rows("a")), 1), table(row("b"))
    first, second = rows[0], rows[-1]
    begun = PickedRow(3, None, 0, first, PickedRow(2, None, 0, first))
    picked = [PickedRow(1, None, 0, first), PickedRow(1, None, 1, second, begun), PickedRow(4, held, 0, first, begun)]
    assert not_held(picked) == {1, 2, 3}
    assert not_held([PickedRow(4, held, 0, first)]) == set()


def test_a_copy_that_comes_late_replaces_nothing_and_keeps_what_was_released_meanwhile_away() -> None:
    buffer, steps = RowBuffer(), table(*(row(f"u{index}") for index in range(6)))
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
    buffer, steps = RowBuffer(), table(*(row(f"u{index}", response=[index]) for index in range(6)))
    described = described_rows(steps, 7)
    buffer.add(7, steps, 6, range(6))
    buffer.release([one.ref for one in described[:4]])
    [(number, before, live)] = buffer.take_sparse()
    buffer.replace(number, before, *compacted(steps_of(before), live))
    buffer.unload([described[4].ref.table])
    gathered = gather(picked(buffer, described[4:]), False, {7: steps}.__getitem__)
    assert contents(gathered)["tokens"] == [[1, 2, 4], [1, 2, 5]]


@given(
    st.permutations(range(12)),
    st.lists(st.integers(1, 11), max_size=4),
    st.booleans(),
    st.none() | st.integers(1, 200),
    st.sampled_from([1, 40, 256 << 10]),
)
def test_rows_are_gathered_in_the_order_asked_for_from_however_many_requests(
    order: list[int], cuts: list[int], token_rewards: bool, part_bytes: int | None, least_bytes: int
) -> None:
    """part_bytes: of the parts after which tables are released; None where they are kept. least_bytes: of columns that
    are gathered in parts, in memory of their own."""
    rows = [
        row(f"u{index}", response=range(index + 1), reward=[float(index)] * (index + 1) if token_rewards else index)
        for index in range(12)
    ]
    buffer, described = RowBuffer(), []
    edges = [0, *sorted(set(cuts)), 12]
    for chunk, (start, end) in enumerate(pairwise(edges)):
        steps = table(*rows[start:end])
        described += described_rows(steps, chunk)
        buffer.add(chunk, steps, end - start, range(end - start))
    rows_picked, released = picked(buffer, (described[index] for index in order)), []

    def clear() -> None:
        released.append(len(rows_picked))
        rows_picked.clear()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_gathering, "_LEAST_BYTES", least_bytes)
        if part_bytes is not None:
            patched.setattr(row_gathering, "_PART_BYTES", part_bytes)
            patched.setattr(row_gathering, "_MOST_PARTS", 100_000)
        gathered = gather(rows_picked, token_rewards, _nothing_stored, None if part_bytes is None else clear)
    assert part_bytes != 1 or len(released) == 12
    assert contents(gathered) == contents(table(*(rows[index] for index in order)))


def test_tables_are_released_as_their_groups_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_gathering, "_LEAST_BYTES", 1)
    monkeypatch.setattr(row_gathering, "_PART_BYTES", 1)
    monkeypatch.setattr(row_gathering, "_MOST_PARTS", 100)
    steps = [table(*group_rows(f"u{number}", response=range(number + 1))) for number in range(4)]
    described = [one for number, some in enumerate(steps) for one in described_rows(some, number)]
    memory = [np.frombuffer(encode(some).joined(), np.uint8).copy() for some in steps]
    alive, counts = [weakref.ref(one) for one in memory], list[int]()
    held = [PickedRow(one.ref.table, memory[one.ref.table].data, one.ref.row, one) for one in described]
    del memory

    def release() -> None:
        held.clear()
        counts.append(sum(one() is not None for one in alive))

    gathered = gather(held, False, _nothing_stored, release)
    assert counts == [3, 2, 1, 0]
    assert contents(gathered)["tokens"] == [[1, 2, *range(number + 1)] for number in range(4) for _ in range(2)]


def test_a_batch_whose_rows_were_released_and_that_finds_no_room_is_made_of_the_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_gathering, "_PART_BYTES", 1)
    monkeypatch.setattr(row_gathering, "_MOST_PARTS", 100)
    shelf = Shelf(places=0)
    bench = Bench(store=shelf, train_batch_size=2)
    bench.submit(*group_rows("a"))
    bench.submit(*group_rows("b", response=range(20)))
    bench.make_batches()
    assert "batch 0 waits" in bench.run.blocked_reason
    before = contents(bench.build_batch.batches[0])
    assert [table.stored for table in bench.rows._tables.values()] == [None, None]
    shelf.places = 1
    bench.now += 9
    bench.run.tick()
    assert bench.builders.waiting == [], "it is not read from the log each second"
    bench.now += 1
    bench.run.tick()
    bench.make_batches()
    assert bench.run.status().batches_published == 1
    assert contents(bench.build_batch.batches[0]) == before
    assert before["tokens"] == [[1, 2, 7]] * 2 + [[1, 2, *range(20)]] * 2


def test_rows_that_the_heap_alone_has_are_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_gathering, "_PART_BYTES", 1)
    monkeypatch.setattr(row_gathering, "_MOST_PARTS", 100)
    bench = Bench(log=MemoryRunLog(), store=Shelf(places=0), train_batch_size=2)
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    assert "batch 0 waits" in bench.run.blocked_reason
    assert all(table.stored is not None for table in bench.rows._tables.values())


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
