"""`gristmill plan` with several configurations: what the batches become with each, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from gristmill_service.cli.terminal import FittingTable, messages, printable, screen
from gristmill_service.pipeline.outcome import Outcome


class Compared(NamedTuple):
    """A configuration's file, and the outcome, or the reason why the configuration or the rows are refused."""

    config: str
    outcome: Outcome | None
    reason: str = ""


def print_comparison(every: Sequence[Compared], as_json: bool) -> None:
    """Prints a column for each configuration, and the reasons on standard error."""
    numbers = [None if one.outcome is None else one.outcome.figures for one in every]
    if as_json:
        pairs = zip(every, numbers, strict=True)
        documents = [{"config": one.config, **(figures or {}), "reason": one.reason} for one, figures in pairs]
        print(json.dumps({"configurations": documents}))
    else:
        table = Table("", box=None, header_style="bold")
        for one in every:
            table.add_column(Text(printable(one.config)), justify="right")
        for label, (name, text) in _LINES.items():
            table.add_row(label, *(_cell(figures, name, text) for figures in numbers))
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


_LINES = {
    "steps": ("steps", "{:,}"),
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
