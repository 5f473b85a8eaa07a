"""A token is kept once: rows refer to those that they begin as, which stay as long as they are needed."""

from __future__ import annotations

import gc
import weakref
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows, to_rows
from gristmill.errors import PrefixUnknownError
from gristmill_service.run.machine.decisions.ingest import ROW_OVERHEAD_BYTES
from gristmill_service.run.machine.events import GroupDropped, RowName
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.rows import row_gathering, shared_prefixes
from gristmill_service.run.rows.row_buffer import PickedRow
from gristmill_service.run.rows.row_gathering import gather
from gristmill_service.run.rows.shared_prefixes import Kept
from gristmill_service.storage import row_tables
from gristmill_service.storage.row_tables import Opened, Stored
from tests.run.harness import Bench, LastingLog, contents, key, row, table
from tests.run.test_recovery import Machine
from tests.strategies import Row

pytestmark = pytest.mark.usefixtures("one_token_is_shared")

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


def test_samples_keep_their_prompt_once() -> None:
    bench = Bench(n_samples_per_prompt=4, train_batch_size=1)
    bench.submit(*(turns("a", sample, 1)[0] for sample in range(2)))
    for sample in (2, 3):
        bench.submit(*turns("a", sample, 1))
    assert tokens_kept(bench) == len(PROMPT) + 4 * 5
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["tokens"] == [
        [*PROMPT, *turns("a", sample, 1)[0]["response_ids"]] for sample in range(4)
    ]


def test_steps_that_go_on_stand_once_in_what_the_batch_is_made_of() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=1)
    rows = turns("a", count=5)
    bench.submit(*rows)
    bench.make_batches()
    tokens = bench.build_batch.batches[0].tokens
    assert len(tokens.values) == len(rows[-1]["prompt_token_ids"]) + 5


def test_rows_that_begin_as_each_other_leave_memory_without_the_garbage_collector() -> None:
    bench = Bench(n_samples_per_prompt=1, train_batch_size=9)
    sent = table(*turns("a"))
    gone = weakref.ref(sent.tokens.values)
    gc.collect()
    gc.disable()
    try:
        bench.run.submit(sent)
        del sent
        bench.run.abort_groups(0, ["a"], "lost")
        assert gone() is None
    finally:
        gc.enable()


def test_what_a_row_begins_as_stays_until_nothing_needs_it() -> None:
    bench = Bench(n_samples_per_prompt=3, train_batch_size=9)
    for sample in range(3):
        bench.submit(*turns("a", sample, 1))
    first = RowName(0, 0, 0)
    bench.run.abort_trajectories([key("a", 0)], "lost")
    assert list(group_of(bench).kept) == [first]
    assert len(bench.rows) == 3
    bench.run.abort_trajectories([key("a", 1)], "lost")
    assert list(group_of(bench).kept) == [first]
    assert len(bench.rows) == 2
    bench.submit(*turns("a", 2, 1, attempt=1))
    assert group_of(bench).kept == {}
    assert len(bench.rows) == 1
    assert bench.state.row_bytes == group_of(bench).nbytes == ROW_OVERHEAD_BYTES + 4 * (len(PROMPT) + 5) + 5


def test_a_new_attempt_may_begin_as_a_row_that_began_as_the_old_one() -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=2)
    bench.submit(*turns("a", 0, 1))
    bench.submit(*turns("a", 1, 1))
    bench.submit(*turns("a", 0, 2, attempt=1))
    assert list(group_of(bench).kept) == [RowName(0, 0, 0)]
    bench.run.seal(None)
    bench.make_batches()
    rows = [*turns("a", 0, 2), *turns("a", 1, 1)]
    assert contents(bench.build_batch.batches[0])["tokens"] == [
        [*one["prompt_token_ids"], *one["response_ids"]] for one in rows
    ]


def test_a_repeated_turn_is_a_duplicate_whatever_was_kept_of_it() -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    rows = turns("a")
    assert bench.submit(*rows) == ["ACCEPTED"] * 3
    assert bench.submit(rows[2]) == ["DUPLICATE"]
    assert bench.submit(*rows) == ["DUPLICATE"] * 3
    assert len(bench.rows) == 3


def test_a_table_is_opened_once_for_all_rows_that_begin_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    bench.submit(*(turns(uid, 0, 1)[0] for uid in "abcdef"))
    read: list[Stored] = []

    def opened(stored: Stored) -> Opened:
        read.append(stored)
        return row_tables.opened(stored)

    monkeypatch.setattr(row_gathering, "opened", opened)
    bench.submit(*(turns(uid, 1, 1)[0] for uid in "abcdef"))
    assert len(read) == 1
    assert tokens_kept(bench) == 6 * (len(PROMPT) + 2 * 5)


def test_a_row_whose_beginning_goes_while_it_is_submitted_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    bench.submit(*turns("a", 0, 1))
    find = shared_prefixes.without_shared

    def found(*given: Any) -> Kept:
        kept = find(*given)
        bench.run.abort_trajectories([key("a", 0)], "lost")
        return kept

    monkeypatch.setattr(shared_prefixes, "without_shared", found)
    assert bench.submit(*turns("a", 1, 1)) == ["ACCEPTED"]
    [kept] = group_of(bench).stored_rows()
    assert kept.parent is None
    assert kept.nbytes == ROW_OVERHEAD_BYTES + 4 * (len(PROMPT) + 5) + 5


def test_a_row_that_begins_as_one_that_its_request_replaces_is_kept_whole() -> None:
    bench = Bench(n_samples_per_prompt=2, train_batch_size=9)
    bench.submit(*turns("a", 0, 1))
    assert bench.submit(*turns("a", 0, 1, attempt=1), *turns("a", 1, 1)) == ["ACCEPTED"] * 2
    assert group_of(bench).kept == {}
    assert {one.name for one in group_of(bench).stored_rows()} == {RowName(0, 1, 0), RowName(1, 0, 0)}


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
        kept = [told for part in one.run.export(0) for told in to_rows(part)]
        assert kept == list(to_rows(from_rows([*turns("a", 1), *turns("a", 2)])))

    def test_a_row_that_began_as_a_lost_one_is_lost_with_its_group(self) -> None:
        log = LastingLog()
        bench = Bench(log=log, n_samples_per_prompt=3, train_batch_size=9)
        for sample in range(2):
            bench.submit(*turns("a", sample, 1))
        bench.run.abort_trajectories([key("a", 0)], "lost")
        [first] = group_of(bench).kept.values()
        log.tables[first.ref.table] = table(row("b"))
        bench.reopen()
        assert bench.state.open == {}
        assert any(isinstance(event, GroupDropped) and event.reason == "rows_lost" for event in log.events)


def needed(group: Group) -> set[RowName]:
    """The rows with which those of the group begin, and that are no part of it."""
    found: set[RowName] = set()
    for one in group.ordered_rows():
        name = one.parent
        while name is not None:
            found.add(name)
            name = group.find(name).parent
    return found - {one.name for one in group.ordered_rows()}


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
        assert set(group_of(bench).kept) == needed(group_of(bench))
        assert bench.state.row_bytes == sum(stored.nbytes for stored in group_of(bench).stored_rows())
        assert len(bench.rows) == len([*group_of(bench).stored_rows()])
    if not sent:
        return
    group = group_of(bench)
    picked: list[PickedRow] = bench.rows.pick([(group, group.ordered_rows())])
    found = gather(picked, False, bench.log.get)
    assert (
        contents(found)["tokens"]
        == contents(table(*(one for sample in sorted(sent) for one in sent[sample])))["tokens"]
    )


def test_a_prefix_of_a_step_that_is_not_here_is_refused() -> None:
    bench, steps = Bench(), table(turns("a")[1])
    [tokens] = steps.tokens.arrays()
    prefixes = Prefixes(np.array([55]), np.array([zlib.crc32(tokens[:55].tobytes())], np.uint32))
    rest = Ragged.from_arrays([tokens[55:]], np.int32)
    with pytest.raises(PrefixUnknownError, match="the run does not have the step before it"):
        bench.run.submit(replace(steps, tokens=rest, prefix_lengths=prefixes.lengths), prefixes)
