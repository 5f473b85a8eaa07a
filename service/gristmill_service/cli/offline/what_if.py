"""`gristmill plan --what-if`: what batches become with other settings, as a table or JSON."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from gristmill_service.cli.terminal import printable, screen
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.alternatives import (
    Alternative,
    Changes,
    Sealed,
    changed,
    compared,
    effective,
    parse_changes,
    usual,
)

USUAL = "usual"

T = TypeVar("T")
R = TypeVar("R")

# Fewer rows are planned before a second process has started.
_MANY_ROWS = 100_000


def parse_what_if(texts: Sequence[str], config: RunConfig) -> list[Changes]:
    """Parses the values of `--what-if`, without `usual`. Raises InvalidArgumentError for settings that conflict."""
    alternatives = [parse_changes(text) for text in texts if text != USUAL]
    for changes in alternatives:
        changed(config, changes)
    return alternatives


def what_if(batches: Sequence[Sealed], config: RunConfig, texts: Sequence[str]) -> list[Alternative]:
    """Returns what the batches become as configured, and with each value of `--what-if`."""
    chosen = parse_what_if(texts, config)
    others = list(usual(config)) if USUAL in texts else []
    is_large = sum(len(batch.steps) for batch in batches) >= _MANY_ROWS
    own, *rest = compared(
        batches, config, [*chosen, *others], _in_two_processes if is_large and sys.platform == "linux" else map
    )
    return [own, *rest[: len(chosen)], *list(effective([own, *rest[len(chosen) :]]))[1:]]


def print_alternatives(alternatives: Sequence[Alternative], as_json: bool) -> None:
    """Prints a row for each alternative, and below the table the reasons for numbers that are missing."""
    if as_json:
        print(json.dumps({"alternatives": [alternative.figures for alternative in alternatives]}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("settings", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for alternative in alternatives:
        figures = alternative.figures
        cells = ("-" if figures[key] is None else shown.format(figures[key]) for key, shown in _COLUMNS.values())
        table.add_row(Text(printable(alternative.name or "as configured")), *cells)
    output = screen(160)
    output.print(table)
    for alternative in alternatives:
        if alternative.reason:
            output.print(
                f"{printable(alternative.name or 'as configured')}: {printable(alternative.reason)}", markup=False
            )


_COLUMNS = {
    "steps": ("steps", "{:,}"),
    "groups": ("groups", "{:,}"),
    "zero groups": ("zero_share", "{:.1%}"),
    "rows": ("rows", "{:,}"),
    "padding rows": ("padding_rows", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "padding": ("padding_share", "{:.1%}"),
    "loss tokens": ("loss_tokens", "{:,}"),
    "slowest rank": ("barrier_ratio", "{:.2f} x mean"),
    "advantage": ("advantage_mean", "{:.3f}"),
    "std": ("advantage_std", "{:.3f}"),
    "largest": ("advantage_largest", "{:.3f}"),
}
"""The header of each column, its name in JSON, and its format."""


def _in_two_processes(do: Callable[[T], R], tasks: Iterable[T]) -> Iterable[R]:
    """Performs the tasks in two forks of this process, because planning holds the GIL most of the time."""
    try:
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork"), _inherited.append, (do,)) as pool:
            return list(pool.map(_call, tasks))
    except BrokenExecutor:
        # The system lacks the memory for two.
        return map(do, tasks)


_inherited: list[Callable[..., Any]] = []
"""The function that a fork performs: a fork needs no copies of its rows."""


def _call(task: Any) -> Any:
    return _inherited[0](task)
