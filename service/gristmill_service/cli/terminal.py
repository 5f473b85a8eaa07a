"""Output and exit of commands: an error is one message on standard error and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from gristmill.errors import DeadlineExceededError, GristmillError, UnavailableError

NEEDS_PERSON, UNREACHABLE = 1, 2
_LEAST_COLUMNS, _UNLIMITED = 2, 1 << 16

messages = Console(stderr=True, highlight=False, soft_wrap=True)


def screen(pipe_width: int = 140) -> Console:
    """Returns a console on standard output. pipe_width: the width in a pipe or a log, where no column may be cut."""
    return Console(width=None if sys.stdout.isatty() else pipe_width, highlight=False)


class FittingTable:
    """A table that leaves out the last columns for which a terminal is too narrow, and names them. Otherwise Rich would
    shorten all columns, down to a letter of each run's name."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, left_out = self._table.columns, list[str]()
        unlimited = options.update(max_width=_UNLIMITED)
        while (
            console.is_terminal
            and len(columns) > _LEAST_COLUMNS
            and console.measure(self._table, options=unlimited).maximum > options.max_width
        ):
            left_out.insert(0, str(columns.pop().header))
        yield self._table
        if left_out:
            yield Text(f"a wider terminal also shows {', '.join(left_out)}", style="dim")


def printable(text: str) -> str:
    """Escapes control characters and line breaks, as in `\\x1b`, as uids and reasons may contain any."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def counted(number: int, one: str, many: str = "") -> str:
    """Returns "1 rank", "2 ranks" and so on. many: the plural, if it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def reason_of(error: GristmillError) -> str:
    """Returns the error's message without the client's details of attempts and the request."""
    return str(error).partition(" (gave up after ")[0].partition(" (request ")[0]


@contextmanager
def refusals() -> Iterator[None]:
    """Ends a command on files with one message, without a traceback, after an error or Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        messages.print("stopped")
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        _leave_pipe()
        raise typer.Exit(0) from None
    except GristmillError as error:
        messages.print(f"refused: {error}", markup=False)
        raise typer.Exit(1) from None
    except OSError as error:
        messages.print(f"failed: {error}", markup=False)
        raise typer.Exit(1) from None


@contextmanager
def early_ends() -> Iterator[None]:
    """Ends a command on a service with the exit status of its error, or with 0 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except BrokenPipeError:
        _leave_pipe()
        raise typer.Exit(0) from None
    except (UnavailableError, DeadlineExceededError) as error:
        print(f"unreachable: {reason_of(error)}", file=sys.stderr)
        raise typer.Exit(UNREACHABLE) from None
    except GristmillError as error:
        print(f"refused: {error}", file=sys.stderr)
        raise typer.Exit(NEEDS_PERSON) from None


def _leave_pipe() -> None:
    """Redirects standard output to the null device, so that Python's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
