"""Commands end a refusal with one clear message on standard error, and exit status 1."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from gristmill.errors import GristmillError

messages = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def refusals() -> Iterator[None]:
    """Ends the command at a refusal with one message and no traceback, and so at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        messages.print("stopped")
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        leave_pipe()
        raise typer.Exit(0) from None
    except GristmillError as error:
        messages.print(f"refused: {error}", markup=False)
        raise typer.Exit(1) from None
    except OSError as error:
        messages.print(f"failed: {error}", markup=False)
        raise typer.Exit(1) from None


def leave_pipe() -> None:
    """Whoever reads standard output has enough: what Python writes there at its end goes nowhere, and does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
