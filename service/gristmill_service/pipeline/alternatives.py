"""Computes what batches become with other settings, exactly, from their rows, without laying out shards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import starmap
from operator import add
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.estimators import ESTIMATORS, Float64s
from gristmill_service.pipeline import scheduled
from gristmill_service.pipeline.credit.assignment import TokenCredit
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.credit.trained_tokens import trained_tokens
from gristmill_service.pipeline.layout.batch_shards import row_advantages, token_advantages
from gristmill_service.pipeline.layout.columns import Geometry
from gristmill_service.pipeline.layout.shard import Layout
from gristmill_service.pipeline.plan_document import performance
from gristmill_service.pipeline.rows.merge import kept_tokens
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch, score_batch

Changes = Mapping[str, Any]
"""Settings that differ from the run's own, by name."""
Each = Callable[[Callable[[Changes], "Alternative"], Iterable[Changes]], Iterable["Alternative"]]

_DECIDED = """
    train_batch_size n_samples_per_prompt max_samples_per_prompt min_samples surplus step_wise columns seal_order
    group_timeout_s tag_shares tag_timeout_s max_buffered_batches max_buffered_bytes
"""
"""The settings by which rows are sent and batches sealed: both have happened."""
_UNSCHEDULED = """
    merge retokenized_tail trajectory_score advantage_estimator grpo_norm_by_std grpo_epsilon grpo_std_over
    component_weights length_penalty step_groups gamma lambda critic_lambda whiten kl_in_reward kl_from
    loss_reduction zero_variance_filter overlong_filter max_staleness stale layout pad_width pad_token_id
"""
"""The settings that scheduling does not read: rows of the same lengths, which share no tokens, are scheduled alike."""


_FIGURES = (
    *("steps", "groups", "rows", "padding_rows", "tokens", "padding_share", "loss_tokens", "barrier_ratio"),
    *("zero_share", "advantage_mean", "advantage_std", "advantage_largest"),
)
_NO_ADVANTAGES = "advantages need rows with rewards, and every column that trainers write for them"


class Advantages(NamedTuple):
    """The advantages of trained tokens, without the factor of `loss_reduction`.

    zero_groups: trained groups of which every trained token has advantage 0. largest: the largest absolute value.
    """

    tokens: int
    zero_groups: int
    total: float
    squares: float
    largest: float

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.tokens - self.mean**2)) if self.tokens else 0.0

    def joined(self, other: Advantages) -> Advantages:
        sums = Advantages(*map(add, self, other))
        return sums._replace(largest=max(self.largest, other.largest))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What batches become with some settings: the policy's mini-batches, each trained once.

    steps: optimizer steps, in all epochs. groups: those with trained rows. rows: trained rows, without padding rows.
    tokens: all tokens that the model computes, including padding. slowest: the sum over batches of `barrier_ratio`
    times tokens. advantages: None if a column of the trainer is missing, or the rows have only lengths.
    """

    steps: int
    groups: int
    rows: int
    padding_rows: int
    tokens: int
    padding_tokens: int
    loss_tokens: int
    slowest: float
    advantages: Advantages | None

    @property
    def padding_share(self) -> float:
        return self.padding_tokens / self.tokens if self.tokens else 0.0

    @property
    def barrier_ratio(self) -> float:
        """The load of each micro-step's slowest rank, divided by the mean load; 1 if no rank waits."""
        return self.slowest / self.tokens if self.tokens else 1.0

    def __add__(self, other: Outcome) -> Outcome:
        both = self.advantages, other.advantages
        sums: Any = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__[:-1]}
        return Outcome(**sums, advantages=None if both[0] is None or both[1] is None else both[0].joined(both[1]))


class Alternative(NamedTuple):
    """name: the changed settings, such as `layout: packed`; "" for the run's own. reason: why numbers are missing."""

    name: str
    outcome: Outcome | None
    reason: str = ""

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers by name, for tables and JSON; None for those that are unknown."""
        outcome, numbers = self.outcome, dict.fromkeys(_FIGURES)
        if outcome is not None:
            numbers |= {name: getattr(outcome, name) for name in _FIGURES[:-4]}
        if outcome is not None and (advantages := outcome.advantages) is not None:
            zero_share = advantages.zero_groups / outcome.groups if outcome.groups else 0.0
            values = zero_share, advantages.mean, advantages.std, advantages.largest
            numbers |= zip(_FIGURES[-4:], values, strict=True)
        return {"setting": self.name, **numbers, "reason": self.reason}


class Sealed(NamedTuple):
    """The rows of a batch. policy_version: the current one when it was sealed; None: the largest one of its rows."""

    steps: Steps
    policy_version: int | None = None


def parse_changes(text: str) -> Changes:
    """Parses settings such as `advantage_estimator=rloo,whiten=batch`; values are YAML."""
    try:
        changes = yaml.safe_load("{" + re.sub(r"(^|,)\s*([a-z_]+)\s*=", r"\1 \2: ", text) + "}")
    except yaml.YAMLError:
        changes = None
    if not changes or "=" not in text:
        raise InvalidArgumentError(f"{text!r} is not a list of settings; write NAME=VALUE, separated by commas")
    return dict(changes)


def changed(config: RunConfig, changes: Changes) -> RunConfig:
    """Returns the configuration with other settings. Raises InvalidArgumentError for settings that conflict, and for
    those that sent rows and sealed batches cannot follow."""
    decided = [name for name in changes if name in _DECIDED.split()]
    if changes.get("zero_variance_filter") == "replace":
        decided.append("zero_variance_filter: replace")
    if decided:
        raise InvalidArgumentError(
            f"{', '.join(decided)} decides which rows a batch has, and these rows are given; change other settings"
        )
    return parse_config(json.loads(config.model_dump_json(exclude_defaults=True)) | changes, named(changes))


def named(changes: Changes) -> str:
    """Returns the settings as YAML on one line."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in changes.items()}
    return ", ".join(f"{name}: {text}" for name, text in texts.items())


def compared(
    batches: Sequence[Sealed], config: RunConfig, changes: Iterable[Changes], each: Each = map
) -> Iterator[Alternative]:
    """Yields the outcome of all batches as configured, with the name "", and then with each of the changes, or the
    reason why the rows refuse it. each: calls a function for each of the changes, like `map`."""
    own = list(_all_planned(batches, config, [None] * len(batches)))

    def alternative(one: Changes) -> Alternative:
        try:
            settings = changed(config, one)
            known = [schedule if one.keys() <= set(_UNSCHEDULED.split()) else None for _, schedule in own]
            outcomes = [outcome for outcome, _ in _all_planned(batches, settings, known)]
        except InvalidArgumentError as error:
            return Alternative(named(one), None, str(error))
        return _sum(named(one), outcomes)

    yield _sum("", [outcome for outcome, _ in own])
    yield from each(alternative, changes)


def _sum(name: str, outcomes: Sequence[Outcome]) -> Alternative:
    total = reduce(add, outcomes)
    return Alternative(name, total, _NO_ADVANTAGES if total.advantages is None else "")


def effective(alternatives: Iterable[Alternative]) -> Iterator[Alternative]:
    """Omits changes that conflict with other settings or the rows, and those without effect."""
    own, *others = alternatives
    yield own
    yield from (other for other in others if other.outcome not in (None, own.outcome))


def cheaper(config: RunConfig) -> Iterator[Changes]:
    """Yields the settings that may reduce the cost of a batch."""
    if not config.merging.joins and config.step_wise:
        yield {"merge": "prefix"}
    if config.balance == "none":
        yield {"balance": "tokens" if config.flops is None else "flops"}
    if config.layout == "left_padded":
        if config.pad_width != "micro_batch":
            yield {"pad_width": "micro_batch"}
        yield {"layout": "packed"}
    if config.layout != "prefix_tree":
        yield {"layout": "prefix_tree"}


def usual(config: RunConfig) -> Iterator[Changes]:
    """Yields the alternatives to compare by default: other estimators, whitening, filters, staleness, merging, and
    what may be cheaper."""
    for estimator in ESTIMATORS.values():
        if estimator.name != config.advantage_estimator and not estimator.takes_advantages:
            yield {"advantage_estimator": estimator.name}
    if config.advantage_estimator == "grpo":
        yield {"grpo_norm_by_std": not config.grpo_norm_by_std}
    yield {"whiten": "batch" if config.whiten == "none" else "none"}
    yield {"zero_variance_filter": "mask" if config.zero_variance_filter is None else None}
    yield {"max_staleness": config.max_staleness or 1, "stale": "count" if config.stale == "drop" else "drop"}
    if config.merging.joins:
        yield {"merge": "none", "retokenized_tail": 0}
    yield from cheaper(config)


class _Schedule(NamedTuple):
    """A batch's mini-batches, and the rows for which they are scheduled. shares: whether these share tokens."""

    lengths: Int64s
    group_bounds: Int64s
    mini_batches: list[MiniBatchPlan]
    shares: bool

    def fits(self, scored: ScoredBatch) -> bool:
        rows = (self.lengths, scored.rows.lengths), (self.group_bounds, scored.row_group_bounds)
        return not self.shares and scored.sharing is None and all(starmap(np.array_equal, rows))


def _all_planned(
    batches: Sequence[Sealed], config: RunConfig, known: Sequence[_Schedule | None]
) -> Iterator[tuple[Outcome, _Schedule]]:
    """Plans batches that follow one another."""
    baselines = NO_BASELINES
    for batch, schedule in zip(batches, known, strict=True):
        outcome, planned, baselines = _planned(batch, config, baselines, schedule)
        yield outcome, planned


def _planned(
    batch: Sealed, config: RunConfig, baselines: Baselines, known: _Schedule | None
) -> tuple[Outcome, _Schedule, Baselines]:
    """Plans a batch. Also returns the run's baselines after it. known: a schedule with the same settings, which is used
    if it is for rows of the same lengths. Raises InvalidArgumentError if the rows do not fit the configuration."""
    has_rewards = bool(batch.steps.tokens.values.size)
    if not has_rewards and (config.zero_variance_filter is not None or config.overlong_filter):
        raise InvalidArgumentError("the rows have only lengths, which no filter reads; pass rows with rewards")
    scored = score_batch(batch.steps, config, batch.policy_version, baselines=baselines)
    lengths, bounds = scored.rows.lengths, scored.row_group_bounds
    if known is None or not known.fits(scored):
        mini_batches = scheduled(scored, config)
        known = _Schedule(lengths, bounds, mini_batches, scored.sharing is not None)
    policy = [part for part in known.mini_batches if part.model == "policy"]
    kept = np.zeros(len(scored.rows), np.bool_)
    for part in policy:
        kept[part.start : part.kept_end] = True
    geometry = Geometry(scored.rows, config.padding_row_tokens)
    computed = Layout(policy, geometry, config, scored.sharing).sequence_elements if policy else 0
    cost: Any = performance(scored, policy, config, int(lengths[kept].sum()), computed)
    groups = _marked(scored.row_groups[kept])
    planned = Outcome(
        steps=len(policy) * config.update_epochs_per_batch,
        groups=groups,
        rows=int(kept.sum()),
        padding_rows=cost["padding_rows"],
        tokens=computed,
        padding_tokens=cost["padding_tokens"],
        loss_tokens=int(scored.loss_tokens[kept].sum()),
        slowest=cost["barrier_ratio"] * computed,
        advantages=_advantages(scored, policy, kept, groups, config) if has_rewards else None,
    )
    return planned, known, baselines if scored.credit is None else scored.credit.baselines


def _marked(numbers: Int64s) -> int:
    """Counts the different numbers among small ones."""
    return int(np.count_nonzero(np.bincount(numbers)))


def _advantages(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], kept: NDArray[np.bool_], groups: int, config: RunConfig
) -> Advantages | None:
    """kept: bool (rows,), of mini-batches. groups: those of kept rows."""
    if scored.credit is None:
        return None
    values, rows, counts = _trained(scored, policy, config)
    is_trained = (counts > 0) & kept[rows]
    values, rows, counts = values[is_trained], rows[is_trained], counts[is_trained]
    return Advantages(
        tokens=int(counts.sum()),
        zero_groups=groups - _marked(scored.row_groups[rows[values != 0]]),
        total=float(counts @ values),
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
