"""A batch's rows without their tokens: lengths, where merging broke, scores and advantages.

They are read from the run's own rows, some at a time, when somebody asks. Tokens are not copied: only the few around a
break are retained, and those of a trajectory until all of it is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import PLAIN_FIELDS, Steps, concat
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s, TokenEstimator
from gristmill_service.monitoring import Document
from gristmill_service.pipeline.credit import advantage
from gristmill_service.pipeline.rows import filters
from gristmill_service.pipeline.rows.joins import Mismatch, breaks, mismatch
from gristmill_service.pipeline.rows.merge import merge_rows, visit_loss_tokens
from gristmill_service.pipeline.rows.validate import Received, receive

KEPT_BREAKS = 200
"""Breaks that are retained of a batch: thousands of breaks are alike."""
CONTEXT = 6
"""Tokens that are shown before and after the one that differs."""
_LONGEST_UID = 80

_EMPTY = Ragged(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class TokenPair(Document):
    was: int = Field(description="The token in the step that it is compared with; -1: it had ended.")
    now: int = Field(description="The token in the prompt; -1: it had ended.")
    count: int


class PrefixBreak(Document):
    uid: str
    round: int
    sample: int
    step: int
    against: int = Field(
        description="The step that it is compared with: the one before, or, in a tree, the most similar one."
    )
    index: int = Field(description="Of the first token of the step's prompt that differs, or the prompt's length.")
    before: list[int] = Field(description="Tokens before it, which are the same.")
    was: list[int] = Field(description="From there on in the step that it is compared with.")
    now: list[int] = Field(description="From there on in this step's prompt.")
    column: str = Field(description="The declared column in which the two differ, where no token does; else empty.")


@dataclass(frozen=True, slots=True, eq=False)
class BatchSummary:
    """The rows of a batch as the plan numbers them.

    prompts, lengths, trained: (rows,) tokens of the prompt, of the whole row, and
    those with loss_mask 1. first, last, steps: (rows,) of the steps that it is made of the first and the last, by
    their own numbers, and how many they are. trajectories: (rows,). scores, responses, advantages:
    (trajectories,); responses are the tokens of all its steps' responses, advantages None where clients gave one per
    token. breaks_in_all: steps that joined none; breaks: the first of them; pairs: the tokens that most often differ.
    """

    received: Received
    prompts: Int64s
    lengths: Int64s
    trained: Int64s
    first: NDArray[np.int32]
    last: NDArray[np.int32]
    steps: Int64s
    trajectories: Int64s
    scores: Float64s
    responses: Int64s
    advantages: Float64s | None
    breaks_in_all: int
    breaks: list[PrefixBreak]
    pairs: list[TokenPair]


class BatchReader:
    """Reads rows one table after another, merges them as the batch's builder does, and retains the tables of the
    last trajectory alone, of which more may come.

    policy_version: the one under which the batch was sealed.
    visited, trained: of each visit of a row (`merge.Rows`) the step, among all of the batch, and how many of its tokens
        the row trains. counts, lengths: of each row its visits and tokens. All in parts, in the batch's order.
    """

    def __init__(self, config: RunConfig, policy_version: int) -> None:
        self._config, self._version = config, policy_version
        self._pending: list[Steps] = []
        self._rows_read = 0
        self._bare: list[Steps] = []
        self._visited: list[Int64s] = []
        self._trained: list[Int64s] = []
        self._counts: list[Int64s] = []
        self._lengths: list[Int64s] = []
        self._responses: list[Int64s] = []
        self._breaks_in_all = 0
        self._breaks: list[PrefixBreak] = []
        self._pairs: Counter[tuple[int, int]] = Counter()

    def read(self, table: Steps) -> None:
        begins = np.flatnonzero(table.steps == 0)
        if not len(begins):
            self._pending.append(table)
            return
        rows, first, last = np.arange(len(table)), begins[0], begins[-1]
        self._pending.append(table.take(rows[:first]))
        self._end()
        self._merge(table.take(rows[first:last]))
        self._pending = [table.take(rows[last:])]

    def summary(self) -> BatchSummary:
        """Returns the summary once all of the batch is read."""
        self._end()
        config, received = self._config, receive(concat(self._bare), self._config)
        steps, bounds = received.steps, received.trajectory_bounds
        scores = advantage.trajectory_scores(steps.rewards, bounds, config.trajectory_score)
        visited, counts = np.concatenate(self._visited), np.concatenate(self._counts)
        trained = np.concatenate(self._trained) * filters.trained_steps(received, scores, config)[0][visited]
        begins = np.cumsum(counts) - counts
        first, last = visited[begins], visited[begins + counts - 1]
        # Advantages of tokens, or with the KL in them, are only in shards: they need declared columns.
        is_elsewhere = (
            steps.token_advantages is not None
            or config.kl_in_reward is not None
            or isinstance(config.estimator, TokenEstimator)
        )
        return BatchSummary(
            received=received,
            prompts=steps.prompt_lengths[first],
            lengths=np.concatenate(self._lengths),
            trained=np.add.reduceat(trained, begins) if len(begins) else trained,
            first=steps.steps[first],
            last=steps.steps[last],
            steps=counts,
            trajectories=received.trajectory_of_step[first],
            scores=scores,
            responses=np.concatenate(self._responses),
            advantages=None if is_elsewhere else advantage.advantages(received, scores, config),
            breaks_in_all=self._breaks_in_all,
            breaks=self._breaks,
            pairs=[TokenPair(was=was, now=now, count=count) for (was, now), count in self._pairs.most_common(10)],
        )

    def _end(self) -> None:
        """Merges the last trajectory, which is complete."""
        if self._pending:
            self._merge(concat(self._pending))
        self._pending = []

    def _merge(self, table: Steps) -> None:
        """Merges whole trajectories."""
        if not len(table):
            return
        config, received = self._config, receive(table, self._config)
        rows = merge_rows(received, config)
        self._visited.append(rows.steps + self._rows_read)
        self._trained.append(visit_loss_tokens(rows, filters.fresh_loss_mask(table, config, self._version)))
        self._counts.append(np.diff(rows.edges))
        self._lengths.append(rows.lengths)
        self._rows_read += len(table)
        self._responses.append(np.add.reduceat(table.response_lengths, received.trajectory_bounds[:-1]))
        self._bare.append(_without_tokens(table))
        if config.merging.joins:
            roots = rows.roots(len(table))
            for step in breaks(received, rows.first).tolist():
                self._note(received, mismatch(received, step, roots, config), step)

    def _note(self, received: Received, difference: Mismatch, step: int) -> None:
        steps = received.steps
        was = steps.tokens[int(received.trajectory_bounds[difference.trajectory]) + difference.before]
        now, at = steps.tokens[step][: int(steps.prompt_lengths[step])], difference.index
        self._breaks_in_all += 1
        if not difference.column:
            self._pairs[int(was[at]) if at < len(was) else -1, int(now[at]) if at < len(now) else -1] += 1
        if len(self._breaks) < KEPT_BREAKS:
            key, after = steps.key(step), slice(at, at + CONTEXT + 1)
            self._breaks.append(
                PrefixBreak(
                    uid=shortened(key.uid),
                    round=key.round,
                    sample=key.sample,
                    step=difference.step,
                    against=difference.before,
                    index=at,
                    before=now[max(0, at - CONTEXT) : at].tolist(),
                    was=was[after].tolist(),
                    now=now[after].tolist(),
                    column=difference.column,
                )
            )


def shortened(uid: str) -> str:
    return uid if len(uid) <= _LONGEST_UID else f"{uid[: _LONGEST_UID - 1]}…"


def _without_tokens(table: Steps) -> Steps:
    """Returns the table with only the columns that scores and filters need."""
    nothing = Ragged(_EMPTY.values, np.zeros(len(table), np.int64), np.zeros(len(table), np.int64))
    advantages = None if table.token_advantages is None else nothing
    plain: dict[str, Any] = dict.fromkeys(one.name for one in PLAIN_FIELDS)
    return replace(
        table,
        tokens=nothing,
        loss_mask=nothing,
        token_rewards=None,
        token_advantages=advantages,
        extras={},
        token_versions=None,
        **plain,
    )
