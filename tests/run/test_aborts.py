"""What is given up: by clients, and when its time is over."""

from __future__ import annotations

import pytest

from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.run.machine.events import GroupDropped, GroupKey, TrajectoryAborted
from tests.run.harness import Bench, group_rows, key, row
from tests.run.test_admission import train

pytestmark = pytest.mark.usefixtures("one_token_is_left_out")


def test_a_group_completes_without_its_aborted_trajectories() -> None:
    bench = Bench(train_batch_size=1, n_samples_per_prompt=3)
    bench.submit(row("a", 0), row("a", 2), row("a", 1, last=False))
    assert bench.run.abort_trajectories([key("a", 1), key("a", 1)], "timeout of the tool") == 1
    bench.make_batches()
    assert bench.build_batch.batches[0].samples.tolist() == [0, 2]
    assert bench.run.abort_trajectories([key("a", 1), key("a", 0)], "again") == 0, "sealed"


def test_a_complete_trajectory_of_an_open_group_can_be_aborted() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(row("a"))
    assert bench.run.abort_trajectories([key("a")], "") == 1
    assert bench.submit(row("a", 1)) == ["ACCEPTED"]
    bench.make_batches()
    assert bench.build_batch.batches[0].samples.tolist() == [1]


def test_a_higher_attempt_of_an_aborted_trajectory_takes_part_again() -> None:
    bench = Bench(train_batch_size=2)
    bench.submit(row("a", 0, last=False), row("a", 1), *group_rows("b", last=False))
    assert bench.run.abort_trajectories([key("a")], "raised") == 1
    assert list(bench.state.complete) == [(0, "a")], "it would go on without the sample"
    assert bench.submit(row("a", 0)) == ["DROPPED"]
    assert bench.submit(row("a", 0, attempt=1), row("a", 0, attempt=1)) == ["ACCEPTED", "DUPLICATE"]
    assert bench.run.abort_trajectories([key("a")], "late", 0) == 0, "of the attempt before"
    bench.submit(*group_rows("b", step=1))
    bench.make_batches()
    assert bench.build_batch.batches[0].samples.tolist() == [0, 1, 0, 0, 1, 1]


def test_an_attempt_that_is_aborted_again_needs_a_higher_one_and_one_without_rows_counts() -> None:
    bench = Bench(train_batch_size=2)
    bench.begin("a")
    bench.run.abort_trajectories([key("a")], "no row was sent", 2)
    assert bench.submit(row("a", 0, attempt=2)) == ["DROPPED"]
    assert bench.submit(row("a", 0, attempt=3)) == ["ACCEPTED"]
    bench.run.abort_trajectories([key("a")], "again")
    assert bench.submit(row("a", 0, attempt=3)) == ["DROPPED"]
    assert bench.submit(row("a", 0, attempt=4)) == ["ACCEPTED"]


def test_no_attempt_reopens_a_group_that_is_closed_or_has_enough_samples() -> None:
    bench = Bench(train_batch_size=2, group_timeout_s=10, surplus=1)
    bench.submit(row("enough", 0), row("enough", 1), row("late", 0))
    assert bench.submit(row("enough", 2, attempt=1)) == ["DROPPED"]
    bench.run.abort_trajectories([key("late", 1)], "raised")
    bench.let_pass(10)
    assert bench.submit(row("late", 1, attempt=1), row("late", 2, attempt=1)) == ["SEALED"] * 2


def test_a_group_of_which_nothing_is_left_is_dropped_for_that_reason() -> None:
    bench = Bench()
    bench.submit(row("a"))
    assert bench.run.abort_trajectories([key("a", 1)], "slow") == 1
    assert bench.run.abort_trajectories([key("a", 0)], "broken tool") == 1
    assert bench.run.status().groups_dropped == {"broken tool": 1}
    assert bench.log.events[-2:] == [
        TrajectoryAborted(key("a", 0), "broken tool"),
        GroupDropped(GroupKey(0, "a"), "broken tool"),
    ]
    assert len(bench.rows) == 0
    assert bench.state.row_bytes == 0


def test_after_a_hundred_reasons_further_ones_count_as_other_and_those_that_are_known_as_before() -> None:
    bench = Bench()
    for number in range(150):
        bench.begin(f"g{number}")
        bench.run.abort_trajectories([key(f"g{number}")], f"it failed at {number}")
        bench.run.abort_groups(0, [f"g{number}"], f"it failed at {number}")
    aborted = bench.run.monitor.history.aborted
    bench.reopen()
    bench.begin("late")
    bench.run.abort_groups(0, ["late"], "it failed at 7")
    expected = {f"it failed at {number}": 1 for number in range(100)} | {"it failed at 7": 2, "other": 50}
    assert bench.run.status().groups_dropped == expected
    assert {group.reason for part in bench.run.groups() for group in part} == aborted.keys() == expected.keys()
    assert bench.replayed() == bench.state


def test_an_abort_is_done_whole_or_not_at_all() -> None:
    bench = Bench()
    bench.begin("a")
    with pytest.raises(InvalidArgumentError, match=r"uid 'a' sample 7: sample 7 is outside of"):
        bench.run.abort_trajectories([key("a", 0), key("a", 7)], "")
    with pytest.raises(NotFoundError, match=r"uid 'nobody': the group was never begun"):
        bench.run.abort_trajectories([key("a", 0), key("nobody")], "")
    with pytest.raises(NotFoundError, match="uid 'nobody' round 3"):
        bench.run.abort_groups(3, ["nobody"], "")
    with pytest.raises(NotFoundError):
        bench.run.abort_groups(0, ["a", "nobody"], "")
    assert not bench.state.open[GroupKey(0, "a")].aborted


def test_aborting_groups_drops_their_rows_once() -> None:
    bench = Bench()
    bench.submit(row("a"), *group_rows("b"))
    assert bench.run.abort_groups(0, ["a", "b", "a"], "") == 2
    assert bench.run.abort_groups(0, ["a"], "") == 0
    assert bench.run.status().groups_dropped == {"aborted": 2}
    assert (bench.state.row_bytes, len(bench.rows)) == (0, 0)


def test_a_straggling_group_closes_with_the_samples_it_has() -> None:
    bench = Bench(train_batch_size=1, n_samples_per_prompt=3, group_timeout_s=10, min_samples=2)
    bench.begin("a")
    bench.submit(row("a", 0), row("a", 2), row("a", 1, last=False))
    bench.now = 9.9
    bench.run.tick()
    assert not bench.sealed
    bench.now = 10
    bench.run.tick()
    assert bench.submit(row("a", 1, step=1)) == ["SEALED"]
    bench.make_batches()
    assert bench.build_batch.batches[0].samples.tolist() == [0, 2]
    train(bench, 0)
    assert len(bench.rows) == 0


def test_a_straggling_group_with_too_few_samples_is_dropped() -> None:
    bench = Bench(n_samples_per_prompt=3, group_timeout_s=10, min_samples=2)
    bench.submit(row("a", 0), row("a", 1, reward=None))
    bench.now = 10
    bench.run.tick()
    assert bench.submit(row("a", 2)) == ["DROPPED"]
    assert bench.run.status().groups_dropped == {"timeout": 1}


def test_time_runs_from_admission_and_only_for_what_is_incomplete() -> None:
    bench = Bench(train_batch_size=3, group_timeout_s=10)
    bench.submit(*group_rows("a"))
    bench.now = 5
    bench.submit(row("b", 0))
    bench.now = 12
    bench.run.tick()
    assert list(bench.state.open) == [(0, "a"), (0, "b")]
    bench.now = 15
    bench.run.tick()
    assert bench.state.complete == {(0, "a"): None, (0, "b"): None}, "one sample of b was there"


def test_a_timeout_that_races_the_last_row_takes_the_group_in_either_order() -> None:
    for row_first in (True, False):
        bench = Bench(train_batch_size=1, group_timeout_s=10, min_samples=2)
        bench.submit(row("a", 0))
        bench.now = 10
        if row_first:
            assert bench.submit(row("a", 1)) == ["ACCEPTED"]
            bench.run.tick()
            assert bench.sealed == [0]
        else:
            bench.run.tick()
            assert bench.submit(row("a", 1)) == ["DROPPED"]
            assert bench.sealed == []


def test_with_admission_order_a_timeout_lets_the_groups_behind_go_on() -> None:
    bench = Bench(train_batch_size=1, seal_order="admission", group_timeout_s=10)
    bench.begin("slow", "fast")
    bench.submit(*group_rows("fast"))
    assert bench.sealed == []
    bench.now = 10
    bench.run.tick()
    bench.make_batches()
    assert bench.uids(0) == ["fast"]
