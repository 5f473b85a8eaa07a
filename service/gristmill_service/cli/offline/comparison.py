"""`gristmill plan` with several configurations: what the batches become with each, as a table or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from operator import add
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from gristmill._wire.batch_table import HAS_ADVANTAGE, BatchTable
from gristmill_service.cli.terminal import FittingTable, messages, printable, screen
from gristmill_service.pipeline.figures import causes_of
from gristmill_service.pipeline.plan_document import PlanDocument

Numbers = Mapping[str, Any]
"""What batches become, by the names of `_LINES`; None for what is unknown."""


class Compared(NamedTuple):
    """A configuration's file, and the numbers, or the reason why the configuration or the rows are refused."""

    config: str
    numbers: Numbers | None
    reason: str = ""


def numbers_of(plans: Iterable[tuple[PlanDocument, BatchTable]]) -> Numbers:
    """Returns the sums of the tables of batches that follow one another: of the policy's mini-batches, each trained
    once, but `steps` in all epochs.

    micro_batches: those of each rank. groups: those with trained rows; zero_share: the share of these whose trained
    tokens all have advantage 0. tokens: all that the model computes, with padding. The advantages
    are those of trained tokens, without the factor of `loss_reduction`; where credit is per token, the mean of each
    trajectory stands for its tokens.
    """
    total, breaks, is_known = _Sums(), Counter[str](), True
    for document, table in plans:
        one = _sums(document, table)
        total = _Sums(*map(add, total, one))._replace(largest=max(total.largest, one.largest))
        breaks.update(causes_of(table))
        is_known = is_known and table.facts["has_tokens"] and not isnan(one.advantages)
    mean = total.advantages / max(1, total.loss_tokens)
    counts = {
        name: getattr(total, name) for name in ("steps", "micro_batches", "groups", "rows", "padding_rows", "tokens")
    }
    numbers = {
        **counts,
        "padding_share": total.padding_tokens / max(1, total.tokens),
        "loss_tokens": total.loss_tokens,
        "barrier_ratio": total.slowest / total.tokens if total.tokens else 1.0,
        "breaks": dict(breaks),
        "zero_share": total.zero_groups / max(1, total.groups),
        "advantage_mean": mean,
        "advantage_std": max(0.0, total.squares / max(1, total.loss_tokens) - mean * mean) ** 0.5,
        "advantage_largest": total.largest,
    }
    return numbers if is_known else numbers | dict.fromkeys(_ADVANTAGES)


class _Sums(NamedTuple):
    steps: int = 0
    micro_batches: int = 0
    groups: int = 0
    rows: int = 0
    padding_rows: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    loss_tokens: int = 0
    slowest: float = 0.0
    zero_groups: int = 0
    advantages: float = 0.0
    squares: float = 0.0
    largest: float = 0.0


def _sums(document: PlanDocument, table: BatchTable) -> _Sums:
    metrics, rows = document.metrics, table.rows
    kept = rows["policy.rank"] >= 0
    owners, trained = rows["trajectory"][kept], rows["trained"][kept].astype(np.int64)
    groups, values = table.trajectories["group"], table.trajectories["advantage"][owners]
    has_advantage = (table.trajectories["flags"] & HAS_ADVANTAGE) > 0
    elements = table.facts["elements"]
    counted = trained > 0
    values, weights = values[counted], trained[counted]
    return _Sums(
        steps=document.optimizer_steps,
        micro_batches=sum(one.micro_batches_per_rank for one in document.mini_batches if one.model == "policy"),
        groups=len(np.unique(groups[owners])),
        rows=len(owners),
        padding_rows=table.facts["padding_rows"],
        tokens=elements,
        padding_tokens=int(metrics["padding_tokens"]),
        loss_tokens=int(trained.sum()),
        slowest=metrics["barrier_ratio"] * elements,
        zero_groups=len(np.unique(groups[owners]))
        - len(np.unique(groups[owners[counted]][has_advantage[owners[counted]]])),
        advantages=float(weights @ values),
        squares=float(weights @ (values * values)),
        largest=float(np.abs(values).max(initial=0)),
    )


def print_comparison(every: Sequence[Compared], as_json: bool) -> None:
    """Prints a column for each configuration, and the reasons on standard error."""
    if as_json:
        documents = [{"config": one.config, **(one.numbers or {}), "reason": one.reason} for one in every]
        print(json.dumps({"configurations": documents}))
    else:
        table = Table("", box=None, header_style="bold")
        for one in every:
            table.add_column(Text(printable(one.config)), justify="right")
        for label, (name, text) in _LINES.items():
            table.add_row(label, *(_cell(one.numbers, name, text) for one in every))
        screen(160).print(FittingTable(table))
    for one in every:
        if one.reason:
            messages.print(f"refused: {one.config}: {one.reason}", markup=False)


def _cell(figures: Mapping[str, Any] | None, name: str, text: str) -> str:
    value = None if figures is None else figures[name]
    if isinstance(value, dict):
        causes = ", ".join(f"{count:,} {cause}" for cause, count in value.items())
        return causes or "0"
    return "-" if value is None else text.format(value)


_ADVANTAGES = ("zero_share", "advantage_mean", "advantage_std", "advantage_largest")
_LINES = {
    "steps": ("steps", "{:,}"),
    "micro-batches": ("micro_batches", "{:,}"),
    "groups": ("groups", "{:,}"),
    "zero groups": ("zero_share", "{:.1%}"),
    "rows": ("rows", "{:,}"),
    "padding rows": ("padding_rows", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "padding share": ("padding_share", "{:.1%}"),
    "loss tokens": ("loss_tokens", "{:,}"),
    "slowest rank": ("barrier_ratio", "{:.2f} x mean"),
    "breaks": ("breaks", ""),
    "advantage": ("advantage_mean", "{:.3f}"),
    "std": ("advantage_std", "{:.3f}"),
    "largest": ("advantage_largest", "{:.3f}"),
}
"""The label of each line, its name in JSON, and its format."""
