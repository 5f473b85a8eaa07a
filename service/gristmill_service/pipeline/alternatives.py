"""What a batch would cost under other settings: computed from its own rows, not estimated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import build_batch, plan_batch
from gristmill_service.pipeline.plan_document import PlanDocument


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What training a batch's policy mini-batches once costs.

    rows: trained, without padding rows. padding_rows: those that make counts even. tokens: that go through the model,
    padding included; None where the rows have lengths alone. padding_share: the padding's part of these, 0 to 1; None
    too. barrier_ratio: the load of the slowest rank of each micro-step, by the mean load; 1 where no rank waits.
    """

    rows: int
    padding_rows: int
    tokens: int | None
    padding_share: float | None
    barrier_ratio: float


def costs(steps: Steps, config: RunConfig) -> Iterator[tuple[str, BatchCost]]:
    """The batch's cost as it is configured, under the name "", and then with each setting that might make it cheaper.

    Settings are named as a configuration has them, as `layout: packed`, and only one differs at a time. What the other
    settings or the rows do not allow is left out, and so is what changes nothing. Plans the batch once for each.
    """
    now = _cost(steps, config)
    yield "", now
    for name, value in _candidates(config):
        try:
            found = _cost(steps, _changed(config, name, value))
        except InvalidArgumentError:
            continue
        if found != now:
            yield f"{name}: {value}", found


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
    if len(steps) and not steps.tokens.values.size:
        return _told(plan_batch(steps, config, batch=0))
    return _told(build_batch(steps, config, run="", batch=0).plan)


def _told(plan: PlanDocument) -> BatchCost:
    figures, policy = plan.metrics, [part for part in plan.mini_batches if part.model == "policy"]
    padding = figures.get("padding_tokens")
    return BatchCost(
        rows=sum(part.rows for part in policy),
        padding_rows=int(figures["padding_rows"]),
        tokens=None if padding is None else int(padding + figures.get("distinct_tokens", figures["tokens"])),
        padding_share=None if padding is None else float(figures["padding_share"]),
        barrier_ratio=float(figures["barrier_ratio"]),
    )
