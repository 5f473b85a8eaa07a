"""The trained tokens of a batch, one after another: what estimators with credit per token compute on.

A token is trained where its loss_mask is 1 and no filter masks its step. A trajectory's stand in the order they were
sampled, step after step; what lies between them (observations, masked steps) is skipped. Rows play no part, so that
neither merging nor layout can change a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import FLOAT32_MAX, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.pipeline.credit.advantage import Float64s
from gristmill_service.pipeline.rows.validate import Received

SCALE_DOWN = "scale the rewards down"


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """Where the trained tokens of a batch stand; numbers of theirs are float64 (trained tokens,).

    received: the batch. edges: int64 (steps + 1,), step i has the response tokens `edges[i]:edges[i + 1]` of it.
    places: int64 (trained tokens,), which of the batch's response tokens each is, ascending.
    step_bounds: int64 (steps + 1,), the trained tokens of step i are `step_bounds[i]:step_bounds[i + 1]`.
    bounds: int64 (trajectories + 1,), those of trajectory t are `bounds[t]:bounds[t + 1]`; some have none.
    """

    received: Received
    edges: Int64s
    places: Int64s
    step_bounds: Int64s
    bounds: Int64s

    def __len__(self) -> int:
        return len(self.places)

    @property
    def steps(self) -> Steps:
        return self.received.steps

    def take(self, column: Ragged) -> Float64s:
        """Returns the numbers of a response column at the trained tokens; what it holds elsewhere is not read."""
        return column.compact().values[self.places].astype(np.float64)

    def response(self, numbers: Float64s, name: str, remedy: str = SCALE_DOWN) -> Ragged:
        """Returns a float32 response column of the steps with these numbers, and 0 where nothing is trained."""
        self.check(numbers, name, remedy)
        values = np.zeros(self.edges[-1], np.float32)
        values[self.places] = numbers
        return Ragged.from_lengths(values, self.steps.response_lengths)

    def check(self, numbers: Float64s, name: str, remedy: str = SCALE_DOWN) -> None:
        """Refuses a number that float32 does not hold, naming its step and token."""
        outside = _first_outside(numbers)
        if outside is not None:
            raise InvalidArgumentError(
                f"{self.name(outside, name)} is {numbers[outside]}, which float32 does not hold; {remedy}"
            )

    def name(self, index: int, column: str) -> str:
        """Names a trained token's entry of a column, for a message."""
        return _name(self.steps, self.edges, int(self.places[index]), column)


def trained_tokens(received: Received, trained: NDArray[np.bool_], kept: Int64s | None = None) -> TrainedTokens:
    """Finds the trained tokens of a batch.

    trained: bool (steps,), False where a filter masks (`trained_steps`). kept: int64 (steps,), how many tokens of each
    response stand in rows, where that may be fewer than it has: the others are observed as something else.
    """
    steps = received.steps
    lengths = steps.response_lengths
    mask = steps.loss_mask.compact().values.astype(np.bool_)
    edges = np.append(0, np.cumsum(lengths))
    counts = lengths * trained if kept is None else kept * trained
    if (counts < lengths).any():
        mask &= np.arange(edges[-1]) < np.repeat(edges[:-1] + counts, lengths)
    places = np.flatnonzero(mask)
    step_bounds = np.searchsorted(places, edges)
    return TrainedTokens(received, edges, places, step_bounds, step_bounds[received.trajectory_bounds])


def response_rewards(steps: Steps, kept: Int64s | None = None) -> Float64s:
    """Returns the reward of each response token of the batch, float64 (response tokens,): the `rewards` tensor.

    A scalar reward stands on the last response token of its step, the others are 0. kept: as `trained_tokens` has it;
    then it stands on the last that is kept.
    """
    if steps.token_rewards is not None:
        return steps.token_rewards.compact().values.astype(np.float64)
    lengths = steps.response_lengths
    rewards = np.zeros(int(lengths.sum()))
    last = lengths if kept is None else np.where(kept > 0, kept, lengths)
    rewards[np.cumsum(lengths) - lengths + last - 1] = steps.rewards
    return rewards


def reward_column(steps: Steps, rewards: Float64s) -> Ragged:
    """Returns rewards of response tokens as a float32 column; what float32 does not hold is refused."""
    outside = _first_outside(rewards)
    if outside is not None:
        edges = np.append(0, np.cumsum(steps.response_lengths))
        raise InvalidArgumentError(
            f"{_name(steps, edges, outside, 'reward')} is {rewards[outside]}, which float32 does not hold; "
            "scale the rewards or the coefficient of kl_in_reward down"
        )
    return Ragged.from_lengths(rewards.astype(np.float32), steps.response_lengths)


def credited_rewards(tokens: TrainedTokens, rewards: Float64s) -> tuple[Float64s, int]:
    """Returns each trained token's reward, and how many rewards no token gets.

    rewards: of the response tokens. One on a token that is not trained (a scalar whose step ends in an observation, or
    whose step a filter masks) counts for the last trained token before it in its trajectory: that is the last action
    that it can be a consequence of, and the return to go of every trained token is what it would be if observations
    had been tokens that take no time. One before the first trained token of its trajectory, or in a trajectory
    without, is a consequence of nothing that is trained, and in no return to go: it is left out, and counted if not 0.
    """
    credited = rewards[tokens.places]
    untrained = np.ones(len(rewards), np.bool_)
    untrained[tokens.places] = False
    others = np.flatnonzero(untrained & (rewards != 0))
    if not others.size:
        return credited, 0
    before = np.searchsorted(tokens.places, others) - 1
    steps = np.searchsorted(tokens.edges, others, side="right") - 1
    after = before >= tokens.bounds[tokens.received.trajectory_of_step[steps]]
    np.add.at(credited, before[after], rewards[others[after]])
    return credited, int((~after).sum())


def _first_outside(numbers: Float64s) -> int | None:
    """Returns the index of the first number that float32 does not hold; NaN too."""
    outside = ~(np.abs(numbers) <= FLOAT32_MAX)
    return int(outside.argmax()) if outside.any() else None


def _name(steps: Steps, edges: Int64s, token: int, column: str) -> str:
    step = int(np.searchsorted(edges, token, side="right")) - 1
    return f"{steps.name(step)}: {column}[{token - edges[step]}]"
