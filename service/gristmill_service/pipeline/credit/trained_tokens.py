"""The trained tokens of a batch, concatenated: the input of estimators with credit per token.

A token is trained if its loss_mask is 1 and no filter masks its step. A trajectory's trained tokens are in the order in
which they were sampled, step after step, without the observations and masked steps between them. They do not depend on
rows, so neither merging nor layout can change a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged, exact_sum
from gristmill._wire.steps import FLOAT32_MAX, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.rows.merge import KeptTokens
from gristmill_service.pipeline.rows.validate import Received

SCALE_DOWN = "scale the rewards down"

PART = 1 << 18
"""The number of tokens for which credit is computed at a time: small enough that their numbers stay in a cache, and
large enough that the overhead of NumPy calls is small."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """The trained tokens of a batch, or of some of its trajectories. Their numbers are float64 (trained tokens,).

    trajectory_bounds: int64 (trajectories + 1,), trajectory t is the steps `bounds[t]:bounds[t + 1]`.
    edges: int64 (steps + 1,), step i has the response tokens `edges[i]:edges[i + 1]`.
    mask: bool (response tokens,); None where all are trained.
    step_bounds: int64 (steps + 1,), the trained tokens of step i are `step_bounds[i]:step_bounds[i + 1]`.
    """

    steps: Steps
    trajectory_bounds: Int64s
    edges: Int64s
    mask: NDArray[np.bool_] | None
    step_bounds: Int64s

    def __len__(self) -> int:
        return int(self.step_bounds[-1])

    @property
    def bounds(self) -> Int64s:
        """The trained tokens of trajectory t are `bounds[t]:bounds[t + 1]`; int64 (trajectories + 1,)."""
        return self.step_bounds[self.trajectory_bounds]

    @property
    def places(self) -> Int64s:
        """The index of each trained token among the response tokens, ascending; int64 (trained tokens,)."""
        return np.arange(self.edges[-1]) if self.mask is None else np.flatnonzero(self.mask)

    def parts(self, most: int = PART, groups: Int64s | None = None) -> Iterator[Part]:
        """Yields the trajectories in order, in parts of at most `most` response tokens, or of a single trajectory.

        groups: int64 (groups + 1,), bounds of trajectories; parts then consist of whole groups.
        """
        units = np.arange(len(self.trajectory_bounds)) if groups is None else groups
        ends, begin = self.edges[self.trajectory_bounds[units]], 0
        while begin + 1 < len(ends):
            end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + most, side="right")) - 1)
            yield self._part(units[begin : end + 1])
            begin = end

    def _part(self, units: Int64s) -> Part:
        begin, end = int(units[0]), int(units[-1])
        steps = slice(int(self.trajectory_bounds[begin]), int(self.trajectory_bounds[end]))
        edges, step_bounds = (bounds[steps.start : steps.stop + 1] for bounds in (self.edges, self.step_bounds))
        tokens = TrainedTokens(
            self.steps.part(steps),
            self.trajectory_bounds[begin : end + 1] - steps.start,
            edges - edges[0],
            None if self.mask is None else self.mask[edges[0] : edges[-1]],
            step_bounds - step_bounds[0],
        )
        return Part(
            tokens, slice(begin, end), steps, slice(step_bounds[0], step_bounds[-1]), slice(edges[0], edges[-1])
        )

    def of(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Selects the numbers of trained tokens from those of response tokens; the same array where all are."""
        return numbers if self.mask is None else numbers[self.mask]

    def take(self, column: Ragged) -> Float64s:
        """Returns the numbers of a response column at the trained tokens; other values are not read."""
        return self.of(column.compact().values).astype(np.float64)

    def of_steps(self, column: Ragged) -> Float64s:
        """Returns the number of a row column at each trained token: that of the step that sampled it."""
        return np.repeat(column.compact().values.astype(np.float64), np.diff(self.step_bounds))

    def response(self, numbers: Float64s, name: str, remedy: str = SCALE_DOWN) -> Ragged:
        """Returns a float32 response column of the steps with these numbers, and 0 where nothing is trained."""
        self.check(numbers, name, remedy)
        values = np.empty(self.edges[-1], np.float32)
        self.put(numbers, values)
        return Ragged.from_lengths(values, self.steps.response_lengths)

    def put(self, numbers: Float64s, values: NDArray[np.float32]) -> None:
        """Writes checked numbers into those of response tokens, and 0 where nothing is trained."""
        if self.mask is None:
            values[:] = numbers
        else:
            values[:] = 0
            values[self.mask] = numbers

    def check(self, numbers: Float64s, name: str, remedy: str = SCALE_DOWN) -> None:
        """Refuses a number that float32 does not hold, naming its step and token."""
        outside = _first_outside(numbers)
        if outside is not None:
            raise InvalidArgumentError(
                f"{self.name(outside, name)} is {numbers[outside]}, which float32 cannot hold; {remedy}"
            )

    def name(self, index: int, column: str) -> str:
        """Names a trained token's entry of a column, for a message."""
        return _name(self.steps, self.edges, int(self.places[index]), column)


class Part(NamedTuple):
    """Consecutive trajectories of a batch.

    trajectories, steps, trained, responses: their ranges among the batch's trajectories, steps, trained tokens and
    response tokens.
    """

    tokens: TrainedTokens
    trajectories: slice
    steps: slice
    trained: slice
    responses: slice


def trained_tokens(received: Received, trained: NDArray[np.bool_], kept: Int64s | None = None) -> TrainedTokens:
    """Returns the trained tokens of a batch.

    trained: bool (steps,), False where a filter masks (`trained_steps`). kept: int64 (steps,), how many tokens of each
    response are in a row, if that may be fewer than all: later steps may contain other tokens in place of the rest.
    """
    steps = received.steps
    lengths = steps.response_lengths
    edges = np.append(0, np.cumsum(lengths))
    counts = lengths * trained if kept is None else kept * trained
    loss_mask = steps.loss_mask.compact().values
    if (counts == lengths).all():
        if loss_mask.min(initial=1) == 1:
            return TrainedTokens(steps, received.trajectory_bounds, edges, None, edges)
        mask = loss_mask == 1
    else:
        mask = (loss_mask == 1) & (np.arange(edges[-1]) < np.repeat(edges[:-1] + counts, lengths))
    step_bounds = np.searchsorted(np.flatnonzero(mask), edges)
    return TrainedTokens(steps, received.trajectory_bounds, edges, mask, step_bounds)


def response_rewards(steps: Steps, kept: KeptTokens | None = None) -> Float64s:
    """Returns the reward of each response token of the batch, as in the `rewards` tensor; float64 (response tokens,).

    A scalar reward is on the last response token of its step. A reward whose token no row keeps moves to the last token
    that the first row keeps of its step; where none keeps any, it stays.
    """
    sent = steps.rewards if steps.token_rewards is None else steps.token_rewards.compact().values
    return _on_tokens(steps, sent.astype(np.float64), kept)


def reward_counts(steps: Steps, kept: KeptTokens | None = None) -> Float64s:
    """Returns how many rewards other than 0 are on each response token, as `response_rewards` places them; float64
    (response tokens,)."""
    sent = steps.rewards if steps.token_rewards is None else steps.token_rewards.compact().values
    return _on_tokens(steps, (sent != 0).astype(np.float64), kept)


def _on_tokens(steps: Steps, numbers: Float64s, kept: KeptTokens | None) -> Float64s:
    """Returns the sum of the rewards' numbers on each response token. numbers: of steps, or of tokens if steps have
    rewards of tokens; may be modified."""
    lengths = steps.response_lengths
    if kept is None:
        most = last = lengths
    else:
        most, last = kept.most, np.where((kept.most < lengths) & (kept.first > 0), kept.first, lengths)
    begins = np.cumsum(lengths) - lengths
    if steps.token_rewards is None:
        result = np.zeros(int(lengths.sum()))
        result[begins + last - 1] = numbers
        return result
    for step in np.flatnonzero(last < lengths).tolist():
        of_step = numbers[begins[step] : begins[step] + lengths[step]]
        of_step[last[step] - 1] = exact_sum(np.append(of_step[most[step] :], of_step[last[step] - 1]))
        of_step[most[step] :] = 0
    return numbers


def reward_column(steps: Steps, rewards: Float64s) -> Ragged:
    """Returns rewards of response tokens as a float32 column. Refuses a reward that float32 cannot hold."""
    outside = _first_outside(rewards)
    if outside is not None:
        edges = np.append(0, np.cumsum(steps.response_lengths))
        raise InvalidArgumentError(
            f"{_name(steps, edges, outside, 'reward')} is {rewards[outside]}, which float32 cannot hold; scale the "
            "rewards or the coefficient of kl_in_reward down"
        )
    return Ragged.from_lengths(rewards.astype(np.float32), steps.response_lengths)


def credited_rewards(tokens: TrainedTokens, rewards: Float64s, kept: KeptTokens | None = None) -> tuple[Float64s, int]:
    """Returns each trained token's reward, and the number of rewards that are assigned to no token.

    rewards: of the response tokens. kept: see `response_rewards`. A reward on a token that is not trained, such as an
    observation or a token of a masked step, is assigned to the last trained token before it in its trajectory, which is
    the last action that can have caused it. Returns to go are then the same as without observations. A reward before
    the first trained token of its trajectory is assigned to no token, and is counted as it was sent, unless it is 0.
    """
    if tokens.mask is None:
        return rewards, 0
    credited, counts = rewards[tokens.mask], reward_counts(tokens.steps, kept)
    others = np.flatnonzero(~tokens.mask & (counts > 0))
    if not others.size:
        return credited, 0
    before = np.searchsorted(tokens.places, others) - 1
    ends = tokens.edges[tokens.trajectory_bounds]
    after = before >= tokens.bounds[np.searchsorted(ends, others, side="right") - 1]
    np.add.at(credited, before[after], rewards[others[after]])
    return credited, int(counts[others[~after]].sum())


def _first_outside(numbers: Float64s) -> int | None:
    """Returns the index of the first number that float32 cannot hold, or that is NaN."""
    # If any number is NaN, so are the minimum and the maximum.
    if not len(numbers) or (numbers.min() >= -FLOAT32_MAX and numbers.max() <= FLOAT32_MAX):
        return None
    return int((~(np.abs(numbers) <= FLOAT32_MAX)).argmax())


def _name(steps: Steps, edges: Int64s, token: int, column: str) -> str:
    step = int(np.searchsorted(edges, token, side="right")) - 1
    return f"{steps.name(step)}: {column}[{token - edges[step]}]"
