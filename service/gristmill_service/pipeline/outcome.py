"""What batches become with one configuration: steps, tokens, padding, breaks and advantages, without their shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import isnan, nan
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline import scheduled
from gristmill_service.pipeline.credit.assignment import TokenCredit
from gristmill_service.pipeline.credit.baselines import NO_BASELINES
from gristmill_service.pipeline.credit.trained_tokens import trained_tokens
from gristmill_service.pipeline.figures import break_causes
from gristmill_service.pipeline.layout.batch_shards import row_advantages, token_advantages
from gristmill_service.pipeline.layout.columns import Geometry
from gristmill_service.pipeline.layout.shard import Layout
from gristmill_service.pipeline.plan_document import performance
from gristmill_service.pipeline.rows.joins import Mismatch
from gristmill_service.pipeline.rows.merge import kept_tokens
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch, score_batch

_CONTEXT = 6


class Outcome(NamedTuple):
    """Sums over batches, of the policy's mini-batches, each trained once.

    steps: optimizer steps, in all epochs. groups: those with trained rows; zero_groups: of these, those whose trained
    tokens all have advantage 0. rows: trained rows, without padding rows. tokens: all that the model computes, with
    padding. slowest: the `barrier_ratio` times tokens. breaks: steps that joined none, by cause. advantages, squares:
    sums over loss tokens, without the factor of `loss_reduction`; NaN where they are unknown. largest: the largest
    absolute value.
    """

    steps: int
    groups: int
    rows: int
    padding_rows: int
    tokens: int
    padding_tokens: int
    loss_tokens: int
    slowest: float
    breaks: Counter[str]
    zero_groups: int = 0
    advantages: float = nan
    squares: float = nan
    largest: float = 0.0

    def joined(self, other: Outcome) -> Outcome:
        return Outcome(*map(add, self, other))._replace(largest=max(self.largest, other.largest))

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers by name, for tables and JSON; None for those that are unknown."""
        mean = self.advantages / max(1, self.loss_tokens)
        std = max(0.0, self.squares / max(1, self.loss_tokens) - mean * mean) ** 0.5
        advantages = self.zero_groups / max(1, self.groups), mean, std, self.largest
        names = ("zero_share", "advantage_mean", "advantage_std", "advantage_largest")
        return {
            "steps": self.steps,
            "groups": self.groups,
            "rows": self.rows,
            "padding_rows": self.padding_rows,
            "tokens": self.tokens,
            "padding_share": self.padding_tokens / max(1, self.tokens),
            "loss_tokens": self.loss_tokens,
            "barrier_ratio": self.slowest / self.tokens if self.tokens else 1.0,
            "breaks": dict(self.breaks),
            **dict(zip(names, (None,) * 4 if isnan(mean) else advantages, strict=True)),
        }


class Break(NamedTuple):
    """A step that joined none, compared with step `before` of its trajectory. same: the last equal tokens of both; was,
    now: the tokens after them in step `before` and in the prompt. column: the one that differs, if no token does."""

    trajectory: TrajectoryKey
    step: int
    before: int
    same: list[int]
    was: list[int]
    now: list[int]
    column: str


def outcome_of(batches: Iterable[Steps], config: RunConfig) -> Outcome:
    """Returns the outcome of batches that follow one another. Raises InvalidArgumentError if the rows do not fit the
    configuration."""
    return reduce(Outcome.joined, _outcomes(batches, config))


def first_breaks(steps: Steps, config: RunConfig, most: int) -> list[Break]:
    """Returns the first breaks of a batch, at most this many."""
    scored = score_batch(steps, config, None)
    return [_break(scored, mismatch) for mismatch in scored.mismatches[:most]]


def _break(scored: ScoredBatch, mismatch: Mismatch) -> Break:
    steps, at, after = scored.received.steps, mismatch.index, slice(mismatch.index, mismatch.index + _CONTEXT)
    first = int(scored.received.trajectory_bounds[mismatch.trajectory])
    before, step = first + mismatch.before, first + mismatch.step
    was, now = steps.tokens[before], steps.tokens[step][: int(steps.prompt_lengths[step])]
    same, was, now = now[max(0, at - _CONTEXT) : at], was[after], now[after]
    tokens = (same.tolist(), was.tolist(), now.tolist())
    return Break(steps.key(step), mismatch.step, mismatch.before, *tokens, mismatch.column)


def _outcomes(batches: Iterable[Steps], config: RunConfig) -> Iterator[Outcome]:
    baselines = NO_BASELINES
    for steps in batches:
        scored = score_batch(steps, config, None, baselines=baselines)
        yield _outcome(scored, config)
        baselines = baselines if scored.credit is None else scored.credit.baselines


def _outcome(scored: ScoredBatch, config: RunConfig) -> Outcome:
    policy = [part for part in scheduled(scored, config) if part.model == "policy"]
    kept = np.zeros(len(scored.rows), np.bool_)
    for part in policy:
        kept[part.start : part.kept_end] = True
    geometry = Geometry(scored.rows, config.padding_row_tokens)
    computed = Layout(policy, geometry, config, scored.sharing).sequence_elements if policy else 0
    cost: Any = performance(scored, policy, config, int(scored.rows.lengths[kept].sum()), computed)
    outcome = Outcome(
        steps=len(policy) * config.update_epochs_per_batch,
        groups=_distinct(scored.row_groups[kept]),
        rows=int(kept.sum()),
        padding_rows=cost["padding_rows"],
        tokens=computed,
        padding_tokens=cost["padding_tokens"],
        loss_tokens=int(scored.loss_tokens[kept].sum()),
        slowest=cost["barrier_ratio"] * computed,
        breaks=+Counter(break_causes(scored, config)),
    )
    # A lengths file has no rewards.
    is_known = scored.credit is not None and scored.received.steps.tokens.values.size > 0
    return _with_advantages(outcome, scored, policy, kept, config) if is_known else outcome


def _distinct(numbers: Int64s) -> int:
    """Counts the different numbers among small ones."""
    return int(np.count_nonzero(np.bincount(numbers)))


def _with_advantages(
    outcome: Outcome, scored: ScoredBatch, policy: Sequence[MiniBatchPlan], kept: NDArray[np.bool_], config: RunConfig
) -> Outcome:
    """kept: bool (rows,), of mini-batches."""
    values, rows, counts = _trained(scored, policy, config)
    is_trained = (counts > 0) & kept[rows]
    values, rows, counts = values[is_trained], rows[is_trained], counts[is_trained]
    return outcome._replace(
        zero_groups=outcome.groups - _distinct(scored.row_groups[rows[values != 0]]),
        advantages=float(counts @ values),
        squares=float(counts @ (values * values)),
        largest=float(np.abs(values).max(initial=0)),
    )


def _trained(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], config: RunConfig
) -> tuple[Float64s, Int64s, Int64s]:
    """Returns advantages, float64, with the row that trains each, and how many of its tokens have it, int64."""
    credit, sent = scored.credit, scored.received.steps.token_advantages
    assert credit is not None, "checked by the caller"
    if credit.of_tokens is None and sent is None:
        values = row_advantages(credit.advantages, scored, policy, config)
        return values, np.arange(len(values)), scored.loss_tokens
    of_tokens = credit.of_tokens
    if of_tokens is None:
        assert sent is not None, "the advantages of tokens that are not computed"
        tokens = trained_tokens(scored.received, scored.trained, kept_tokens(scored.rows, len(scored.trained)).most)
        of_tokens = TokenCredit(tokens, tokens.take(sent))
    values, rows = token_advantages(of_tokens, scored, policy, config)
    return values, rows, np.ones(len(values), np.int64)
