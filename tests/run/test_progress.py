"""Ranks on their way through the batches."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.batch_table import BatchTable
from gristmill.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    StaleIncarnationError,
    UnavailableError,
)
from gristmill_service.config import Model
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.answers import BatchState, Moved, Position, Resumed
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.waiters import shard_is_settled
from tests.run.harness import Bench, group_rows


def published(batches: int = 1, **settings: Any) -> Bench:
    """A bench with that many batches of two groups (two mini-batches)."""
    bench = Bench(**settings)
    for batch in range(batches):
        bench.submit(*group_rows(f"a{batch}"), *group_rows(f"b{batch}"))
    bench.make_batches()
    return bench


def ack(
    bench: Bench,
    *position: int,
    rank: int = 0,
    model: Model = "policy",
    incarnation: int = 0,
    commit: bool = False,
) -> Position | None:
    moved: Moved = bench.run.acknowledge(model, rank, Position(*position), incarnation, commit)
    return moved.position


def test_positions_go_mini_batch_by_mini_batch_epoch_by_epoch_batch_by_batch() -> None:
    bench = published(2, update_epochs_per_batch=2)
    order = [Position(b, e, m) for b in range(2) for e in range(2) for m in range(2)]
    for position, following in zip(order, [*order[1:], Position(2)], strict=True):
        assert bench.run.shard("policy", 0, None, 0).position == position
        assert ack(bench, *position) == following


def test_acknowledging_what_is_passed_changes_nothing_and_what_is_ahead_is_refused() -> None:
    bench = published()
    assert ack(bench, 0, 0, 0) == Position(0, 0, 1)
    assert ack(bench, 0, 0, 0) == Position(0, 0, 1)
    with pytest.raises(
        FailedPreconditionError, match=r"batch 1 epoch 0 mini-batch 0 cannot .*next is batch 0 epoch 0 mini-batch 1"
    ):
        ack(bench, 1)


def test_a_batch_that_is_not_published_cannot_be_acknowledged() -> None:
    bench = Bench(train_batch_size=1)
    with pytest.raises(FailedPreconditionError, match="not published yet"):
        ack(bench, 0)
    bench.submit(*group_rows("a"))
    with pytest.raises(FailedPreconditionError, match="not published yet"):
        ack(bench, 0)


def test_the_numbers_of_a_batch_that_is_sealed_and_not_published_may_be_asked_for_again() -> None:
    bench = Bench(build_batch=build_batch, train_batch_size=1)
    with pytest.raises(NotFoundError, match="batch 0 is not published yet"):
        bench.run.numbers(0)
    bench.submit(*group_rows("a"))
    with pytest.raises(UnavailableError, match="batch 0 is not published yet; retry later"):
        bench.run.numbers(0)
    bench.make_batches()
    assert BatchTable.decode(bench.run.numbers(0).table).by_row()["uid"].tolist() == ["a", "a"]


def test_ranks_move_on_their_own_and_shards_may_be_pulled_in_any_order() -> None:
    bench = published(dp_size=2, micro_batch={"size": 1})
    ack(bench, 0, rank=1)
    assert bench.run.shard("policy", 0, None, 0).position == Position(0)
    assert bench.run.shard("policy", 1, None, 0).position == Position(0, 0, 1)
    view = bench.run.shard("policy", 0, Position(0, 0, 1), 0)
    assert view.state is BatchState.PUBLISHED
    assert view.address is not None
    assert view.location is not None
    data = b"".join(bench.run.read_shard(0, view.address))
    assert len(data) == view.location.size


def test_a_batch_is_freed_when_every_rank_of_every_model_is_past_it_and_it_is_committed() -> None:
    bench = published(2, dp_size=2, critic_mini_batch_size=2, micro_batch={"size": 1})
    steps: list[tuple[tuple[Model, int], Position]] = [
        *((("policy", rank), Position(0, 0, m)) for rank in range(2) for m in range(2)),
        *((("critic", rank), Position(0)) for rank in range(2)),
    ]
    for (model, rank), position in steps:
        assert bench.run.status().batches_freed == 0
        bench.run.acknowledge(model, rank, position, 0, commit=True)
    assert bench.run.status().batches_freed == 1
    with pytest.raises(NotFoundError, match="batch 0 is freed"):
        bench.run.batch(0)
    with pytest.raises(NotFoundError):
        bench.run.shard("policy", 0, Position(0), 0)
    with pytest.raises(NotFoundError):
        bench.store.plan("run", 0)


def test_without_a_commit_nothing_is_freed_and_a_commit_ahead_of_the_ranks_waits_for_them() -> None:
    bench = published(2)
    for m in range(2):
        ack(bench, 0, 0, m)
    assert bench.run.status().batches_freed == 0
    assert bench.run.commit("policy", Position(2), 0).position == Position(2)
    assert bench.run.status().batches_freed == 1, "no rank has acknowledged the second"
    ack(bench, 1, 0, 0)
    ack(bench, 1, 0, 1)
    assert bench.run.status().batches_freed == 2
    assert bench.run.status().shard_bytes == 0


def test_a_commit_before_the_committed_changes_nothing_and_one_past_the_end_is_refused() -> None:
    bench = published(2)
    bench.run.commit("policy", Position(1), 0)
    assert bench.run.commit("policy", Position(0, 0, 1), 0).position == Position(1)
    with pytest.raises(FailedPreconditionError, match="past the last sealed batch, number 1"):
        bench.run.commit("policy", Position(2, 0, 1), 0)
    with pytest.raises(InvalidArgumentError, match="is not a valid position"):
        bench.run.commit("policy", Position(0, -1), 0)


def test_ranks_and_models_and_positions_that_do_not_exist_are_refused() -> None:
    bench = published(dp_size=2, micro_batch={"size": 1})
    for rank in (-1, 2):
        with pytest.raises(InvalidArgumentError, match=rf"rank {rank} does not exist with dp_size 2"):
            bench.run.shard("policy", rank, None, 0)
        with pytest.raises(InvalidArgumentError, match="with dp_size 2"):
            ack(bench, 0, rank=rank)
    with pytest.raises(InvalidArgumentError, match="model critic does not exist in this run"):
        bench.run.shard("critic", 0, None, 0)
    with pytest.raises(InvalidArgumentError, match="epoch 0 mini-batch 2 does not exist"):
        bench.run.shard("policy", 0, Position(0, 0, 2), 0)
    with pytest.raises(InvalidArgumentError, match=r"epoch 1 mini-batch . does not exist"):
        bench.run.shard("policy", 0, Position(0, 1, 0), 0)
    with pytest.raises(InvalidArgumentError, match="batches are numbered from 0"):
        bench.run.batch(-1)


class TestResuming:
    def test_all_ranks_go_to_the_position_under_a_new_incarnation(self) -> None:
        bench = published(2, dp_size=2, micro_batch={"size": 1})
        for m in range(2):
            for rank in range(2):
                ack(bench, 0, 0, m, rank=rank)
        resumed = bench.run.resume("policy", Checkpoint(Position(0, 0, 1)), "launch-1")
        first = resumed.incarnation
        assert first > 1
        assert resumed == Resumed(first, Position(0, 0, 1), bench.run.run_id, 1)
        assert [bench.run.shard("policy", rank, None, first).position for rank in range(2)] == [Position(0, 0, 1)] * 2
        assert bench.run.resume("policy", Checkpoint(Position(1)), "launch-2").incarnation == first + 1, (
            "a newer checkpoint, too"
        )
        assert bench.run.shard("policy", 1, None, first + 1).position == Position(1)

    def test_ranks_of_one_launch_get_the_same_also_after_the_first_has_moved_on(self) -> None:
        bench = published()
        first = bench.run.resume("policy", Checkpoint(None), "launch")
        ack(bench, 0, incarnation=first.incarnation)
        assert bench.run.resume("policy", Checkpoint(None), "launch") == first
        assert bench.run.resume("policy", Checkpoint(Position(0)), "launch") == first
        assert bench.run.shard("policy", 0, None, first.incarnation).position == Position(0, 0, 1)
        with pytest.raises(FailedPreconditionError, match="load the same checkpoint on all ranks"):
            bench.run.resume("policy", Checkpoint(Position(0, 0, 1)), "launch")

    def test_a_rank_of_an_older_launch_that_comes_late_takes_nothing_from_the_newer(self) -> None:
        bench = published()
        bench.run.resume("policy", Checkpoint(None), "one")
        newer = bench.run.resume("policy", Checkpoint(None), "two")
        for position in (None, Position(0)):
            with pytest.raises(StaleIncarnationError, match="launch 'one' was superseded by 'two'"):
                bench.run.resume("policy", Checkpoint(position), "one")
        assert bench.run.resume("policy", Checkpoint(None), "two") == newer

    def test_calls_of_an_older_incarnation_are_refused_and_change_nothing(self) -> None:
        bench = published()
        old, new = (bench.run.resume("policy", Checkpoint(None), launch).incarnation for launch in ("one", "two"))
        for call in (
            lambda: bench.run.shard("policy", 0, None, old),
            lambda: ack(bench, 0, incarnation=old),
            lambda: bench.run.commit("policy", Position(1), old),
        ):
            with pytest.raises(StaleIncarnationError, match=f"incarnation {old} was superseded by {new}"):
                call()
        assert bench.run.shard("policy", 0, None, 0).position == Position(0), "0 is not checked"
        assert ack(bench, 0, incarnation=new) == Position(0, 0, 1)

    def test_a_trainer_that_waits_for_its_shard_is_woken_when_another_begins(self) -> None:
        bench = Bench()
        first = bench.run.begin("policy", [0])
        woken: list[str] = []
        bench.run.wait(
            shard_is_settled("policy", 0, Position(0), first.incarnation), lambda: woken.append("superseded")
        )
        assert not woken
        bench.run.begin("policy", [0])
        assert woken == ["superseded"]

    def test_an_incarnation_that_was_never_given_out_is_refused(self) -> None:
        bench = published()
        with pytest.raises(
            FailedPreconditionError, match="incarnation 4 is unknown in this run, and the current one is 1"
        ):
            ack(bench, 0, incarnation=4)

    def test_acknowledgements_before_a_resume_do_not_count_after_it(self) -> None:
        bench = published(2)
        ack(bench, 0, 0, 0)
        ack(bench, 0, 0, 1)
        incarnation = bench.run.resume("policy", Checkpoint(Position(0)), "launch").incarnation
        bench.run.commit("policy", Position(1), incarnation)
        assert bench.run.status().batches_freed == 0, "the ranks have it before them again"
        ack(bench, 0, 0, 0, incarnation=incarnation)
        ack(bench, 0, 0, 1, incarnation=incarnation)
        assert bench.run.status().batches_freed == 1

    def test_a_position_whose_data_may_be_gone_or_that_does_not_exist_is_refused(self) -> None:
        bench = published(2)
        bench.run.commit("policy", Position(1), 0)
        with pytest.raises(FailedPreconditionError, match="lies before the committed batch 1"):
            bench.run.resume("policy", Checkpoint(Position(0, 0, 1)), "launch")
        with pytest.raises(FailedPreconditionError, match="past the last sealed"):
            bench.run.resume("policy", Checkpoint(Position(3)), "launch")
        with pytest.raises(InvalidArgumentError, match="launch is empty"):
            bench.run.resume("policy", Checkpoint(None), "")
        with pytest.raises(InvalidArgumentError, match=r"launch 'xx.* has 1001 characters, and the limit is 1000"):
            bench.run.resume("policy", Checkpoint(None), "x" * 1001)
        assert bench.run.resume("policy", Checkpoint(None), "launch").position == Position(1)

    def test_a_position_at_the_end_of_a_batch_that_is_freed_since_goes_on_with_the_next(self) -> None:
        bench = published(2)
        ack(bench, 0, 0, 0)
        ack(bench, 0, 0, 1)
        assert bench.run.commit("policy", Position(0, 0, 2), 0).position == Position(0, 0, 2)
        assert bench.run.status().batches_freed == 1
        bench.run.resume("policy", Checkpoint(None), "launch")
        assert bench.run.shard("policy", 0, None, 0).position == Position(1)

    def test_models_resume_by_themselves(self) -> None:
        bench = published(critic_mini_batch_size=1)
        resumed = bench.run.resume("policy", Checkpoint(None), "launch")
        assert bench.run.shard("critic", 0, None, 0).incarnation == 1
        assert bench.run.shard("policy", 0, None, 0).incarnation == resumed.incarnation
