"""A trainer comes back with a checkpoint: one that fits goes on, one that would skip accepted rows is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gristmill.errors import FailedPreconditionError, InvalidArgumentError, StaleIncarnationError, UnavailableError
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import GenerationBegan
from gristmill_service.storage.run_store import Replay
from tests.pipeline.written import column
from tests.run.harness import Bench, group_rows
from tests.run.logs import RecordingLog


def sealed(count: int, **settings: Any) -> Bench:
    """A run with that many batches of one group each, all published."""
    bench = Bench(train_batch_size=1, max_buffered_batches=20, **settings)
    for number in range(count):
        bench.submit(*group_rows(f"u{number}"))
    bench.make_batches()
    return bench


def train(bench: Bench, *batches: int) -> None:
    for batch in batches:
        bench.run.acknowledge("policy", 0, Position(batch), 0, commit=False)


def test_a_checkpoint_ahead_of_what_was_acknowledged_is_refused_and_says_what_would_be_lost() -> None:
    bench = sealed(3)
    train(bench, 0)
    with pytest.raises(FailedPreconditionError) as refused:
        bench.run.resume("policy", Checkpoint(Position(3)), "launch")
    message = str(refused.value)
    assert "the checkpoint is at batch 3 epoch 0 mini-batch 0" in message
    assert "only the training before batch 1 epoch 0 mini-batch 0" in message
    assert "2 sealed batches with 2 groups" in message
    assert "give_up_reason" in message
    assert bench.run.resume("policy", Checkpoint(Position(1)), "launch").position == Position(1), "one that fits"


def test_groups_that_are_given_up_are_dropped_for_the_reason_and_never_trained() -> None:
    bench = sealed(4)
    train(bench, 0)
    resumed = bench.run.resume("policy", Checkpoint(Position(3), give_up_reason="redis rolled back"), "launch")
    assert resumed.position == Position(3)
    assert bench.run.shard("policy", 0, None, 0).position == Position(3)
    status = bench.run.status()
    assert status.groups_dropped == {"redis rolled back": 2}
    groups = {group.uid: (group.state, group.reason) for part in bench.run.groups() for group in part}
    assert groups["u1"] == groups["u2"] == ("dropped", "redis rolled back")
    assert groups["u0"][0] == groups["u3"][0] == "sealed"
    assert sorted(number for _, number in bench.store.batches) == [0, 3], "shards of what is given up go"
    assert bench.submit(*group_rows("u1")) == ["DROPPED"] * 2
    assert bench.replayed() == bench.state


def test_a_checkpoint_of_an_earlier_incarnation_fits_as_far_as_any_rank_ever_came() -> None:
    bench = sealed(3)
    train(bench, 0, 1)
    bench.run.resume("policy", Checkpoint(Position(0)), "older checkpoint")
    assert bench.run.resume("policy", Checkpoint(Position(2)), "newer checkpoint").position == Position(2)


def test_a_checkpoint_in_the_middle_of_a_batch_that_was_not_begun_is_refused() -> None:
    bench = Bench(train_batch_size=2, policy_mini_batch_size=1)
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    with pytest.raises(FailedPreconditionError, match="the rest of a started batch"):
        bench.run.resume("policy", Checkpoint(Position(0, 0, 1)), "launch")


def test_a_checkpoint_of_another_run_of_the_name_is_refused() -> None:
    bench = sealed(1)
    train(bench, 0)
    checkpoint = Checkpoint(Position(1), run_id=bench.run.run_id, generation=1)
    with pytest.raises(FailedPreconditionError, match="is of another run of this name"):
        bench.run.resume("policy", checkpoint._replace(run_id="0" * 32), "launch")
    resumed = bench.run.resume("policy", checkpoint, "launch")
    assert (resumed.run_id, resumed.generation) == (bench.run.run_id, 1)


def test_a_run_id_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="run_id is '\\\\ud800', which is not valid Unicode"):
        Bench().run.resume("policy", Checkpoint(None, run_id="\ud800"), "launch")


def test_a_failed_batch_before_the_position_is_no_reason_to_refuse() -> None:
    from tests.run.harness import BuildBatch

    bench = sealed(2, build_batch=BuildBatch(fails={1}))
    train(bench, 0)
    assert bench.run.resume("policy", Checkpoint(Position(2)), "launch").position == Position(2)


class RolledBackLog(RecordingLog):
    """A log that is found again without its last records. generation: that of the run before."""

    def __init__(self, records: list[bytes], config: bytes, generation: int) -> None:
        super().__init__()
        self.records, self.config = records, config
        self.note_generation(generation)

    def replay(self) -> Replay:
        return Replay(None, list(self.records), lambda: True, self.generation)


def rolled_back(bench: Bench, keep: int) -> Bench:
    again = Bench.__new__(Bench)
    again.__dict__.update(bench.__dict__)
    again.log = RolledBackLog(bench.log.records[:keep], b"{}", bench.log.generation)
    again.log.retain = lambda numbers: set()
    again.reopen()
    return again


def test_a_log_found_shorter_than_promised_begins_a_generation() -> None:
    bench = sealed(3)
    train(bench, 0)
    short = len(bench.log.records)
    train(bench, 1, 2)
    again = rolled_back(bench, short)
    assert again.run.status().generation == 2
    began = [event for event in again.log.events if isinstance(event, GenerationBegan)]
    assert began == [GenerationBegan(2, {"policy": Position(1)})]


def test_a_checkpoint_from_before_a_rollback_fits_only_as_far_as_the_run_was_rolled_back() -> None:
    bench = sealed(3)
    train(bench, 0)
    short = len(bench.log.records)
    train(bench, 1, 2)
    again = rolled_back(bench, short)
    again.make_batches()
    # Another trainer goes on in the new generation, past where the old one was.
    train(again, 1, 2)
    with pytest.raises(FailedPreconditionError, match="its log was rolled back in between"):
        again.run.resume("policy", Checkpoint(Position(3), generation=1), "old trainer")
    assert again.run.resume("policy", Checkpoint(Position(1), generation=1), "old one").position == Position(1)
    assert again.run.resume("policy", Checkpoint(Position(3), generation=2), "new one").position == Position(3)
    assert again.run.batch(1).state is BatchState.PUBLISHED


def test_a_commit_that_comes_after_a_rollback_is_superseded_and_checkpoints_still_fit() -> None:
    """It was accepted, and then every checkpoint was refused: before what was committed, or ahead of the run."""
    bench = sealed(4)
    short = len(bench.log.records)
    train(bench, 0, 1, 2)
    again = rolled_back(bench, short)
    with pytest.raises(StaleIncarnationError, match="resume from a checkpoint at or before that position"):
        again.run.commit("policy", Position(3), 0)
    assert again.run.commit("policy", Position(0), 0).position == Position(0)
    assert again.run.resume("policy", Checkpoint(Position(0), generation=1), "launch").position == Position(0)
    train(again, 0)
    assert again.run.commit("policy", Position(1), 0).position == Position(1)


def test_a_trainer_that_goes_on_over_a_rollback_that_cost_it_nothing_learns_the_generation() -> None:
    bench = sealed(3)
    train(bench, 0)
    again = rolled_back(bench, len(bench.log.records))
    again.make_batches()
    moved = again.run.acknowledge("policy", 0, Position(1), 0, commit=False)
    assert (moved.position, moved.generation) == (Position(2), 2)
    assert again.run.commit("policy", Position(1), 0).generation == 2
    assert again.run.resume("policy", Checkpoint(Position(2), generation=moved.generation), "launch")


def test_a_rank_that_waits_far_ahead_of_a_run_that_was_rolled_back_learns_it() -> None:
    bench = sealed(3)
    short = len(bench.log.records)
    train(bench, 0, 1, 2)
    again = rolled_back(bench, short)
    assert again.run.batch(3).state is BatchState.PENDING, "the next one is waited for as ever by who only reads"
    calls: list[Callable[[], Any]] = [
        lambda: again.run.batch(5),
        lambda: again.run.shard("policy", 0, Position(5), 0),
    ]
    for call in calls:
        with pytest.raises(FailedPreconditionError, match=r"its log was rolled back \(generation 2\)"):
            call()


def test_a_rank_that_waits_for_the_batch_after_those_that_it_has_to_train_again_learns_it() -> None:
    """They fill the buffer: nothing behind them is sealed until they are trained."""
    bench = sealed(3)
    train(bench, 0)
    short = len(bench.log.records)
    train(bench, 1, 2)
    again = rolled_back(bench, short)
    again.make_batches()
    calls: list[Callable[[], object]] = [
        lambda: again.run.batch(3, [0], "policy"),
        lambda: again.run.batch(3, (), "policy"),
        lambda: again.run.shard("policy", 0, Position(3), 0),
    ]
    for call in calls:
        with pytest.raises(FailedPreconditionError, match=r"batch 3 lies ahead .* before batch 1 epoch 0 mini-batch 0"):
            call()
    assert again.run.batch(1, [0], "policy").state is BatchState.PUBLISHED
    assert again.run.batch(2, [0], "policy").state is BatchState.PUBLISHED, "what is there may be read ahead"
    train(again, 1, 2)
    assert again.run.batch(3, [0], "policy").state is BatchState.PENDING, "it is its next"
    assert again.run.shard("policy", 0, Position(3), 0).state is BatchState.PENDING


def test_before_any_rollback_a_rank_may_wait_for_a_batch_far_ahead() -> None:
    bench = sealed(1)
    assert bench.run.batch(7, [0], "policy").state is BatchState.PENDING
    assert bench.run.shard("policy", 0, Position(7), 0).state is BatchState.PENDING


def test_no_two_generations_have_one_number_though_a_rollback_takes_back_the_beginning_of_one() -> None:
    """As where one failover follows another at once."""
    bench = sealed(3)
    short = len(bench.log.records)
    train(bench, 0)
    again = rolled_back(bench, len(bench.log.records))
    assert again.run.status().generation == 2
    again.make_batches()
    train(again, 1, 2)
    once_more = rolled_back(again, short)
    assert once_more.run.status().generation == 3
    once_more.make_batches()
    train(once_more, 0, 1, 2)
    with pytest.raises(FailedPreconditionError, match=r"The checkpoint is of generation 2 .* is in generation 3"):
        once_more.run.resume("policy", Checkpoint(Position(3), generation=2), "of the lost generation")
    assert once_more.replayed() == once_more.state


def test_columns_for_a_batch_that_a_rollback_took_back_are_refused_at_once() -> None:
    bench = sealed(1, columns=[column("verdict", scope="row")])
    short = len(bench.log.records)
    bench.submit(*group_rows("more"))
    verdict = {"verdict": np.zeros(1, np.float32)}
    with pytest.raises(UnavailableError, match="batch 1 has no forward shards yet"):
        bench.run.write(1, 0, 0, 1, verdict)
    again = rolled_back(bench, short)
    with pytest.raises(
        FailedPreconditionError, match=r"batch 1 lies ahead .* before batch 0 .* its log was rolled back"
    ):
        again.run.write(1, 0, 0, 1, verdict)


def test_a_checkpoint_past_what_a_rollback_left_is_refused_with_the_rollback_and_of_the_position_that_fits() -> None:
    bench = sealed(1)
    train(bench, 0)
    short = len(bench.log.records)
    bench.submit(*group_rows("more"), *group_rows("and more"))
    bench.make_batches()
    train(bench, 1, 2)
    again = rolled_back(bench, short)
    for reason in ("", "failover"):
        with pytest.raises(FailedPreconditionError) as refused:
            again.run.resume("policy", Checkpoint(Position(3), generation=1, give_up_reason=reason), "launch")
        assert "log was rolled back (generation 2)" in str(refused.value)
        assert "at or before batch 1 epoch 0 mini-batch 0" in str(refused.value)
        assert "another run" not in str(refused.value)
    assert again.run.resume("policy", Checkpoint(None), "launch").position == Position(0)


def test_a_trainer_whose_resume_was_rolled_back_learns_it_and_never_shares_an_incarnation_with_the_next() -> None:
    bench = sealed(2)
    short = len(bench.log.records)
    lost = bench.run.resume("policy", Checkpoint(None), "one")
    again = rolled_back(bench, short)
    again.make_batches()
    with pytest.raises(
        FailedPreconditionError, match=r"incarnation \d+ is unknown in this run, .* its log was rolled back"
    ):
        again.run.acknowledge("policy", 0, Position(0), lost.incarnation, commit=False)
    following = again.run.resume("policy", Checkpoint(None), "two")
    assert following.incarnation > lost.incarnation
    with pytest.raises(StaleIncarnationError):
        again.run.acknowledge("policy", 0, Position(0), lost.incarnation, commit=False)
    assert again.run.acknowledge("policy", 0, Position(0), following.incarnation, commit=False).position == Position(1)
    assert again.replayed() == again.state
