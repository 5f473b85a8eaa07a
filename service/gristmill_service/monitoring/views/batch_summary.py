"""A batch's rows without their tokens: lengths, merge breaks, scores and advantages.

They are computed from the run's stored rows on request, in parts. Only the tokens around merge breaks are retained, and
those of one trajectory until it is read completely.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.row_fields import PLAIN_FIELDS
from gristmill._wire.steps import Steps, concat
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s, RunningEstimator, TokenEstimator
from gristmill_service.monitoring import Document
from gristmill_service.pipeline.credit import advantage
from gristmill_service.pipeline.layout.extra_columns import row_costs
from gristmill_service.pipeline.rows import filters
from gristmill_service.pipeline.rows.joins import Mismatch, breaks, mismatch
from gristmill_service.pipeline.rows.merge import merge_rows, ones, visit_loss_tokens
from gristmill_service.pipeline.rows.validate import Received, receive

KEPT_BREAKS = 200
"""The maximum number of breaks retained per batch, because thousands of breaks are similar."""
CONTEXT = 6
"""The number of tokens shown before and after the token that differs."""
_LONGEST_UID = 80

_EMPTY = Ragged(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class TokenPair(Document):
    was: int = Field(description="The token in the compared step; -1: that step had ended.")
    now: int = Field(description="The token in the prompt; -1: the prompt had ended.")
    count: int


class PrefixBreak(Document):
    uid: str
    round: int
    sample: int
    step: int
    against: int = Field(description="The compared step: the previous step or, in a tree, the most similar one.")
    index: int = Field(
        description="The index of the first different token in the step's prompt, or the prompt's length."
    )
    before: list[int] = Field(description="The equal tokens before it.")
    was: list[int] = Field(description="The tokens from there in the compared step.")
    now: list[int] = Field(description="The tokens from there in this step's prompt.")
    column: str = Field(description="The declared column in which the steps differ, if no token differs; else empty.")


@dataclass(frozen=True, slots=True, eq=False)
class BatchSummary:
    """The rows of a batch, numbered as in the plan.

    prompts, lengths, trained: (rows,) number of tokens in the prompt, in the whole row, and with loss_mask 1.
    costs: (rows,) what `flops` reads from a column; None if it reads none.
    first, last, steps: (rows,) the numbers of the row's first and last step, and how many steps it has.
    trajectories: (rows,). scores, responses, advantages: (trajectories,); responses is the number of response tokens of
    all steps; advantages is None if clients sent one per token. breaks_in_all: how many steps joined no other; breaks:
    the first of these; pairs: the most frequent pairs of different tokens.
    """

    received: Received
    prompts: Int64s
    lengths: Int64s
    trained: Int64s
    costs: Float64s | None
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
    """Reads rows table by table, and merges them like the batch's builder. Retains only the tables of the last
    trajectory, which may be incomplete.

    policy_version: the policy version at which the batch was sealed.
    visited, trained: for each visit of a row (`merge.Rows`), the step's index in the batch, and how many of its tokens
        the row trains. counts, lengths: for each row, its visits and tokens. All in parts, in the batch's order.
    """

    def __init__(self, config: RunConfig, policy_version: int) -> None:
        self._config, self._version = config, policy_version
        self._pending: list[Steps] = []
        self._rows_read = 0
        self._bare: list[Steps] = []
        self._visited: list[Int64s] = []
        self._sampled: list[Int64s] = []
        self._trained: list[Int64s] = []
        self._counts: list[Int64s] = []
        self._lengths: list[Int64s] = []
        self._costs: list[Float64s] = []
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
        """Returns the summary. Call it after the whole batch is read."""
        self._end()
        config, received = self._config, receive(concat(self._bare), self._config)
        steps, bounds = received.steps, received.trajectory_bounds
        scores = advantage.trajectory_scores(steps.rewards, bounds, config.trajectory_score)
        visited, counts = np.concatenate(self._visited), np.concatenate(self._counts)
        unfiltered = filters.trained_steps(received, scores, config)[0]
        trained = np.concatenate(self._trained) * unfiltered[visited]
        begins = np.cumsum(counts) - counts
        first, last = visited[begins], visited[begins + counts - 1]
        # Advantages per token or step, or that include a KL, need declared columns, a length penalty needs tokens,
        # running baselines the batches before, and whitening a mini-batch its plan.
        is_elsewhere = (
            config.whiten == "mini_batch"
            or steps.token_advantages is not None
            or config.kl_in_reward is not None
            or config.length_penalty is not None
            or isinstance(config.estimator, TokenEstimator | RunningEstimator)
            or config.estimator.compares_steps
        )
        trained = np.add.reduceat(trained, begins) if len(begins) else trained
        trajectories = received.trajectory_of_step[first]
        tokens = advantage.trajectory_tokens(trajectories, trained, len(scores))
        advantages = None
        if not is_elsewhere:
            sampled = advantage.sampled_tokens(np.concatenate(self._sampled) * unfiltered, bounds)
            estimated = advantage.estimated(received, scores, sampled, config)
            advantages = advantage.whitened_of_trajectories(estimated, tokens, config)
        return BatchSummary(
            received=received,
            prompts=steps.prompt_lengths[first],
            lengths=np.concatenate(self._lengths),
            trained=trained,
            costs=np.concatenate(self._costs) if self._costs else None,
            first=steps.steps[first],
            last=steps.steps[last],
            steps=counts,
            trajectories=trajectories,
            scores=scores,
            responses=np.concatenate(self._responses),
            advantages=advantages,
            breaks_in_all=self._breaks_in_all,
            breaks=self._breaks,
            pairs=[TokenPair(was=was, now=now, count=count) for (was, now), count in self._pairs.most_common(10)],
        )

    def _end(self) -> None:
        """Merges the last trajectory, which is now complete."""
        if self._pending:
            self._merge(concat(self._pending))
        self._pending = []

    def _merge(self, table: Steps) -> None:
        """Merges complete trajectories."""
        if not len(table):
            return
        config, received = self._config, receive(table, self._config)
        rows = merge_rows(received, config)
        self._visited.append(rows.steps + self._rows_read)
        loss_mask = filters.fresh_loss_mask(table, config, self._version)
        self._sampled.append(ones(loss_mask))
        self._trained.append(visit_loss_tokens(rows, loss_mask))
        self._counts.append(np.diff(rows.edges))
        self._lengths.append(rows.lengths)
        if (costs := row_costs(table, rows, config)) is not None:
            self._costs.append(costs)
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
