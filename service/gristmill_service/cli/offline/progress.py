"""Bars on standard error while a command works; none where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from gristmill_service.cli.refusal_exit import messages

Advance = Callable[[int], None]


@contextmanager
def byte_bar(label: str, total: int | None) -> Iterator[Advance]:
    """Yields a function that advances the bar by bytes. total: None where it is not known."""
    with _bar(label, total, DownloadColumn()) as advance:
        yield advance


@contextmanager
def count_bar(label: str, total: int) -> Iterator[Advance]:
    """Yields a function that advances the bar by things done."""
    with _bar(label, total, MofNCompleteColumn()) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int | None, done: ProgressColumn) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
