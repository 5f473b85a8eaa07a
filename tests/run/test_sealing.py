"""When groups become batches, and which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gristmill.errors import BatchFailedError, FailedPreconditionError, ResourceExhaustedError
from gristmill_service.pipeline import BuiltBatch
from gristmill_service.run.machine.answers import BatchState, Position, RewardUpdate
from gristmill_service.run.machine.events import BatchSealed, GroupKey
from tests.run.harness import Bench, BuildBatch, group_rows, key, row


def test_a_batch_is_sealed_with_the_group_that_fills_it_and_is_logged_before_it_is_made() -> None:
    bench = Bench()
    bench.submit(*group_rows("a"))
    assert bench.sealed == []
    bench.submit(*group_rows("b"))
    assert bench.sealed == [0]
    assert bench.log.events[-1] == BatchSealed(0, (GroupKey(0, "a"), GroupKey(0, "b")), 0)
    assert bench.run.batch(0).state is BatchState.PENDING
    bench.make_batches()
    view = bench.run.batch(0)
    assert (view.state, view.plan[:10]) == (BatchState.PUBLISHED, b'{"batch":0')
    assert len(bench.rows) == 4, "rows stay until the batch is freed: it may have to be cut again"


def test_one_request_may_fill_several_batches() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"), *group_rows("b"), *group_rows("c"))
    bench.make_batches()
    assert [bench.uids(batch) for batch in range(3)] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("order", "batches"), [("completion", [["c", "b"], ["d", "a"]]), ("admission", [["a", "b"], ["c", "d"]])]
)
def test_groups_are_sealed_in_the_order_asked_for(order: str, batches: list[list[str]]) -> None:
    bench = Bench(seal_order=order)
    bench.begin("a", "b", "c", "d")
    for uid in "cbda":
        bench.submit(*group_rows(uid))
    bench.make_batches()
    assert [bench.uids(0), bench.uids(1)] == batches


def test_in_order_of_admission_a_dropped_group_is_not_waited_for() -> None:
    bench = Bench(seal_order="admission")
    bench.begin("a", "b", "c")
    bench.submit(*group_rows("c"), *group_rows("b"))
    assert bench.sealed == []
    bench.run.abort_groups(0, ["a"], "")
    bench.make_batches()
    assert bench.uids(0) == ["b", "c"]


def test_sealing_waits_while_as_many_batches_as_allowed_are_held() -> None:
    bench = Bench(train_batch_size=2, max_buffered_batches=1)
    bench.submit(*group_rows("a"))
    bench.run.seal(None)
    bench.submit(*group_rows("b"))
    bench.make_batches()
    assert bench.state.batches_sealed == 1
    bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
    assert bench.run.status().batches_freed == 1
    bench.submit(*group_rows("c"))
    assert bench.state.batches_sealed == 2


class TestExplicitSealing:
    def test_takes_what_is_complete_and_leaves_the_rest(self) -> None:
        bench = Bench()
        bench.submit(*group_rows("a"), row("b"))
        assert bench.run.seal(None).prompts == 1
        bench.make_batches()
        assert bench.uids(0) == ["a"]
        assert bench.submit(row("b", 1)) == ["ACCEPTED"]

    def test_is_idempotent_by_number_also_after_the_batch_is_freed(self) -> None:
        bench = Bench()
        bench.submit(*group_rows("a"))
        first = bench.run.seal(0)
        bench.make_batches()
        bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
        assert bench.run.seal(0) == first
        with pytest.raises(FailedPreconditionError, match="batch 5 cannot be sealed, the next is 1"):
            bench.run.seal(5)

    def test_refuses_when_nothing_is_complete(self) -> None:
        bench = Bench()
        bench.submit(row("a"))
        with pytest.raises(FailedPreconditionError, match=r"no prompt group is complete \(1 are open\)"):
            bench.run.seal(None)

    def test_keeps_the_order_of_admission_and_skips_what_is_incomplete(self) -> None:
        bench = Bench(train_batch_size=4, seal_order="admission")
        bench.begin("a", "b", "c")
        bench.submit(*group_rows("c"))
        bench.submit(*group_rows("a"))
        bench.run.seal(None)
        bench.make_batches()
        assert bench.uids(0) == ["a", "c"]


class TestSealingByCall:
    def test_a_batch_is_all_that_is_complete_when_it_is_asked_for_and_nothing_else_seals(self) -> None:
        bench = Bench(seal_by="call", train_batch_size=2)
        bench.submit(*(each for uid in "abc" for each in group_rows(uid)), row("d"))
        bench.reopen()
        assert bench.sealed == []
        assert bench.run.seal(0).prompts == 3
        bench.submit(row("d", 1, reward=0.0), *group_rows("e"))
        bench.make_batches()
        assert bench.state.batches_sealed == 1
        assert bench.run.seal(0).prompts == 3, "asked again, the batch stays what it was"
        assert bench.run.seal(1).prompts == 2
        bench.make_batches()
        assert [bench.uids(0), bench.uids(1)] == [["a", "b", "c"], ["d", "e"]]
        assert bench.replayed() == bench.state

    def test_groups_are_in_the_order_asked_for(self) -> None:
        bench = Bench(seal_by="call", seal_order="admission", train_batch_size=2)
        bench.begin("a", "b", "c", "d")
        bench.submit(*group_rows("d"), *group_rows("c"), *group_rows("a"))
        bench.run.seal(None)
        bench.make_batches()
        assert bench.uids(0) == ["a", "c", "d"]

    def test_a_batch_larger_than_usual_has_more_mini_batches(self) -> None:
        bench = Bench(seal_by="call", train_batch_size=2, policy_mini_batch_size=2, max_buffered_batches=3)
        bench.submit(*(each for uid in "abcde" for each in group_rows(uid)))
        bench.run.seal(None)
        bench.make_batches()
        for mini_batch in range(3):
            bench.run.acknowledge("policy", 0, Position(0, 0, mini_batch), 0, commit=True)
        assert bench.run.status().batches_freed == 1

    def test_the_complete_rest_is_the_last_batch_of_a_finished_run(self) -> None:
        bench = Bench(seal_by="call", train_batch_size=1, max_buffered_batches=4)
        bench.submit(*(each for uid in "abc" for each in group_rows(uid)), row("d"))
        assert bench.run.finish() == 1
        bench.make_batches()
        assert bench.uids(0) == ["a", "b", "c"]
        assert bench.run.batch(1).state is BatchState.END

    def test_no_more_batches_are_stored_than_allowed(self) -> None:
        bench = Bench(seal_by="call", train_batch_size=2, max_buffered_batches=1)
        bench.submit(*group_rows("a"))
        bench.run.seal(None)
        bench.submit(*group_rows("b"))
        with pytest.raises(ResourceExhaustedError, match="batch 1 cannot be sealed yet: max_buffered_batches: 1"):
            bench.run.seal(1)
        bench.make_batches()
        bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
        assert bench.run.seal(1).prompts == 1

    def test_no_more_groups_begin_than_there_is_capacity_for_and_the_refusal_says_what_to_call(self) -> None:
        bench = Bench(seal_by="call", train_batch_size=2, max_buffered_batches=2)
        assert bench.begin(*"abcde") == ["ADMITTED"] * 4 + ["NO_ROOM"]
        bench.submit(*(each for uid in "abcd" for each in group_rows(uid)))
        with pytest.raises(
            ResourceExhaustedError, match=r"max_buffered_batches: 2 .*; call SealBatch \(seal_by: call\)"
        ):
            bench.submit(*group_rows("e"))
        bench.run.seal(None)
        with pytest.raises(ResourceExhaustedError, match="wait for the trainer to commit one"):
            bench.submit(*group_rows("e"))


class TestZeroVariance:
    def test_a_group_of_equal_scores_is_dropped_and_its_room_is_free(self) -> None:
        bench = Bench(zero_variance_filter="replace", train_batch_size=1, max_buffered_batches=1)
        bench.submit(row("a", 0), row("a", 1))
        assert bench.run.status().groups_dropped == {"zero_variance": 1}
        assert bench.submit(*group_rows("b")) == ["ACCEPTED", "ACCEPTED"]
        assert bench.sealed == [0]

    @pytest.mark.parametrize(("score", "dropped"), [("last_step", True), ("sum", False)])
    def test_scores_are_those_of_the_pipeline(self, score: str, dropped: bool) -> None:
        bench = Bench(zero_variance_filter="replace", trajectory_score=score)
        bench.submit(row("a", 0), row("a", 1, step=0, last=False, reward=5.0), row("a", 1, step=1))
        assert bool(bench.run.status().groups_dropped) is dropped

    def test_equal_rewards_in_another_order_are_equal_scores(self) -> None:
        bench = Bench(zero_variance_filter="replace", trajectory_score="sum")
        for sample, rewards in enumerate([(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)]):
            bench.submit(*(row("a", sample, step=s, last=s == 2, reward=reward) for s, reward in enumerate(rewards)))
        assert bench.run.status().groups_dropped == {"zero_variance": 1}

    def test_equal_rewards_per_token_are_equal_scores_whichever_way_they_came(self) -> None:
        bench = Bench(zero_variance_filter="replace")
        bench.submit(row("a", 0, reward=[0.1, 0.2, 0.3], response=(1, 2, 3)))
        bench.submit(row("a", 1, reward=None, response=(1, 2, 3)))
        bench.run.set_rewards([RewardUpdate(key("a", 1), None, None, np.array([0.3, 0.2, 0.1]))])
        assert bench.run.status().groups_dropped == {"zero_variance": 1}

    def test_equal_rewards_per_token_are_equal_scores_however_steps_divide_them(self) -> None:
        """0.7 five times was 3.5 in one step, and 3.4999999999999996 in two."""
        bench = Bench(zero_variance_filter="replace", trajectory_score="sum")
        bench.submit(row("a", 0, reward=[0.7] * 5, response=[1] * 5))
        bench.submit(row("a", 1, step=0, last=False, reward=[0.7] * 2, response=[1] * 2))
        bench.submit(row("a", 1, step=1, reward=None, response=[1] * 3))
        bench.run.set_rewards([RewardUpdate(key("a", 1), 1, None, np.array([0.7] * 3))])
        assert bench.run.status().groups_dropped == {"zero_variance": 1}

    def test_it_is_judged_with_the_reward_that_comes_last(self) -> None:
        bench = Bench(zero_variance_filter="replace")
        bench.submit(row("a", 0, reward=0.25), row("a", 1, reward=None))
        assert not bench.run.status().groups_dropped
        bench.run.set_rewards([RewardUpdate(key("a", 1), None, 0.25)])
        assert bench.run.status().groups_dropped == {"zero_variance": 1}

    def test_it_is_judged_again_when_an_abort_takes_the_difference_away(self) -> None:
        bench = Bench(zero_variance_filter="replace", n_samples_per_prompt=3)
        bench.submit(row("a", 0), row("a", 1), row("a", 2, reward=2.0))
        assert bench.run.status().groups_complete == 1
        bench.run.abort_trajectories([key("a", 2)], "")
        assert bench.run.status().groups_dropped == {"zero_variance": 1}

    def test_a_lone_survivor_has_nothing_to_compare_and_stays(self) -> None:
        bench = Bench(zero_variance_filter="replace")
        bench.submit(row("a", 0))
        bench.run.abort_trajectories([key("a", 1)], "")
        assert bench.run.status().groups_complete == 1

    def test_masking_is_the_pipelines_and_drops_nothing_here(self) -> None:
        bench = Bench(zero_variance_filter="mask")
        bench.submit(row("a", 0), row("a", 1))
        assert bench.run.status().groups_complete == 1


class TestStaleness:
    def test_a_group_too_far_behind_is_dropped_when_it_completes(self) -> None:
        bench = Bench(max_staleness=1, stale="drop")
        bench.run.announce(2)
        bench.submit(*group_rows("a", policy_version=1))
        bench.submit(row("b", 0, policy_version=2), row("b", 1, policy_version=0))
        assert bench.run.status().groups_dropped == {"stale": 1}
        assert list(bench.state.complete) == [(0, "a")]

    def test_and_when_the_version_moves_on_while_it_waits(self) -> None:
        bench = Bench(max_staleness=1, stale="drop")
        bench.submit(*group_rows("a", policy_version=0))
        bench.run.announce(1)
        assert bench.run.status().groups_complete == 1
        bench.run.announce(2)
        assert bench.run.status().groups_dropped == {"stale": 1}

    def test_what_trains_nothing_is_never_stale_without_a_version(self) -> None:
        bench = Bench(max_staleness=0, stale="drop")
        bench.run.announce(9)
        bench.submit(*group_rows("a", loss_mask=[0]))
        assert bench.run.status().groups_complete == 1

    def test_counting_only_drops_nothing(self) -> None:
        bench = Bench(max_staleness=0, stale="count", train_batch_size=1)
        bench.run.announce(9)
        bench.submit(*group_rows("a", policy_version=0))
        bench.make_batches()
        assert bench.build_batch.versions == {0: 9}

    def test_a_batch_is_built_with_the_version_it_was_sealed_under(self) -> None:
        bench = Bench(train_batch_size=1, max_staleness=1, stale="drop")
        bench.submit(*group_rows("a", policy_version=0))
        bench.run.announce(7)
        bench.make_batches()
        assert bench.build_batch.versions == {0: 0}, "else replaying the log would give another batch"


class TestFinishing:
    def test_open_groups_are_dropped_and_complete_ones_sealed_in_as_many_batches_as_it_takes(self) -> None:
        bench = Bench(train_batch_size=2, max_buffered_batches=2)
        bench.submit(*group_rows("a"), *group_rows("b"), *group_rows("c"), row("d"))
        assert bench.run.finish() == 2
        assert bench.run.finish() == 2
        bench.make_batches()
        assert [bench.uids(0), bench.uids(1)] == [["a", "b"], ["c"]]
        assert bench.run.status().groups_dropped == {"finished": 1}
        assert bench.run.batch(2).state is BatchState.END
        assert bench.run.shard("policy", 0, Position(2), 0).state is BatchState.END

    def test_what_waits_for_a_batch_to_be_freed_is_counted_and_sealed_then(self) -> None:
        bench = Bench(train_batch_size=2, max_buffered_batches=1)
        bench.submit(*group_rows("a"))
        bench.run.seal(None)
        bench.submit(*group_rows("b"))
        assert bench.run.finish() == 2
        bench.make_batches()
        assert bench.run.batch(1).state is BatchState.PENDING
        bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
        bench.make_batches()
        assert bench.uids(1) == ["b"]
        assert bench.run.batch(2).state is BatchState.END

    def test_the_order_of_admission_holds_to_the_end(self) -> None:
        bench = Bench(train_batch_size=2, seal_order="admission")
        bench.begin("a", "b", "c", "d")
        for uid in "dcb":
            bench.submit(*group_rows(uid))
        bench.run.finish()
        bench.make_batches()
        assert [bench.uids(0), bench.uids(1)] == [["b", "c"], ["d"]]

    def test_an_empty_run_ends_without_a_batch(self) -> None:
        bench = Bench()
        assert bench.run.finish() == 0
        assert bench.run.shard("policy", 0, None, 0).state is BatchState.END


class TestFailing:
    def test_everyone_who_asks_gets_the_reason_and_later_batches_go_on(self) -> None:
        bench = Bench(train_batch_size=1)
        bench.build_batch._fails = {0}
        bench.submit(*group_rows("a"), *group_rows("b"))
        bench.make_batches()
        asks: list[Callable[[], Any]] = [
            lambda: bench.run.batch(0),
            lambda: bench.run.shard("policy", 0, Position(0), 0),
        ]
        for ask in asks:
            with pytest.raises(BatchFailedError, match="batch 0 failed: cannot be aligned") as caught:
                ask()
            assert caught.value.batch == 0
        assert bench.run.batch(1).state is BatchState.PUBLISHED
        status = bench.run.status()
        assert status.failed_batches == {0: "cannot be aligned"}
        assert status.groups_dropped == {"batch_failed": 1}
        assert (status.batches_published, status.batches_freed) == (2, 1)
        assert len(bench.rows) == 2, "the failed batch's rows are gone"

    def test_workers_that_come_again_learn_that_its_groups_are_dropped_as_groups_reports_it(self) -> None:
        bench = Bench(train_batch_size=1)
        bench.build_batch._fails = {0}
        bench.submit(*group_rows("a"), *group_rows("b"))
        bench.make_batches()
        assert {group.uid: group.state for part in bench.run.groups() for group in part} == {
            "a": "dropped",
            "b": "sealed",
        }
        assert bench.submit(*group_rows("a")) == ["DROPPED"] * 2
        assert bench.begin("a", "b") == ["DROPPED", "SEALED"]

    def test_ranks_step_over_it(self) -> None:
        bench = Bench(train_batch_size=1)
        bench.build_batch._fails = {0, 2}
        bench.submit(*group_rows("a"), *group_rows("b"), *group_rows("c"))
        bench.make_batches()
        assert bench.run.shard("policy", 0, None, 0).position == Position(1)
        assert bench.run.acknowledge("policy", 0, Position(1), 0, commit=True).position == Position(3)
        assert bench.run.status().batches_freed == 3

    def test_an_unforeseen_error_is_a_reason_too(self) -> None:
        def broken(*args: Any, **more: Any) -> BuiltBatch:
            raise ZeroDivisionError("division by zero")

        bench = Bench(train_batch_size=1, build_batch=broken)
        bench.submit(*group_rows("a"))
        bench.make_batches()
        with pytest.raises(BatchFailedError, match="division by zero"):
            bench.run.batch(0)

    @pytest.mark.parametrize("shortage", [MemoryError("Unable to allocate 9 GiB"), OSError(24, "Too many open files")])
    def test_what_the_process_is_short_of_drops_no_rows(self, shortage: Exception) -> None:
        whole, shortages = BuildBatch(), [shortage]

        def build(*args: Any, **more: Any) -> Any:
            if shortages:
                raise shortages.pop()
            return whole(*args, **more)

        bench = Bench(train_batch_size=1, build_batch=build)
        bench.submit(*group_rows("a"))
        bench.make_batches()
        assert type(shortage).__name__ in bench.run.blocked_reason
        assert bench.run.batch(0).state is BatchState.PENDING
        bench.now += 2
        bench.run.tick()
        bench.make_batches()
        assert (bench.run.batch(0).state, bench.run.blocked_reason) == (BatchState.PUBLISHED, "")
