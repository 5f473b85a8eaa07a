"""Makes the table of a batch: every number that figures, metrics, history and views of it are slices or sums of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.batch_table import ALL_MASKED, HAS_ADVANTAGE, MASKED, PLACE, BatchTable, Columns
from gristmill._wire.columns import Int64s
from gristmill_service.config import Model, RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit.trained_tokens import trained_tokens
from gristmill_service.pipeline.layout.shard import Layout
from gristmill_service.pipeline.numbers import Numbers
from gristmill_service.pipeline.planning import Plan, row_advantages, token_advantages
from gristmill_service.pipeline.rows.breaks import CAUSES, Breaks
from gristmill_service.pipeline.rows.merge import kept_tokens
from gristmill_service.pipeline.rows.validate import Received

_MOST_REASONS = 255
_MOST_MEANS = 65
NONE = -1


def table_of(plan: Plan, received: Received, layouts: Mapping[Model, Layout], config: RunConfig) -> BatchTable:
    """Returns the table of a batch. received: its steps; their tokens are read only if credit is per token. layouts:
    the places of each model's rows."""
    numbers = plan.numbers
    agents, agent_of = _numbered(numbers.received.agents, len(numbers.scores))
    reasons, reason_of = _stop_reasons(numbers.received)
    tags, tag_of = _numbered(numbers.received.tags or None, len(numbers.received.groups))
    columns, breaks = _breaks(numbers)
    advantages, has_advantage, is_per_token = _advantages(plan, received, config)
    return BatchTable(
        rows=_rows(plan) | _places(plan, layouts, config.models),
        trajectories=_trajectories(plan)
        | {"advantage": advantages, "agent": agent_of, "stop_reason": reason_of}
        | {"flags": _masked(plan) | (HAS_ADVANTAGE * has_advantage).astype(np.uint8)},
        groups={
            "round": np.array([round_ for round_, _ in numbers.received.groups], np.int32),
            "tag": tag_of,
            "zero_variance": _zero_variance(numbers),
        },
        breaks=breaks,
        texts={
            "uids": [uid for _, uid in numbers.received.groups],
            "tags": tags,
            "agents": agents,
            "stop_reasons": reasons,
            "causes": [*CAUSES],
            "columns": columns,
        },
        facts={
            "credit": "token" if is_per_token else "trajectory",
            "rows_received": numbers.rows_received,
            "tokens_received": numbers.tokens_received,
            "has_tokens": not len(received.steps) or received.steps.tokens.values.size > 0,
            "steps": len(numbers.received.steps),
            "fresh_tokens": numbers.received.steps.tokens.total,
            "elements": layouts["policy"].sequence_elements if "policy" in layouts else 0,
            "shared_tokens": 0 if plan.sharing is None else plan.sharing.shared_tokens(plan.policy),
            "realigned_tokens": plan.counts.get("realigned_tokens", 0),
            "padding_rows": sum(part.padding_rows for part in plan.policy),
            "padding_widths": {
                model: layout.widths[layout.placement.rows < 0].tolist() for model, layout in layouts.items()
            },
            "means": _means_by_name(plan),
            "pairs": [list(pair) for pair in numbers.breaks.pairs],
            "around": [list(around) for around in numbers.breaks.around],
        },
    )


def _rows(plan: Plan) -> Columns:
    numbers = plan.numbers
    rows, steps = numbers.rows, numbers.received.steps.steps
    columns: Columns = {
        "trajectory": rows.trajectories,
        "prompt": rows.prompt_lengths,
        "length": rows.lengths,
        "trained": plan.loss_tokens,
        "first": steps[rows.first],
        "last": steps[rows.last],
        "steps": np.diff(rows.edges),
        "version": rows.policy_versions,
    }
    columns = {name: values.astype(np.int32) for name, values in columns.items()}
    return columns if numbers.costs is None else columns | {"cost": numbers.costs}


def _places(plan: Plan, layouts: Mapping[Model, Layout], models: Sequence[Model]) -> Columns:
    """Returns where and how wide each model's rows are laid out; -1 where alignment dropped them."""
    nowhere = np.full(len(plan.numbers.rows), NONE, np.int32)
    columns: Columns = {f"{model}.{name}": nowhere for model in models for name in PLACE}
    for model, layout in layouts.items():
        parts = [part for part in plan.mini_batches if part.model == model]
        ranks = [(part.index, rank, of_rank) for part in parts for rank, of_rank in enumerate(part.ranks)]
        sizes = [len(of_rank.rows) for _, _, of_rank in ranks]
        micro_batches = [np.repeat(np.arange(len(one.bounds) - 1), np.diff(one.bounds)) for _, _, one in ranks]
        placed = {
            "mini_batch": np.repeat([index for index, _, _ in ranks], sizes),
            "rank": np.repeat([rank for _, rank, _ in ranks], sizes),
            "micro_batch": np.concatenate(micro_batches),
            "width": layout.widths,
        }
        rows = layout.placement.rows
        for name, values in placed.items():
            column = nowhere.copy()
            column[rows[rows >= 0]] = values[rows >= 0]
            columns[f"{model}.{name}"] = column
    return columns


def _trajectories(plan: Plan) -> Columns:
    numbers = plan.numbers
    received, begins = numbers.received, numbers.received.trajectory_bounds[:-1]
    lengths = np.diff(received.trajectory_bounds)
    columns: Columns = {
        "group": received.trajectory_groups,
        "sample": received.steps.samples[begins],
        "steps": lengths,
        "response": np.add.reduceat(received.steps.response_lengths, begins) if len(begins) else lengths,
        "behind": numbers.behind,
    }
    columns = {name: values.astype(np.int32) for name, values in columns.items()}
    rewards = np.add.reduceat(received.steps.rewards, begins) if len(begins) else numbers.scores
    return columns | {"score": numbers.scores, "reward": rewards}


def _masked(plan: Plan) -> NDArray[np.uint8]:
    """Returns whether filters mask some or all steps of each trajectory."""
    bounds = plan.numbers.received.trajectory_bounds
    masked = np.diff(np.append(0, np.cumsum(~plan.trained))[bounds])
    flags: NDArray[np.uint8] = (MASKED * (masked > 0) + ALL_MASKED * (masked == np.diff(bounds))).astype(np.uint8)
    return flags


def _zero_variance(numbers: Numbers) -> NDArray[np.bool_]:
    """Returns whether each group has several trajectories, and none of those that are compared differ; (groups,)."""
    received = numbers.received
    differ = np.zeros(len(received.groups), np.bool_)
    if len(numbers.scores):
        is_different = received.compared.differ(numbers.scores)[received.compared.numbers]
        differ[received.trajectory_groups[is_different]] = True
    zero: NDArray[np.bool_] = (np.diff(received.group_bounds) > 1) & ~differ
    return zero


def _advantages(plan: Plan, received: Received, config: RunConfig) -> tuple[Float64s, NDArray[np.bool_], bool]:
    """Returns the advantage of each trajectory, whether one of its advantages is not 0, and whether it is the mean over
    trained tokens."""
    credit, rows, count = plan.credit, plan.numbers.rows, len(plan.numbers.scores)
    if credit is None:
        return np.full(count, np.nan), np.zeros(count, np.bool_), False
    sent = received.steps.token_advantages
    if credit.of_tokens is not None:
        values, row_of_token = token_advantages(credit.of_tokens, plan, plan.policy, config)
        return *_means(values, rows.trajectories[row_of_token], np.ones(len(values)), count), True
    if sent is not None:
        tokens = trained_tokens(received, plan.trained, kept_tokens(rows, len(plan.trained)).most)
        owners = np.repeat(np.arange(count), np.diff(tokens.bounds))
        return *_means(tokens.take(sent), owners, np.ones(len(tokens)), count), True
    if config.whiten != "mini_batch":
        return credit.advantages, credit.advantages != 0, False
    of_rows = row_advantages(credit.advantages, plan, plan.policy, config)
    return *_means(of_rows, rows.trajectories, plan.loss_tokens, count), False


def _means(values: Float64s, owners: Int64s, weights: NDArray[Any], count: int) -> tuple[Float64s, NDArray[np.bool_]]:
    """Returns the weighted mean of each owner's values; that of equal values is exactly theirs; and whether one of them
    is not 0."""
    first = np.zeros(count)
    first[owners[::-1]] = values[::-1]
    totals = np.bincount(owners, weights, count)
    shifts = np.bincount(owners, weights * (values - first[owners]), count)
    return first + shifts / np.maximum(totals, 1), np.bincount(owners, values != 0, count) > 0


def _means_by_name(plan: Plan) -> dict[str, tuple[int, float]]:
    """Returns the mean score of each agent, the mean of each component of rewards, and the running baselines after the
    batch, each as a number of terms and their sum, under their names in the plan's metrics."""
    terms: dict[str, list[float]] = {}
    received = plan.numbers.received
    for agent, score in zip(received.agents or (), plan.numbers.scores.tolist(), strict=False):
        terms.setdefault(f"agents/{agent or 'none'}/score_mean", []).append(score)
    for components in received.components or ():
        for name, number in components.items():
            terms.setdefault(f"components/{name}/mean", []).append(number)
    after = {} if plan.credit is None else plan.credit.baselines
    for (tag, agent), baseline in sorted(after.items())[:_MOST_MEANS]:
        terms[f"baselines/{tag or 'none'}/{agent or 'none'}"] = [baseline]
    return {name: (len(numbers), math.fsum(numbers)) for name, numbers in terms.items()}


def _breaks(numbers: Numbers) -> tuple[list[str], Columns]:
    """Returns the names of columns that break, and the breaks. Of those that are not examined, only the step is
    known."""
    breaks: Breaks = numbers.breaks
    received, count = numbers.received, len(breaks.steps)
    trajectories = received.trajectory_of_step[breaks.steps]
    columns = sorted({one.column for one in breaks.mismatches if one.column})
    against, index, column = (np.full(count, NONE, np.int32) for _ in range(3))
    cause = np.full(count, len(CAUSES) - 1, np.int8)
    places = np.searchsorted(breaks.steps, breaks.examined)
    for place, one in zip(places.tolist(), breaks.mismatches, strict=True):
        against[place], index[place], cause[place] = one.before, one.index, CAUSES.index(one.cause)
        column[place] = columns.index(one.column) if one.column else NONE
    steps = received.steps.steps[breaks.steps]
    return columns, {
        "trajectory": trajectories.astype(np.int32),
        "index": index,
        "step": _small(steps),
        "against": _small(against),
        "cause": cause,
        "column": _small(column),
    }


def _numbered(texts: Sequence[str] | None, count: int) -> tuple[list[str], NDArray[Any]]:
    """Returns the different texts, and the number of each; `[""]` and zeros without texts."""
    if texts is None:
        return [""], np.zeros(count, np.int16)
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return [*numbers], _small(np.fromiter(map(numbers.__getitem__, texts), np.int64, count), np.int16)


def _stop_reasons(received: Received) -> tuple[list[str], NDArray[np.uint8]]:
    """Returns the most frequent stop reasons of last steps, then "others", and the number of each trajectory's."""
    last = [received.steps.stop_reasons[step] for step in (received.trajectory_bounds[1:] - 1).tolist()]
    known = [text for text, _ in Counter(last).most_common(_MOST_REASONS)]
    numbers = {text: number for number, text in enumerate(known)}
    of_trajectories = np.fromiter((numbers.get(text, len(known)) for text in last), np.uint8, len(last))
    return [*known, "others"], of_trajectories


def _small(values: NDArray[Any], least: Any = np.int8) -> NDArray[Any]:
    """Returns the integers in the smallest type from `least` on that has room for them all."""
    for dtype in (np.int8, np.int16, np.int32):
        is_allowed = np.dtype(dtype).itemsize >= np.dtype(least).itemsize
        if is_allowed and (not len(values) or values.max() <= np.iinfo(dtype).max):
            return values.astype(dtype)
    return values.astype(np.int64)
