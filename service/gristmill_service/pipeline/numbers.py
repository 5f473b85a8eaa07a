"""The numbers of a batch: what filters, scores, estimators and schedules know of its rows and trajectories.

Tokens and declared columns are read here once. A plan is made of the numbers, and shards of the plan and the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.row_fields import PLAIN_FIELDS, UNKNOWN
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit.length_penalty import input_tokens
from gristmill_service.pipeline.credit.scores import trajectory_scores
from gristmill_service.pipeline.rows import filters
from gristmill_service.pipeline.rows.breaks import Breaks, find_breaks
from gristmill_service.pipeline.rows.merge import Rows, merge_rows, ones, realigned_tokens, visit_loss_tokens
from gristmill_service.pipeline.rows.row_values import row_costs
from gristmill_service.pipeline.rows.validate import Received, receive
from gristmill_service.pipeline.stages import StageTimer, no_timer


class Partitions(NamedTuple):
    """The partitions of a batch's rows, which may not share micro-batches.

    names: by first appearance; "" for rows without one. of_rows: int64 (rows,), the number of each row's partition.
    """

    names: list[str]
    of_rows: Int64s

    def named(self, numbers: Int64s) -> list[str]:
        return [self.names[number] for number in numbers.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The numbers of a batch, for any number of ranks.

    received: the batch's steps without tokens and columns; only their lengths are left. rows: of its tokens' places.
    scores: float64 (trajectories,), without the KL. behind: int64 (trajectories,), see `filters.versions_behind`.
    input_tokens: int64 (trajectories,), for `length_penalty`; None without one. sampled: int64 (steps,), the tokens
    with loss_mask 1 of each. trained: int64 (visits,), those of them that each visit's row trains. Neither leaves out
    steps that filters mask. costs: float64 (rows,), the FLOPs of each row that `flops` reads from a column.
    partitions: None if no row has one.
    breaks: the steps that joined no other. stale: (round, uid) of groups dropped as stale. rows_received,
    tokens_received: of all steps, including these groups. counts: the number of cases of each rule, by name.
    """

    received: Received
    rows: Rows
    scores: Float64s
    behind: Int64s
    input_tokens: Int64s | None
    sampled: Int64s
    trained: Int64s
    costs: Float64s | None
    partitions: Partitions | None
    breaks: Breaks
    stale: list[tuple[int, str]]
    rows_received: int
    tokens_received: int
    counts: dict[str, int]

    @property
    def staleness(self) -> Int64s:
        """How many versions the oldest step of each trajectory with a known policy version is behind."""
        return self.behind[self.behind > UNKNOWN]

    @property
    def row_groups(self) -> Int64s:
        """The group of each row."""
        return self.received.trajectory_groups[self.rows.trajectories]

    @property
    def row_group_bounds(self) -> Int64s:
        """Group g has the rows `bounds[g]:bounds[g + 1]`; int64 (groups + 1,)."""
        return np.searchsorted(self.row_groups, np.arange(len(self.received.groups) + 1))


def numbers_of(
    steps: Steps, config: RunConfig, policy_version: int | None = None, timed: StageTimer = no_timer
) -> tuple[Numbers, Received]:
    """Validates and merges a batch, and drops or masks what is stale. Returns its numbers, and its steps in order.

    policy_version: the current version, for staleness; None: the largest version in the batch.
    Raises InvalidArgumentError if the rows violate a rule.
    """
    with timed("validate"):
        received = receive(steps, config)
        current = filters.newest_version(received.steps) if policy_version is None else policy_version
        received, stale, counts = filters.drop_stale_groups(received, config, current)
        received, stale_tokens = filters.mask_stale_tokens(received, config, current)
    with timed("merge"):
        rows, ordered = merge_rows(received, config), received.steps
        breaks = find_breaks(received, rows, config)
        loss_mask = ordered.loss_mask
        scores = trajectory_scores(
            ordered.rewards, received.trajectory_bounds, config.trajectory_score, ordered.token_rewards
        )
        numbers = Numbers(
            received=replace(received, steps=_without_tokens(ordered)),
            rows=rows,
            scores=scores,
            behind=filters.versions_behind(received, current),
            input_tokens=input_tokens(received, config),
            sampled=ones(loss_mask),
            trained=visit_loss_tokens(rows, loss_mask),
            costs=row_costs(ordered, rows, config),
            partitions=_partitions(ordered, rows),
            breaks=breaks,
            stale=stale,
            rows_received=len(steps),
            tokens_received=steps.tokens.total,
            counts=counts | stale_tokens | breaks.counts | _realigned(rows, loss_mask, config),
        )
    return numbers, received


def _partitions(steps: Steps, rows: Rows) -> Partitions | None:
    texts = steps.partitions
    if texts is None or not any(texts):
        return None
    names = [texts[step] for step in rows.first.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Partitions([*numbers], np.array([numbers[name] for name in names], np.int64))


def _realigned(rows: Rows, loss_mask: Ragged, config: RunConfig) -> dict[str, int]:
    if not config.retokenized_tail:
        return {}
    tokens, loss_tokens = realigned_tokens(rows, loss_mask)
    return {"realigned_tokens": tokens, "realigned_loss_tokens": loss_tokens}


def _without_tokens(steps: Steps) -> Steps:
    """Returns the steps with only the lengths of their tokens, so that nothing that is computed from numbers can read
    more."""
    plain: dict[str, Any] = dict.fromkeys(one.name for one in PLAIN_FIELDS)
    return replace(
        steps,
        tokens=_lengths(steps.tokens),
        loss_mask=_lengths(steps.loss_mask),
        token_rewards=None,
        token_advantages=None if steps.token_advantages is None else _lengths(steps.token_advantages),
        token_versions=None,
        extras={},
        **plain,
    )


def _lengths(column: Ragged) -> Ragged:
    return Ragged(column.values[:0], np.zeros_like(column.lengths), column.lengths)
