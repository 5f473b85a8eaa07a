"""A batch that cannot be aligned for the trainer's ranks: its rows stay until the trainer goes past it, for other ranks
may align it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import BatchFailedError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.answers import BatchState, Outcome, Position
from gristmill_service.run.machine.codec import snapshot_of
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import BatchFailed, BatchWithdrawn, Resized
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.run_store import RunStore
from tests.run.harness import (
    CONFIG,
    Bench,
    BuildBatch,
    HeldBuilders,
    SettledRun,
    build_all,
    group_rows,
    open_run,
    row,
    table,
)
from tests.run.logs import lose_rows

# For two ranks these cannot be aligned.
MISALIGNED = [(0, 2)]


def failed(*, batches: int = 1, misaligned: Any = MISALIGNED, **settings: Any) -> Bench:
    """A run for two ranks with that many batches of one group each, as far as they can be built."""
    chosen = {"train_batch_size": 1, "dp_size": 2, "max_buffered_batches": 20} | settings
    bench = Bench(build_batch=BuildBatch(misaligned=misaligned), **chosen)
    for number in range(batches):
        bench.submit(*group_rows(f"u{number}"))
    bench.make_batches()
    return bench


def resume(bench: Bench, dp_size: int, position: Position | None = None, **more: Any) -> None:
    """Another start of the trainer."""
    launch = f"launch {bench.state.models['policy'].incarnation}"
    bench.run.resume("policy", Checkpoint(position, **more), launch, dp_size)
    bench.make_batches()


def acknowledge(bench: Bench, position: Position, *ranks: int, commit: bool = False) -> None:
    for rank in ranks or range(bench.state.dp_size):
        bench.run.acknowledge("policy", rank, position, 0, commit)


def holds_rows_of(bench: Bench) -> set[int]:
    assert bench.replayed() == bench.state
    return set(bench.state.batches)


class TestKept:
    def test_it_is_failed_with_its_reason_and_its_rows_are_there(self) -> None:
        bench = failed()
        with pytest.raises(BatchFailedError, match="batch 0 failed: cannot be aligned for dp_size = 2"):
            bench.run.batch(0)
        status = bench.run.status()
        assert status.failed_batches == {0: "cannot be aligned for dp_size = 2"}
        assert (status.batches_published, status.batches_freed) == (1, 0)
        assert status.groups_dropped == {}, "not yet"
        assert [(group.state, group.batch) for part in bench.run.groups() for group in part] == [("sealed", 0)]
        assert (len(bench.rows), status.row_bytes) == (2, sum(group.nbytes for group in bench.state.batches[0].groups))
        assert bench.submit(*group_rows("u0")) == ["DUPLICATE"] * 2

    def test_ranks_go_on_with_the_next_batch_meanwhile(self) -> None:
        bench = failed(batches=2)
        for rank in range(2):
            answer = bench.run.shard("policy", rank, None, 0)
            assert (answer.position, answer.state) == (Position(1), BatchState.PUBLISHED)
        assert holds_rows_of(bench) == {0, 1}

    def test_what_fails_for_another_reason_is_dropped_at_once(self) -> None:
        bench = failed(misaligned=[])
        bench.build_batch._fails = {1}
        bench.submit(*group_rows("u1"))
        bench.make_batches()
        assert holds_rows_of(bench) == {0}
        assert bench.run.status().groups_dropped == {"batch_failed": 1}

    def test_it_takes_room_until_the_trainer_is_past_it(self) -> None:
        bench = failed(max_buffered_batches=1)
        assert bench.begin("u1") == ["NO_ROOM"]
        acknowledge(bench, Position(0))
        assert bench.begin("u1") == ["ADMITTED"]
        bench.submit(*group_rows("u1"))
        bench.make_batches()
        assert bench.run.batch(1).state is BatchState.PUBLISHED

    def test_rollouts_are_not_paced_by_it_until_it_is_built_for_other_ranks(self) -> None:
        bench = failed(max_staleness=0)
        assert bench.begin("u1") == ["ADMITTED"]
        resume(bench, 1)
        bench.run.abort_groups(0, ["u1"], "")
        assert bench.begin("u2") == ["NO_ROOM"]


class TestOtherRanks:
    def test_a_dp_size_that_aligns_it_has_it_published_as_any_other(self) -> None:
        bench = failed(batches=2)
        resume(bench, 1)
        assert bench.run.shard("policy", 0, None, 0).position == Position(0)
        assert bench.run.batch(0).state is BatchState.PUBLISHED
        assert bench.run.status().failed_batches == {}
        for number in range(2):
            acknowledge(bench, Position(number), commit=True)
        status = bench.run.status()
        assert (status.batches_freed, status.groups_dropped, status.row_bytes) == (2, {}, 0)

    def test_one_that_does_not_align_it_either_gives_a_new_reason(self) -> None:
        bench = failed(misaligned=[(0, 2), (0, 3)])
        bench.run.resume("policy", Checkpoint(None), "three", 3)
        assert bench.run.batch(0).state is BatchState.PENDING, "it is tried"
        bench.make_batches()
        with pytest.raises(BatchFailedError, match="dp_size = 3"):
            bench.run.batch(0)
        resume(bench, 1)
        assert bench.run.batch(0).state is BatchState.PUBLISHED

    def test_the_same_dp_size_does_not_try_again(self) -> None:
        bench = failed()
        resume(bench, 2)
        assert not any(isinstance(event, BatchWithdrawn) for event in bench.log.events)
        assert list(bench.run.status().failed_batches) == [0]
        assert holds_rows_of(bench) == {0}

    def test_a_batch_that_other_ranks_trained_in_part_goes_on_where_they_were(self) -> None:
        bench = failed(misaligned=[(0, 3)], train_batch_size=2, batches=2)
        acknowledge(bench, Position(0, 0, 0))
        resume(bench, 3)
        assert bench.run.status().shard_bytes == 0
        assert list(bench.run.status().failed_batches) == [0]
        resume(bench, 2)
        assert bench.run.shard("policy", 0, None, 0).position == Position(0), "none of it is in a checkpoint"
        acknowledge(bench, Position(0, 0, 0))
        bench.run.commit("policy", Position(0, 0, 1), 0)
        resume(bench, 3)
        resume(bench, 2)
        assert bench.run.shard("policy", 0, None, 0).position == Position(0, 0, 1)

    def test_a_size_that_comes_while_it_is_built_is_what_it_is_built_for(self) -> None:
        bench = failed(misaligned=[(0, 2)])
        bench.run.resume("policy", Checkpoint(None), "one", 1)
        bench.run.resume("policy", Checkpoint(None), "two", 2)
        bench.make_batches()
        assert list(bench.run.status().failed_batches) == [0]
        assert holds_rows_of(bench) == {0}


class TestPast:
    """The events that release its rows."""

    def test_every_rank_says_that_it_goes_on_without_it(self) -> None:
        bench = failed()
        acknowledge(bench, Position(0), 0)
        assert holds_rows_of(bench) == {0}, "the other rank did not"
        acknowledge(bench, Position(0), 0)
        acknowledge(bench, Position(0), 1)
        assert (holds_rows_of(bench), len(bench.rows)) == (set(), 0)
        status = bench.run.status()
        assert (status.batches_freed, status.row_bytes, status.groups_dropped) == (1, 0, {"batch_failed": 1})
        assert [(group.state, group.reason) for part in bench.run.groups() for group in part] == [
            ("dropped", "batch_failed")
        ]
        assert list(status.failed_batches) == [0]

    def test_every_rank_acknowledges_a_shard_behind_it(self) -> None:
        bench = failed(batches=2)
        acknowledge(bench, Position(1), 0)
        assert holds_rows_of(bench) == {0, 1}
        acknowledge(bench, Position(1), 1)
        assert holds_rows_of(bench) == {1}

    @pytest.mark.parametrize("commit", [True, False])
    def test_acknowledging_the_shard_before_it_does_not(self, commit: bool) -> None:
        bench = failed(batches=3, misaligned=[(1, 2)])
        acknowledge(bench, Position(0), commit=commit)
        assert 1 in holds_rows_of(bench)
        assert bench.run.shard("policy", 0, None, 0).position == Position(2)
        resume(bench, 1)
        assert bench.run.batch(1).state is BatchState.PUBLISHED
        assert bench.run.shard("policy", 0, None, 0).position == Position(1 if commit else 0)

    def test_a_late_repetition_of_an_acknowledgement_before_it_does_not(self) -> None:
        bench = failed(misaligned=[(0, 3)], train_batch_size=2, batches=2)
        acknowledge(bench, Position(0, 0, 0), commit=True)
        resume(bench, 3)
        acknowledge(bench, Position(0, 0, 0))
        assert holds_rows_of(bench) == {0}
        acknowledge(bench, Position(0, 0, 1))
        assert holds_rows_of(bench) == set()

    def test_a_commit_behind_it_does_whatever_ranks_acknowledged(self) -> None:
        bench = failed(batches=2)
        bench.run.commit("policy", Position(0), 0)
        assert holds_rows_of(bench) == {0, 1}
        bench.run.commit("policy", Position(1), 0)
        assert holds_rows_of(bench) == {1}

    @pytest.mark.parametrize("dp_size", [1, 2])
    def test_a_resume_behind_it_does_also_with_other_ranks(self, dp_size: int) -> None:
        bench = failed(batches=2)
        resume(bench, dp_size, Position(1))
        assert holds_rows_of(bench) == {1}
        assert list(bench.run.status().failed_batches) == [0]

    def test_the_other_model_has_to_be_past_it_too(self) -> None:
        bench = failed(batches=2, critic_mini_batch_size=1)
        bench.run.commit("policy", Position(1), 0)
        assert holds_rows_of(bench) == {0, 1}
        resume(bench, 1, Position(1))
        assert bench.run.batch(0).state is BatchState.PUBLISHED, "the critic has yet to train it"
        bench.run.commit("critic", Position(1), 0)
        bench.run.acknowledge("critic", 0, Position(0), 0, commit=True)
        assert holds_rows_of(bench) == {1}

    def test_several_are_gone_past_one_by_one(self) -> None:
        bench = failed(batches=3, misaligned=[(0, 2), (1, 2)])
        acknowledge(bench, Position(0))
        assert holds_rows_of(bench) == {1, 2}
        acknowledge(bench, Position(1))
        assert holds_rows_of(bench) == {2}
        assert bench.run.status().batches_freed == 2

    def test_it_is_given_up_for_a_reason_and_counted_once(self) -> None:
        bench = failed(batches=3)
        resume(bench, 1, Position(2), give_up_reason="lost")
        assert holds_rows_of(bench) == {2}
        assert bench.run.status().groups_dropped == {"lost": 2}


class TestReplayed:
    def test_a_log_of_a_batch_that_failed_twice_and_was_built_reads_in_order(self) -> None:
        bench = failed(misaligned=[(0, 2), (0, 3)])
        resume(bench, 3)
        resume(bench, 1)
        kinds = (BatchFailed, BatchWithdrawn, Resized)
        kinds_in_order = [type(event).__name__ for event in bench.log.events if isinstance(event, kinds)]
        assert kinds_in_order == [
            "BatchFailed",
            "Resized",
            "BatchWithdrawn",
            "BatchFailed",
            "Resized",
            "BatchWithdrawn",
        ]
        assert bench.replayed() == bench.state

    @pytest.mark.parametrize("is_compacted", [True, False])
    def test_another_process_on_the_same_journal_keeps_it(self, tmp_path: Path, is_compacted: bool) -> None:
        stores = [JournalRunStore(tmp_path, "never")]

        def another() -> RunStore:
            stores[-1].close()
            stores.append(JournalRunStore(tmp_path, "never"))
            return stores[-1]

        check_that_it_outlives_its_process(stores[0], another, is_compacted)
        stores[-1].close()

    def test_rows_of_it_that_are_lost_end_it(self, tmp_path: Path) -> None:
        store = JournalRunStore(tmp_path, "never")
        _begun(store).close_log()
        store.close()
        lose_rows(tmp_path / "run-run", 0)
        store = JournalRunStore(tmp_path, "never")
        run, builders = _opened(store)
        build_all(run, builders)
        status = run.status()
        assert "rows of it are lost" in status.failed_batches[0]
        assert (status.row_bytes, status.groups_dropped) == (0, {"batch_failed": 1})
        store.close()


_SETTINGS = {"train_batch_size": 1, "dp_size": 4, "micro_batch": {"max_tokens": 8}, "on_misaligned": "error"}


def _opened(store: RunStore) -> tuple[SettledRun, HeldBuilders]:
    """The run as another process would find it. Its pipeline is the real one."""
    config = parse_config(CONFIG | _SETTINGS)
    return open_run(store.open("run"), config, store=MemoryShardStore(), build_batch=build_batch)


def _begun(store: RunStore) -> SettledRun:
    """A run with a batch of two rows, which make no four micro-batches."""
    store.create("run", b"{}").close()
    run, builders = _opened(store)
    run.submit(table(*group_rows("a", response=range(20))))
    build_all(run, builders)
    assert "dp_size = 4" in run.status().failed_batches[0]
    return run


def check_that_it_outlives_its_process(store: RunStore, another: Callable[[], RunStore], is_compacted: bool) -> None:
    """another: the same store, as another process opens it."""
    before = _begun(store)
    if is_compacted:
        before._log.compact(before._log.end, snapshot_of(before._writer.state))
    before.close_log()
    run, builders = _opened(another())
    build_all(run, builders)
    assert "dp_size = 4" in run.status().failed_batches[0]
    assert run.submit(table(row("a", reward=0.0, response=range(20)))).outcomes == [Outcome.DUPLICATE]
    run.resume("policy", Checkpoint(None), "two", 2)
    build_all(run, builders)
    assert run.batch(0).state is BatchState.PUBLISHED
    for rank in range(2):
        run.acknowledge("policy", rank, Position(0), 0, commit=True)
    status = run.status()
    assert (status.batches_freed, status.row_bytes, status.failed_batches) == (1, 0, {})
