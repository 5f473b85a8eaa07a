"""A batch's rows without their tokens: lengths, where merging broke, scores and advantages.

They are read from the run's own rows, some at a time and outside its lock, when somebody asks: a batch that nobody asks
for costs nothing, and one that is asked for makes no second copy of its tokens. Only the few around a break are held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import Steps, TrajectoryKey, concat
from gristmill_service.config import RunConfig
from gristmill_service.pipeline import advantage, filters
from gristmill_service.pipeline.advantage import Float64s
from gristmill_service.pipeline.merge import extends
from gristmill_service.pipeline.validate import Received, receive

KEPT_BREAKS = 200
"""Breaks that are held of a batch: where thousands break, they break alike."""
CONTEXT = 6
"""Tokens that are shown before and after the one that differs."""

_EMPTY = Ragged(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class StepBreak(NamedTuple):
    """A step that did not join the one before. at: the index of the first token of its prompt that differs. `before` is
    common to both; `was` follows it in the step before, `now` in this step's prompt, which may have ended already."""

    trajectory: TrajectoryKey
    step: int
    at: int
    before: list[int]
    was: list[int]
    now: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class StepBreaks:
    """in_all: how many steps did not join. pairs: the tokens that stood there and stand there now, and how often; -1
    where the prompt was at its end."""

    in_all: int
    shown: list[StepBreak]
    pairs: list[tuple[tuple[int, int], int]]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSummary:
    """Rows as the plan numbers them. prompts, lengths, trained: (rows,) tokens of the prompt, of the whole row, and
    those with loss_mask 1. first, last: (rows,) the steps, by their own numbers, that it covers. trajectories: (rows,).
    scores, advantages: (trajectories,); advantages None where clients gave one per token.
    """

    received: Received
    prompts: Int64s
    lengths: Int64s
    trained: Int64s
    first: NDArray[np.int32]
    last: NDArray[np.int32]
    trajectories: Int64s
    scores: Float64s
    advantages: Float64s | None
    breaks: StepBreaks


def summarize(tables: Iterable[Steps], config: RunConfig, policy_version: int) -> BatchSummary:
    """tables: the batch's rows in their order, some at a time. policy_version: that it was sealed under."""
    reader = _Reader(config, policy_version)
    for table in tables:
        reader.read(table)
    received = receive(concat(reader.bare), config)
    scores = advantage.trajectory_scores(received.steps.rewards, received.trajectory_bounds, config.trajectory_score)
    trained = np.concatenate(reader.trained) * filters.trained_steps(received, scores, config)[0]
    first = np.flatnonzero(~np.concatenate(reader.joins))
    last = np.append(first[1:], len(received.steps)) - 1
    steps = received.steps
    # Of tokens, or with the KL in them, they are in the shards alone: here are no declared columns.
    is_elsewhere = (
        steps.token_advantages is not None
        or config.kl_in_reward is not None
        or config.advantage_estimator in ("gae", "reinforce++")
    )
    return BatchSummary(
        received=received,
        prompts=steps.prompt_lengths[first],
        lengths=np.concatenate(reader.lengths)[last],
        trained=np.add.reduceat(trained, first) if len(first) else trained,
        first=steps.steps[first],
        last=steps.steps[last],
        trajectories=received.trajectory_of_step[first],
        scores=scores,
        advantages=None if is_elsewhere else advantage.advantages(received, scores, config),
        breaks=reader.breaks(),
    )


class _Reader:
    """Reads rows one table after another, and holds no more of their tokens than the last row's."""

    def __init__(self, config: RunConfig, policy_version: int) -> None:
        self._merges, self._config, self._version = config.merge != "none", config, policy_version
        self._key: TrajectoryKey | None = None
        self._tokens: NDArray[np.int32] = _EMPTY.values
        self.bare: list[Steps] = []
        self.joins: list[NDArray[np.bool_]] = []
        self.lengths: list[Int64s] = []
        self.trained: list[Int64s] = []
        self._in_all = 0
        self._shown: list[StepBreak] = []
        self._pairs: Counter[tuple[int, int]] = Counter()

    def read(self, table: Steps) -> None:
        self.joins.append(self._joined(table) if self._merges else np.zeros(len(table), np.bool_))
        self.lengths.append(table.tokens.lengths)
        masks = filters.fresh_loss_mask(table, self._config, self._version).arrays()
        self.trained.append(np.array([mask.sum(dtype=np.int64) for mask in masks], np.int64))
        self.bare.append(_without_tokens(table))
        # A copy: the view would keep the whole table.
        self._key, self._tokens = table.key(len(table) - 1), table.tokens[len(table) - 1].copy()

    def breaks(self) -> StepBreaks:
        return StepBreaks(self._in_all, self._shown, self._pairs.most_common(10))

    def _joined(self, table: Steps) -> NDArray[np.bool_]:
        """Returns whether each row extends the one before it, as `merge` finds it; notes the rows that do not."""
        keys = [table.key(row) for row in range(len(table))]
        follows = np.array([key == before for key, before in zip(keys, [self._key, *keys[:-1]], strict=True)])
        fits = follows.copy()
        fits[1:] &= table.tokens.lengths[:-1] <= table.prompt_lengths[1:]
        fits[0] = False
        joins = extends(table.tokens, fits)
        if follows[0]:
            common = len(self._tokens)
            joins[0] = common <= table.prompt_lengths[0] and np.array_equal(self._tokens, table.tokens[0][:common])
        for row in np.flatnonzero(follows & ~joins).tolist():
            self._note(table, row, self._tokens if row == 0 else table.tokens[row - 1])
        return joins

    def _note(self, table: Steps, row: int, was: NDArray[np.int32]) -> None:
        now = table.tokens[row][: int(table.prompt_lengths[row])]
        common = min(len(was), len(now))
        differs = was[:common] != now[:common]
        at = int(differs.argmax()) if differs.any() else len(now)
        self._in_all += 1
        self._pairs[int(was[at]) if at < len(was) else -1, int(now[at]) if at < len(now) else -1] += 1
        if len(self._shown) < KEPT_BREAKS:
            before, after = slice(max(0, at - CONTEXT), at), slice(at, at + CONTEXT + 1)
            around = (now[before].tolist(), was[after].tolist(), now[after].tolist())
            self._shown.append(StepBreak(table.key(row), int(table.steps[row]), at, *around))


def _without_tokens(table: Steps) -> Steps:
    """The columns that scores and filters need."""
    nothing = Ragged(_EMPTY.values, np.zeros(len(table), np.int64), np.zeros(len(table), np.int64))
    advantages = None if table.token_advantages is None else nothing
    return replace(
        table,
        tokens=nothing,
        loss_mask=nothing,
        logprobs=None,
        token_rewards=None,
        token_advantages=advantages,
        extras={},
        token_versions=None,
    )
