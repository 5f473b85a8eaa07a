"""Commands end a refusal with one clear message on standard error, and exit status 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from gristmill.errors import GristmillError

messages = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def refusals() -> Iterator[None]:
    """Ends the command at a refusal with one message and no traceback."""
    try:
        yield
    except GristmillError as error:
        messages.print(f"refused: {error}", markup=False)
        raise typer.Exit(1) from None
    except OSError as error:
        messages.print(f"failed: {error}", markup=False)
        raise typer.Exit(1) from None
