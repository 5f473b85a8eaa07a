"""Rewards that come after their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gristmill_service.run.machine.answers import RewardUpdate
from tests.run.harness import Bench, contents, key, row


def scalar(uid: str, value: float | None, sample: int = 0, step: int | None = None) -> RewardUpdate:
    return RewardUpdate(key(uid, sample), step, value)


def per_token(
    uid: str, values: Sequence[float], sample: int = 0, step: int | None = None, dtype: npt.DTypeLike = np.float64
) -> RewardUpdate:
    return RewardUpdate(key(uid, sample), step, None, np.array(values, dtype))


def test_a_group_is_complete_only_with_every_reward_also_of_intermediate_steps() -> None:
    bench = Bench(train_batch_size=1, n_samples_per_prompt=1)
    bench.submit(row("a", step=0, last=False, reward=None), row("a", step=1, reward=None))
    assert bench.run.set_rewards([scalar("a", 1.0)]) == 1
    assert not bench.sealed
    assert bench.run.set_rewards([scalar("a", 0.5, step=0)]) == 1
    bench.make_batches()
    batch = contents(bench.build_batch.batches[0])
    assert batch["rewards"] == [0.5, 1.0]
    assert not batch["pending"]


def test_the_same_reward_again_changes_nothing_and_another_is_refused() -> None:
    bench = Bench()
    bench.submit(row("a", reward=None), row("b", reward=3.0))
    assert bench.run.set_rewards([scalar("a", 1.0), scalar("a", 1.0)]) == 1
    assert bench.run.set_rewards([scalar("a", 1.0), scalar("b", 3.0)]) == 0
    for uid, value in (("a", 2.0), ("b", 2.0)):
        with pytest.raises(AlreadyExistsError, match=rf"uid '{uid}' sample 0 step 0: the reward 2.0 differs from"):
            bench.run.set_rewards([scalar(uid, value)])


def test_all_rewards_of_a_request_are_set_or_none_is() -> None:
    bench = Bench()
    bench.submit(row("a", reward=None), row("b", reward=None))
    for bad in (scalar("a", 2.0), scalar("nobody", 1.0), scalar("b", math.nan), RewardUpdate(key("b"))):
        with pytest.raises((AlreadyExistsError, NotFoundError, InvalidArgumentError)):
            bench.run.set_rewards([scalar("a", 1.0), bad])
    assert bench.run.set_rewards([scalar("a", 7.0)]) == 1


def test_a_reward_for_what_was_not_submitted_is_not_found() -> None:
    bench = Bench()
    bench.submit(row("a", step=0, last=False, reward=None))
    for update, named in (
        (scalar("a", 1.0), "the last step"),
        (scalar("a", 1.0, step=4), "step 4"),
        (scalar("b", 1.0), "the last"),
    ):
        with pytest.raises(NotFoundError, match=rf"{named}.* was not submitted; submit the row before its reward"):
            bench.run.set_rewards([update])


def test_a_reward_repeated_after_its_group_was_sealed_or_dropped_or_aborted_changes_nothing() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(row("a", reward=None), row("a", 1))
    assert bench.run.set_rewards([scalar("a", 1.0)]) == 1
    assert bench.sealed == [0]
    bench.submit(row("b", reward=None), row("c", reward=None))
    bench.run.abort_groups(0, ["b"], "")
    bench.run.abort_trajectories([key("c")], "")
    assert bench.run.set_rewards([scalar("a", 1.0), scalar("b", 1.0), scalar("c", 1.0)]) == 0


def test_rewards_per_token_stand_on_their_tokens_whichever_way_they_came() -> None:
    bench = Bench(train_batch_size=1, n_samples_per_prompt=3)
    bench.submit(row("a", 0, reward=None, response=(1, 2)))
    bench.submit(row("a", 1, reward=[0.5, 0.25], response=(1, 2)), row("a", 2, reward=None, response=(3,)))
    assert bench.run.set_rewards([per_token("a", [1.0, 2.0]), per_token("a", [4.0], sample=2, dtype=np.float32)]) == 2
    bench.make_batches()
    batch = contents(bench.build_batch.batches[0])
    assert batch["token_rewards"] == [[1.0, 2.0], [0.5, 0.25], [4.0]]
    assert batch["rewards"] == [3.0, 0.75, 4.0]


@pytest.mark.parametrize("submitted", [None, [1.0, 2.0]])
def test_the_same_values_per_token_are_the_same_reward_whatever_their_width(submitted: list[float] | None) -> None:
    bench = Bench()
    bench.submit(row("a", reward=submitted, response=(1, 2)))
    assert bench.run.set_rewards([per_token("a", [1.0, 2.0])]) == (submitted is None)
    assert bench.run.set_rewards([per_token("a", [1.0, 2.0], dtype=np.float32)]) == 0
    with pytest.raises(AlreadyExistsError):
        bench.run.set_rewards([per_token("a", [2.0, 1.0])])


def test_the_first_reward_fixes_the_kind_where_all_rows_wait() -> None:
    bench = Bench()
    bench.submit(row("a", reward=None), row("b", reward=None))
    with pytest.raises(InvalidArgumentError, match="has one reward a step, but rows of this run have one reward per"):
        bench.run.set_rewards([per_token("a", [1.0]), scalar("b", 1.0)])
    bench.run.set_rewards([scalar("b", 1.0)])
    with pytest.raises(InvalidArgumentError, match="has one reward per response token"):
        bench.run.set_rewards([per_token("a", [1.0])])


def test_a_reward_needs_one_value_a_token_and_is_given_once() -> None:
    bench = Bench()
    bench.submit(row("a", reward=None, response=(1, 2)))
    with pytest.raises(InvalidArgumentError, match="reward has 3 values and response_ids has 2"):
        bench.run.set_rewards([per_token("a", [1.0, 2.0, 3.0])])
    with pytest.raises(InvalidArgumentError, match="sent twice"):
        bench.run.set_rewards([RewardUpdate(key("a"), None, 1.0, np.ones(2))])
    with pytest.raises(InvalidArgumentError, match="is not finite as float32"):
        bench.run.set_rewards([per_token("a", [math.inf, -math.inf])])


def test_a_superseded_row_takes_its_late_reward_with_it() -> None:
    bench = Bench(train_batch_size=1, n_samples_per_prompt=1)
    bench.submit(row("a", step=0, last=False, reward=None), row("a", step=1, reward=None))
    bench.run.set_rewards([per_token("a", [1.0])])
    bench.submit(row("a", attempt=1, reward=None))
    assert not bench.sealed
    bench.run.set_rewards([per_token("a", [5.0])])
    bench.make_batches()
    assert contents(bench.build_batch.batches[0])["token_rewards"] == [[5.0]]


@pytest.mark.parametrize("values", [[3e39, -3e39], [np.nan, 1.0], [np.inf, -np.inf]])
def test_rewards_per_token_that_no_tensor_holds_are_refused_also_where_their_sum_is_small(
    values: list[float],
) -> None:
    bench = Bench()
    bench.submit(row("a", reward=None, response=(7, 8)))
    with pytest.raises(InvalidArgumentError, match="is not finite as float32"):
        bench.run.set_rewards([RewardUpdate(key("a"), token_values=np.array(values))])
    assert bench.replayed() == bench.state
