"""What becomes of submitted rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill._wire.rows import from_rows
from gristmill.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.events import GroupKey
from tests.run.harness import Bench, contents, group_rows, key, row, table


def test_the_same_row_again_is_a_duplicate_also_within_a_request() -> None:
    bench = Bench()
    assert bench.submit(row("a"), row("a")) == ["ACCEPTED", "DUPLICATE"]
    assert bench.submit(row("a")) == ["DUPLICATE"]
    status = bench.run.status()
    assert (status.rows_accepted, status.rows_duplicate) == (1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"response": (8,)},
        {"prompt_token_ids": [1, 3]},
        {"loss_mask": [0]},
        {"reward": 2.0},
        {"reward": None},
        {"stop_reason": "length"},
        {"policy_version": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_content_under_the_same_attempt_is_refused_whatever_differs(change: dict[str, Any]) -> None:
    bench = Bench()
    bench.submit(row("a", stop_reason="stop", policy_version=1))
    with pytest.raises(AlreadyExistsError, match=r"uid 'a' sample 0 step 0: different content .* higher attempt"):
        bench.submit(row("a", **{"stop_reason": "stop", "policy_version": 1, **change}))


def test_tokens_moved_between_prompt_and_response_are_another_content() -> None:
    bench = Bench()
    bench.submit(row("a", prompt_token_ids=[1, 2], response=(3, 4)))
    with pytest.raises(AlreadyExistsError):
        bench.submit(row("a", prompt_token_ids=[1, 2, 3], response=(4,), loss_mask=[1]))


def test_what_stands_in_place_of_a_pending_reward_does_not_count() -> None:
    bench = Bench()
    one, other = table(row("a", reward=None)), table(row("a", reward=None))
    other.rewards[0] = 5.0
    bench.run.submit(one)
    assert [outcome.name for outcome in bench.run.submit(other).outcomes] == ["DUPLICATE"]


def test_a_higher_attempt_supersedes_all_rows_of_the_lower() -> None:
    bench = Bench()
    bench.submit(row("a", step=0, last=False), row("a", step=1))
    assert bench.submit(row("a", attempt=1, response=(9,))) == ["ACCEPTED"]
    assert bench.submit(row("a", step=0, last=False)) == ["SUPERSEDED"]
    trajectory = bench.state.open[GroupKey(0, "a")].trajectories[0]
    assert (trajectory.attempt, list(trajectory.rows)) == (1, [0])
    assert len(bench.rows) == 1


def test_attempts_within_one_request_follow_its_order() -> None:
    bench = Bench()
    outcomes = bench.submit(row("a"), row("a", attempt=2, response=(9,)), row("a", attempt=1), row("a"))
    assert outcomes == ["ACCEPTED", "ACCEPTED", "SUPERSEDED", "SUPERSEDED"]
    assert bench.state.open[GroupKey(0, "a")].done == 1


def test_a_higher_attempt_takes_a_complete_group_back_until_it_is_complete_again() -> None:
    bench = Bench()
    bench.submit(*group_rows("a"))
    assert bench.run.status().groups_complete == 1
    bench.submit(row("a", attempt=1, last=False))
    assert bench.run.status().groups_complete == 0
    bench.submit(*group_rows("b"))
    bench.submit(row("a", step=1, attempt=1))
    bench.make_batches()
    assert bench.uids(0) == ["b", "a"], "it completed after the other"


def test_rows_of_sealed_and_dropped_groups_and_aborted_trajectories_are_answered_so() -> None:
    bench = Bench()
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.begin("c", "d")
    bench.run.abort_groups(0, ["c"], "tired")
    bench.run.abort_trajectories([key("d", 1)], "tired")
    assert bench.submit(row("a"), row("c", attempt=5), row("d", 1), row("d")) == [
        "SEALED",
        "DROPPED",
        "DROPPED",
        "ACCEPTED",
    ]
    assert bench.submit(row("d", 1, attempt=5)) == ["ACCEPTED"], "it was sampled again"


def test_a_round_is_another_group() -> None:
    bench = Bench()
    assert bench.submit(row("a"), row("a", round=1, response=(8,))) == ["ACCEPTED", "ACCEPTED"]


def test_one_bad_row_refuses_the_whole_request() -> None:
    bench = Bench()
    bench.submit(row("a"))
    for bad in (row("a", response=(9,)), row("b", 2), row("c", step=0), row("b", 0, step=1)):
        with pytest.raises((AlreadyExistsError, InvalidArgumentError)):
            bench.submit(
                row("b", 1), row("c", 1, step=2), row("c", step=1), row("c", step=0, last=False), row("b"), bad
            )
    assert list(bench.state.open) == [(0, "a")]
    assert bench.state.rows_accepted == 1
    assert len(bench.rows) == 1


def test_a_sample_outside_the_group_is_refused_with_its_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"uid 'a' sample 2 step 0: sample 2 is outside of 0..1"):
        Bench().submit(row("a", 2))


@pytest.mark.parametrize("bad", [row("a", step=1), row("a", last=False)])
def test_without_step_wise_a_trajectory_has_one_step(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"uid 'a' sample 0 .*step_wise: false"):
        Bench(step_wise=False).submit(bad)


@pytest.mark.parametrize(
    ("before", "bad", "message"),
    [
        (row("a", step=1), row("a", step=2), "is_last_step is true, and step 1 is already the last"),
        (row("a", step=1), row("a", step=0), "is_last_step is true, and step 1 is already the last"),
        (row("a", step=1), row("a", step=2, last=False), "step 2 comes after the last step"),
        (row("a", step=3, last=False), row("a", step=1), "step 3 was already accepted"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_exactly_one_step_is_the_last_in_whatever_order_they_come(
    before: dict[str, Any], bad: dict[str, Any], message: str, together: bool
) -> None:
    bench = Bench()
    if not together:
        bench.submit(before)
    with pytest.raises(InvalidArgumentError, match=message):
        bench.submit(*([before, bad] if together else [bad]))


def test_steps_may_come_in_any_order() -> None:
    bench = Bench(train_batch_size=1, n_samples_per_prompt=1)
    bench.submit(row("a", step=2))
    bench.submit(row("a", step=0, last=False))
    assert not bench.sealed
    bench.submit(row("a", step=1, last=False))
    assert bench.sealed == [0]


LOGPROBS: dict[str, Any] = {"rollout_logprobs": [-0.5]}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, LOGPROBS, "has rollout_logprobs, but earlier rows of this run have no rollout_logprobs"),
        (LOGPROBS, {}, "has no rollout_logprobs"),
        ({}, {"reward": [1.0]}, "has one reward per response token"),
        ({"reward": [1.0]}, {}, "has one reward a step"),
    ],
)
def test_all_rows_are_of_the_form_of_the_first_that_was_accepted(
    first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    bench = Bench()
    bench.submit(row("a", **first))
    with pytest.raises(InvalidArgumentError, match=rf"uid 'b' sample 1 step 0: {message}"):
        bench.submit(row("b", 1, **second))
    assert bench.submit(row("b", 1, **first)) == ["ACCEPTED"]


def test_a_refused_row_fixes_no_form() -> None:
    bench = Bench()
    with pytest.raises(InvalidArgumentError):
        bench.submit(row("a", 5, **LOGPROBS))
    assert bench.submit(row("a")) == ["ACCEPTED"]


def test_rows_that_wait_for_their_reward_do_not_fix_its_kind() -> None:
    bench = Bench()
    bench.submit(row("a", reward=None))
    assert bench.submit(row("a", 1, reward=[2.0])) == ["ACCEPTED"]
    with pytest.raises(InvalidArgumentError, match="one reward a step"):
        bench.submit(row("b"))


def test_advantages_are_asked_for_exactly_with_the_estimator_none() -> None:
    with pytest.raises(InvalidArgumentError, match="advantage is missing with advantage_estimator: none"):
        Bench(advantage_estimator="none").submit(row("a"))
    with pytest.raises(InvalidArgumentError, match="advantage is set with advantage_estimator: grpo"):
        Bench().submit(row("a", advantage=1.0))


def test_a_trajectory_has_one_advantage_on_all_its_steps() -> None:
    bench = Bench(advantage_estimator="none")
    bench.submit(row("a", step=0, last=False, advantage=1.0))
    with pytest.raises(
        InvalidArgumentError, match=r"uid 'a' sample 0 step 1: advantage 2.0 differs from 1.0 on step 0"
    ):
        bench.submit(row("a", step=1, advantage=2.0))
    with pytest.raises(InvalidArgumentError, match="one advantage per response token"):
        bench.submit(row("b", advantage=[2.0]))


def test_rows_of_an_unadmitted_group_admit_it_where_there_is_room() -> None:
    bench = Bench(max_buffered_batches=1)
    assert bench.submit(row("a"), row("b")) == ["ACCEPTED", "ACCEPTED"]
    with pytest.raises(
        ResourceExhaustedError, match=r"uid 'c': no capacity for another .*max_buffered_batches: 1"
    ) as caught:
        bench.submit(row("a", 1), row("c"))
    assert caught.value.retry_after_s > 0
    assert 1 not in bench.state.open[GroupKey(0, "a")].trajectories, "nothing of a refused request is kept"


def test_a_request_that_could_never_fit_is_not_to_be_retried() -> None:
    with pytest.raises(InvalidArgumentError, match=r"begins 3 prompt groups, .*allows 2; begin fewer"):
        Bench(max_buffered_batches=1).submit(row("a"), row("b"), row("c"))


def test_a_finished_run_takes_no_new_rows_but_still_answers_repeated_ones() -> None:
    bench = Bench(max_buffered_batches=1)
    bench.submit(*group_rows("a"))
    bench.run.finish()
    assert bench.submit(row("a", 0, reward=0.0)) == ["DUPLICATE"], "it was taken, and is in the batch"
    assert bench.submit(row("a", 0, reward=7.0)) == ["SEALED"], "this one was not"
    with pytest.raises(FailedPreconditionError, match="finished"):
        bench.submit(row("b"))


def test_a_row_whose_batch_is_freed_can_be_distinguished_from_no_other() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    assert bench.submit(*group_rows("a")) == ["DUPLICATE"] * 2
    bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
    assert bench.submit(*group_rows("a")) == ["SEALED"] * 2


def test_a_batchs_rows_stand_by_group_sample_and_step_with_all_that_was_sent() -> None:
    bench = Bench(seal_order="admission")
    bench.begin("a", "b")
    sent = {}
    for uid, sample, step in [("b", 1, 0), ("a", 1, 1), ("b", 0, 0), ("a", 0, 0), ("a", 1, 0)]:
        sent[uid, sample, step] = row(
            uid,
            sample,
            step,
            last=(uid, sample, step) != ("a", 1, 0),
            reward=sample + step / 2,
            response=range(10 * sample + step, 10 * sample + step + 3),
            loss_mask=[1, 0, 1],
            policy_version=step,
            stop_reason=f"{uid}{sample}",
        )
        bench.submit(sent[uid, sample, step])
    bench.make_batches()
    expected = from_rows([sent[name] for name in sorted(sent)])
    assert contents(bench.build_batch.batches[0]) == contents(expected)


def test_a_submitted_table_is_not_modified() -> None:
    bench = Bench(train_batch_size=1)
    submitted = table(row("a", 0, reward=None), row("a", 1))
    before = {name: np.copy(getattr(submitted, name)) for name in ("rewards", "rewards_pending", "samples")}
    bench.run.submit(submitted)
    bench.make_batches()
    for name, values in before.items():
        np.testing.assert_array_equal(getattr(submitted, name), values)
