"""Computes what batches become with other settings, exactly, from their rows, without laying out shards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from math import isnan, nan
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
from gristmill_service.pipeline.outline import needs_rows, outlined, restored
from gristmill_service.pipeline.plan_document import performance
from gristmill_service.pipeline.rows.merge import kept_tokens
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch, score_batch
from gristmill_service.validation_messages import shown

Changes = Mapping[str, Any]
"""Settings that differ from the run's own, by name."""

_DECIDED = """
    train_batch_size n_samples_per_prompt max_samples_per_prompt min_samples surplus step_wise columns seal_order
    seal_by group_timeout_s tag_shares tag_timeout_s max_batches_ahead max_buffered_batches max_buffered_bytes
"""
"""The settings by which rows are sent and batches sealed: both have happened."""
USUAL = "usual"
"""The text for the usual alternatives, except those without effect."""
FREED = "needs what is freed with the batch's rows: their tokens, rewards of steps, and columns"
_NO_ADVANTAGES = "advantages need rows with rewards, and every column that trainers write for them"


_LONGEST = 4096
_ASSIGNED = re.compile(r"(^|,)\s*([a-z_]+)\s*=")


class Outcome(NamedTuple):
    """What batches become with some settings: the policy's mini-batches, each trained once. Sums over batches.

    steps: optimizer steps, in all epochs. groups: those with trained rows; zero_groups: of these, those whose trained
    tokens all have advantage 0. rows: trained rows, without padding rows. tokens: all that the model computes, with
    padding. slowest: the `barrier_ratio` times tokens. advantages, squares: sums over loss tokens, without the factor
    of `loss_reduction`; NaN where they are unknown. largest: the largest absolute value.
    """

    steps: int
    groups: int
    rows: int
    padding_rows: int
    tokens: int
    padding_tokens: int
    loss_tokens: int
    slowest: float
    zero_groups: int
    advantages: float
    squares: float
    largest: float

    def joined(self, other: Outcome) -> Outcome:
        return Outcome(*map(add, self, other))._replace(largest=max(self.largest, other.largest))


class Alternative(NamedTuple):
    """name: the changed settings, such as `layout: packed`; "" for the run's own. reason: why numbers are missing."""

    name: str
    outcome: Outcome | None
    reason: str = ""

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers by name, for tables and JSON; None for those that are unknown."""
        if (sums := self.outcome) is None:
            return {"setting": self.name, **dict.fromkeys(FIGURES), "reason": self.reason}
        mean = sums.advantages / max(1, sums.loss_tokens)
        std = max(0.0, sums.squares / max(1, sums.loss_tokens) - mean * mean) ** 0.5
        advantages = sums.zero_groups / max(1, sums.groups), mean, std, sums.largest
        numbers = (
            *(sums.steps, sums.groups, sums.rows, sums.padding_rows, sums.tokens, sums.loss_tokens),
            sums.padding_tokens / max(1, sums.tokens),
            sums.slowest / sums.tokens if sums.tokens else 1.0,
            *((None,) * 4 if isnan(mean) else advantages),
        )
        return {"setting": self.name, **dict(zip(FIGURES, numbers, strict=True)), "reason": self.reason}


FIGURES = (
    *("steps", "groups", "rows", "padding_rows", "tokens", "loss_tokens", "padding_share", "barrier_ratio"),
    *("zero_share", "advantage_mean", "advantage_std", "advantage_largest"),
)
"""The numbers of an alternative. barrier_ratio: the load of each micro-step's slowest rank by the mean load."""


class Sealed(NamedTuple):
    """The rows of a batch. policy_version: the current one when it was sealed; None: the largest one of its rows.
    baselines: the run's before the batch, with an estimator that keeps any."""

    steps: Steps
    policy_version: int | None = None
    baselines: Baselines = NO_BASELINES


def parse_changes(text: str) -> Changes:
    """Parses settings such as `advantage_estimator=rloo,whiten=batch`; values are YAML."""
    names, changes = _parsed("{" + _ASSIGNED.sub(r"\1 \2: ", text) + "}") if len(text) <= _LONGEST else ([], {})
    if not changes or not changes.keys() <= {match[2] for match in _ASSIGNED.finditer(text)}:
        raise InvalidArgumentError(
            f"{shown(text)} is not a list of settings; write NAME=VALUE, separated by "
            "commas, and all parts of a setting as in micro_batch={max_tokens: 2048}"
        )
    if len(changes) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(f"{text!r} sets {twice} twice; write its other value as another alternative")
    return changes


def _parsed(document: str) -> tuple[list[str], dict[str, Any]]:
    """Returns all names in a YAML mapping, and the mapping. Both are empty if the text is no mapping, has values that
    JSON does not have, or has aliases, because a short text with aliases may expand to a very long one."""
    try:
        root = yaml.compose(document, yaml.SafeLoader)
        if root is None or any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(document, yaml.SafeLoader)):
            return [], {}
        changes: dict[str, Any] = yaml.safe_load(document)
        json.dumps(changes)
        return [key.value for key, _ in root.value], changes
    except (TypeError, ValueError, RecursionError, yaml.YAMLError):
        return [], {}


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


def compared(batches: Sequence[Sealed], config: RunConfig, changes: Iterable[Changes]) -> Iterator[Alternative]:
    """Yields the outcome of all batches as configured, with the name "", and then with each of the changes, or the
    reason why the rows refuse it."""
    yield _sum("", _all_planned(batches, config))
    for one in changes:
        try:
            alternative = _sum(named(one), _all_planned(batches, changed(config, one)))
        except InvalidArgumentError as error:
            alternative = Alternative(named(one), None, str(error))
        yield alternative


def _sum(name: str, outcomes: Iterable[Outcome]) -> Alternative:
    total = reduce(Outcome.joined, outcomes)
    return Alternative(name, total, _NO_ADVANTAGES if isnan(total.advantages) else "")


def compared_outline(outline: bytes, config: RunConfig, changes: Sequence[Changes]) -> Iterator[Alternative]:
    """Like `compared`, for a batch whose rows are freed. Numbers that need more than the outline are missing."""
    settings, is_complete = outlined(config)
    possible = [one for one in changes if not needs_rows(one, config)]
    answers = compared([Sealed(*restored(outline))], settings, possible)
    for one in ({}, *changes):
        if needs_rows(one, config):
            yield Alternative(named(one), None, FREED)
        elif (answer := next(answers)).outcome is None or is_complete:
            yield answer
        else:
            yield answer._replace(outcome=answer.outcome._replace(**_UNKNOWN), reason=FREED)


def effective(alternatives: Iterable[Alternative], chosen: Sequence[str] = ()) -> Iterator[Alternative]:
    """Omits changes that conflict with other settings or the rows, and those without effect, but not the first ones,
    which were `chosen`."""
    own, *others = alternatives
    first = len([text for text in chosen if text != USUAL])
    yield from (own, *others[:first])
    for other in others[first:]:
        is_freed = other.outcome is None and other.reason == FREED
        if is_freed or (other.outcome and other.figures != {**own.figures, "setting": other.name}):
            yield other


def parse_all(texts: Sequence[str], config: RunConfig) -> list[Changes]:
    """Parses texts with `parse_changes`; `USUAL` stands for the usual alternatives. Raises InvalidArgumentError for
    settings that conflict."""
    chosen = [parse_changes(text) for text in texts if text != USUAL]
    for changes in chosen:
        changed(config, changes)
    return [*chosen, *(one for one in (usual(config) if USUAL in texts else ()) if one not in chosen)]


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


def _all_planned(batches: Sequence[Sealed], config: RunConfig) -> Iterator[Outcome]:
    """Plans batches that follow one another."""
    baselines = batches[0].baselines
    for batch in batches:
        outcome, baselines = _planned(batch, config, baselines)
        yield outcome


def _planned(batch: Sealed, config: RunConfig, baselines: Baselines) -> tuple[Outcome, Baselines]:
    """Plans a batch. Also returns the run's baselines after it. Raises InvalidArgumentError if the rows do not fit the
    configuration."""
    has_rewards = bool(batch.steps.tokens.values.size)
    reads_rows = config.merging.joins or config.stale == "mask" or config.zero_variance_filter or config.overlong_filter
    if reads_rows and not has_rewards:
        raise InvalidArgumentError(
            "the rows have only lengths, which neither merging nor filters read; pass rows with tokens and rewards"
        )
    scored = score_batch(batch.steps, config, batch.policy_version, baselines=baselines)
    policy = [part for part in scheduled(scored, config) if part.model == "policy"]
    kept = np.zeros(len(scored.rows), np.bool_)
    for part in policy:
        kept[part.start : part.kept_end] = True
    geometry = Geometry(scored.rows, config.padding_row_tokens)
    computed = Layout(policy, geometry, config, scored.sharing).sequence_elements if policy else 0
    cost: Any = performance(scored, policy, config, int(scored.rows.lengths[kept].sum()), computed)
    groups = _marked(scored.row_groups[kept])
    outcome = Outcome(
        steps=len(policy) * config.update_epochs_per_batch,
        groups=groups,
        rows=int(kept.sum()),
        padding_rows=cost["padding_rows"],
        tokens=computed,
        padding_tokens=cost["padding_tokens"],
        loss_tokens=int(scored.loss_tokens[kept].sum()),
        slowest=cost["barrier_ratio"] * computed,
        **_advantages(scored, policy, kept, groups, config) if has_rewards else _UNKNOWN,
    )
    return outcome, baselines if scored.credit is None else scored.credit.baselines


def _marked(numbers: Int64s) -> int:
    """Counts the different numbers among small ones."""
    return int(np.count_nonzero(np.bincount(numbers)))


def _advantages(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], kept: NDArray[np.bool_], groups: int, config: RunConfig
) -> Mapping[str, Any]:
    """kept: bool (rows,), of mini-batches. groups: those of kept rows."""
    if scored.credit is None:
        return _UNKNOWN
    values, rows, counts = _trained(scored, policy, config)
    is_trained = (counts > 0) & kept[rows]
    values, rows, counts = values[is_trained], rows[is_trained], counts[is_trained]
    return {
        "zero_groups": groups - _marked(scored.row_groups[rows[values != 0]]),
        "advantages": float(counts @ values),
        "squares": float(counts @ (values * values)),
        "largest": float(np.abs(values).max(initial=0)),
    }


# A constant, as one NaN equals itself in tuples.
_UNKNOWN: Mapping[str, Any] = {"zero_groups": 0, "advantages": nan, "squares": nan, "largest": 0.0}


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
