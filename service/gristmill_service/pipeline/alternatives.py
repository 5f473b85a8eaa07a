"""Computes the cost of a batch with other settings, exactly, from its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import build_batch, plan_batch


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of training a batch's policy mini-batches once.

    rows: trained rows, without padding rows. padding_rows: rows added for alignment. tokens: all tokens that the model
    computes, including padding; None if rows have only lengths. padding_share: the share of padding in `tokens`, 0 to
    1, or None. barrier_ratio: the load of each micro-step's slowest rank, divided by the mean load; 1 if no rank waits.
    """

    rows: int
    padding_rows: int
    tokens: int | None
    padding_share: float | None
    barrier_ratio: float


def costs(steps: Steps, config: RunConfig) -> Iterator[tuple[str, BatchCost]]:
    """Yields the batch's cost as configured, with the name "", and then with each setting that may reduce it.

    A name is the changed setting, such as `layout: packed`; only one setting differs at a time. Omits settings that
    conflict with others or with the rows, and settings that change nothing. Plans the batch once per setting.
    """
    now = _cost(steps, config)
    yield "", now
    for name, value in _candidates(config):
        try:
            cost = _cost(steps, _changed(config, name, value))
        except InvalidArgumentError:
            continue
        if cost != now:
            yield f"{name}: {value}", cost


def _candidates(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not config.merging.joins and config.step_wise:
        yield "merge", "prefix"
    if config.balance == "none":
        yield "balance", "tokens" if config.flops is None else "flops"
    if config.layout == "left_padded":
        if config.pad_width != "micro_batch":
            yield "pad_width", "micro_batch"
        yield "layout", "packed"
    if config.layout != "prefix_tree":
        yield "layout", "prefix_tree"


def _changed(config: RunConfig, name: str, value: str) -> RunConfig:
    return parse_config(json.loads(config.model_dump_json(exclude_defaults=True)) | {name: value})


def _cost(steps: Steps, config: RunConfig) -> BatchCost:
    has_lengths_only = len(steps) > 0 and not steps.tokens.values.size
    plan = plan_batch(steps, config, batch=0) if has_lengths_only else build_batch(steps, config, run="", batch=0).plan
    figures, policy = plan.metrics, [part for part in plan.mini_batches if part.model == "policy"]
    padding = figures.get("padding_tokens")
    return BatchCost(
        rows=sum(part.rows for part in policy),
        padding_rows=int(figures["padding_rows"]),
        tokens=None if padding is None else int(padding + figures.get("distinct_tokens", figures["tokens"])),
        padding_share=None if padding is None else float(figures["padding_share"]),
        barrier_ratio=float(figures["barrier_ratio"]),
    )
