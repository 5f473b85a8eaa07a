"""Rows that were sent without what they share with the step before are stored so, and known as if sent whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows, to_rows
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import InvalidArgumentError, NotFoundError, PrefixUnknownError, UnavailableError
from gristmill_service.run.machine.described_rows import ROW_OVERHEAD_BYTES
from gristmill_service.run.machine.events import GroupDropped, GroupKey, RowName, RowRef, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.rows import declared_prefixes, row_gathering
from gristmill_service.run.rows.row_buffer import PickedRow
from gristmill_service.run.rows.row_gathering import gather
from gristmill_service.storage import row_tables
from gristmill_service.storage.row_tables import Opened, Stored
from tests.run.deltas import shortened
from tests.run.harness import Bench, contents, key, row, table
from tests.run.logs import RecordingLog
from tests.run.test_recovery import Machine
from tests.strategies import Row

pytestmark = pytest.mark.usefixtures("one_token_is_left_out")

PROMPT = list(range(100, 150))


def turns(uid: str, sample: int = 0, count: int = 3, **more: Any) -> list[Row]:
    """A trajectory whose steps go on from each other."""
    prompt, rows = PROMPT, []
    for step in range(count):
        response = [1_000 * sample + 10 * step + at for at in range(5)]
        one = row(uid, sample, step, last=step == count - 1, prompt_token_ids=prompt, response=response)
        rows.append(one | {"reward": float(sample)} | more)
        prompt = [*prompt, *response, 7, 8]
    return rows


def group_of(bench: Bench, uid: str = "a") -> Group:
    return next(group for group in bench.state.open.values() if group.key.uid == uid)


def tokens_kept(bench: Bench) -> int:
    groups = [*bench.state.open.values(), *(group for batch in bench.state.batches.values() for group in batch.groups)]
    rows = [one for group in groups for one in group.stored_rows()]
    return sum((one.nbytes - ROW_OVERHEAD_BYTES - one.response_length) // 4 for one in rows)


def test_a_turn_is_kept_without_the_tokens_of_the_step_before() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=1)
    rows = turns("a")
    for one in rows:
        bench.submit(one)
    assert tokens_kept(bench) == len(rows[-1]["prompt_token_ids"]) + 5
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["tokens"] == [
        [*one["prompt_token_ids"], *one["response_ids"]] for one in rows
    ]


def test_rows_that_are_sent_whole_are_stored_whole() -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=1)
    rows = [*turns("a", 0), *turns("a", 1)]
    for one in rows:
        bench.run.submit(table(one))
    assert tokens_kept(bench) == sum(len(one["prompt_token_ids"]) + 5 for one in rows)
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["tokens"] == [
        [*one["prompt_token_ids"], *one["response_ids"]] for one in rows
    ]


def test_steps_that_go_on_stand_once_in_what_the_batch_is_made_of() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=1)
    rows = turns("a", count=5)
    bench.submit(*rows)
    assert tokens_kept(bench) == len(rows[-1]["prompt_token_ids"]) + 5
    bench.make_batches()
    tokens = bench.build_batch.batches[0].tokens
    assert len(tokens.values) == len(rows[-1]["prompt_token_ids"]) + 5


def test_rows_that_begin_as_each_other_leave_memory_without_the_garbage_collector() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=9)
    sent, prefixes = bench.sender.shortened(table(*turns("a")))
    gone = weakref.ref(sent.tokens.values)
    gc.collect()
    gc.disable()
    try:
        bench.run.submit(sent, prefixes)
        del sent
        bench.run.abort_groups(0, ["a"], "lost")
        assert gone() is None
    finally:
        gc.enable()


def test_a_repeated_turn_is_a_duplicate_however_it_is_sent() -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    rows = turns("a")
    assert bench.submit(*rows) == ["ACCEPTED"] * 3
    assert bench.submit(rows[2]) == ["DUPLICATE"]
    assert bench.submit(*rows) == ["DUPLICATE"] * 3
    assert [outcome.name for outcome in bench.run.submit(table(*rows)).outcomes] == ["DUPLICATE"] * 3
    assert len(bench.rows) == 3


def test_the_sum_of_the_step_before_is_enough_where_all_of_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=9)
    monkeypatch.setattr(declared_prefixes, "tokens_of", lambda *given: pytest.fail("stored tokens were read"))
    for one in turns("a", count=6):
        bench.submit(one)
    assert tokens_kept(bench) == len(turns("a", count=6)[-1]["prompt_token_ids"]) + 5


def test_sums_of_more_trajectories_than_are_remembered_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared_prefixes, "_MOST_SUMS", 2)
    bench = Bench(n_samples_per_prompt=4, train_batch_size=9)
    rows = [turns("a", sample)[step] for step in range(3) for sample in range(4)]
    for one in rows:
        bench.submit(one)
    assert tokens_kept(bench) == 4 * (len(turns("a")[-1]["prompt_token_ids"]) + 5)


def test_a_table_is_opened_once_for_all_rows_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    bench.submit(*(turns(uid)[0] for uid in "abcdef"))
    read: list[Stored] = []

    def opened(stored: Stored) -> Opened:
        read.append(stored)
        return row_tables.opened(stored)

    monkeypatch.setattr(row_gathering, "opened", opened)
    before = [turns(uid)[1] for uid in "abcdef"]
    bench.run.submit(*shortened(table(*before), [len(PROMPT)] * 6))
    assert len(read) == 1
    assert tokens_kept(bench) == 6 * (len(PROMPT) + 5 + 7 + 5)


def test_steps_of_a_request_may_share_less_than_all_of_the_one_before() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=1)
    first, second, third, fourth = turns("a", count=4)
    bench.submit(first)
    edited = [*PROMPT[:40], 9, 9, 9]
    third |= {"prompt_token_ids": edited}
    fourth |= {"prompt_token_ids": [*edited, *third["response_ids"], 8]}
    sent = shortened(table(second, third, fourth), [55, 40, 48])
    assert [outcome.name for outcome in bench.run.submit(*sent).outcomes] == ["ACCEPTED"] * 3
    assert tokens_kept(bench) == 55 + 7 + 8 + 6
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["tokens"] == [
        [*one["prompt_token_ids"], *one["response_ids"]] for one in (first, second, third, fourth)
    ]


@pytest.mark.parametrize("length", [55, 50])
def test_a_step_of_another_attempt_or_trajectory_is_not_the_one_before(length: int) -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    bench.submit(turns("a")[0])
    for other in ({"attempt": 1}, {"sample": 1}, {"step": 2}, {"uid": "b"}, {"round": 1}):
        sent = shortened(table(turns("a")[1] | {"is_last_step": False} | other), [length])
        with pytest.raises(PrefixUnknownError, match="the run does not have the previous step"):
            bench.run.submit(*sent)


@pytest.mark.parametrize("error", [NotFoundError, UnavailableError, InvalidArgumentError])
def test_a_step_before_that_cannot_be_read_is_unknown(
    error: Callable[[str], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=9)
    bench.submit(turns("a")[0])
    bench.reopen()

    def lost(number: int) -> Stored:
        raise error(f"table {number} is lost")

    with monkeypatch.context() as patched:
        patched.setattr(bench.log, "get", lost)
        with pytest.raises(PrefixUnknownError, match="the run does not have the previous step"):
            bench.run.submit(*shortened(table(turns("a")[1]), [55]))
    assert bench.submit(turns("a")[1]) == ["ACCEPTED"]


def test_other_tokens_than_those_of_the_step_before_are_refused() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=9)
    first, second, _ = turns("a")
    bench.submit(first)
    for length, start in ((55, 0), (50, 0), (57, 100)):
        sent, prefixes = shortened(table(second | {"prompt_token_ids": list(range(start, start + 57))}), [length])
        with pytest.raises(PrefixUnknownError, match=f"does not begin with the {length} omitted tokens"):
            bench.run.submit(sent, prefixes)
    assert len(bench.rows) == 1


def stored(sample: int, step: int, parent: RowName | None = None, attempt: int = 0) -> StoredRow:
    """A row as a log of before decision 0022 may have it: its first tokens may be those of any row of its group."""
    ref = RowRef(100 * sample + 10 * attempt + step, 0)
    return StoredRow(TrajectoryKey(0, "a", sample), step, attempt, False, ref, b"", 1, 1, 0, 0.0, parent=parent)


def test_rows_with_whose_tokens_others_begin_stay_until_nothing_needs_them() -> None:
    group, first = Group(GroupKey(0, "a"), 4, 0.0), RowName(0, 0, 0)
    for one in (stored(0, 0), stored(1, 0, first), stored(2, 0, first), stored(1, 1, RowName(1, 0, 0))):
        group.store(one)
    assert group.abort(0, "lost").refs == []
    assert group.find(first) == stored(0, 0)
    assert group.abort(1, "lost").refs == [stored(1, 0).ref, stored(1, 1).ref]
    assert list(group.kept) == [first]
    released = group.store(stored(2, 0, attempt=1))
    assert sorted(released.refs) == sorted([stored(0, 0).ref, stored(2, 0).ref])
    assert (group.kept, group.nbytes) == ({}, 1)


class TestRecovery:
    def test_rows_are_the_same_after_a_death(self, tmp_path: Path) -> None:
        one = Machine(tmp_path, n_samples_per_prompt=3, train_batch_size=1, surplus=0)
        rows = [step for sample in (1, 0, 2) for step in turns("a", sample)]
        for turn in rows[:-1]:
            one.submit(turn)
        one.run.abort_trajectories([key("a", 0)], "lost")
        one.die()
        one.submit(rows[-1])
        one.make_batches()
        kept = [exported for part in one.run.export(0) for exported in to_rows(part)]
        assert kept == list(to_rows(from_rows([*turns("a", 1), *turns("a", 2)])))

    def test_a_row_that_began_as_a_lost_one_is_lost_with_its_group(self) -> None:
        log = RecordingLog()
        bench = Bench(log=log, n_samples_per_prompt=3, train_batch_size=9)
        for one in turns("a")[:2]:
            bench.submit(one)
        first, _ = group_of(bench).ordered_rows()
        log.tables[first.ref.table] = table(row("b"))
        bench.reopen()
        assert bench.state.open == {}
        assert any(isinstance(event, GroupDropped) and event.reason == "rows_lost" for event in log.events)


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["step", "again", "abort", "edit"])))


@given(ACTIONS, st.integers(0, 2))
def test_rows_are_what_was_given_whatever_else_becomes_of_their_group(
    actions: list[tuple[int, int, str]], prompt: int
) -> None:
    """Trajectories go on, are edited, begin again and are given up, in any order."""
    bench = Bench(n_samples_per_prompt=4, train_batch_size=9)
    bench.begin("a")
    sent: dict[int, list[Row]] = {}
    attempts, given_up = dict.fromkeys(range(4), 0), set[int]()
    for number, (sample, token, action) in enumerate(actions):
        if sample in given_up:
            continue
        if action == "abort":
            bench.run.abort_trajectories([key("a", sample)], "")
            given_up.add(sample)
            sent.pop(sample, None)
            if not bench.state.open:
                return
            continue
        before = sent.get(sample, [])
        if action == "again" and before:
            attempts[sample] += 1
            before = []
        tokens = [*before[-1]["prompt_token_ids"], *before[-1]["response_ids"]] if before else [0, 1, prompt]
        if action == "edit":
            tokens = [*tokens[: token + 1], 50 + token, *tokens[token + 2 :]]
        one = row("a", sample, len(before), last=False, prompt_token_ids=tokens, response=[token, number])
        assert bench.submit(one | {"attempt": attempts[sample]}) == ["ACCEPTED"]
        sent[sample] = [*before, one]
        assert group_of(bench).kept == {}, "trajectories go whole"
        assert bench.state.row_bytes == sum(stored.nbytes for stored in group_of(bench).stored_rows())
        assert len(bench.rows) == len([*group_of(bench).stored_rows()])
    if not sent:
        return
    group = group_of(bench)
    picked: list[PickedRow] = bench.rows.pick([(group, group.ordered_rows())])
    batch = gather(picked, False, bench.log.get)
    assert (
        contents(batch)["tokens"]
        == contents(table(*(one for sample in sorted(sent) for one in sent[sample])))["tokens"]
    )
