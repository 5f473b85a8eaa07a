"""What commands that ask a running service share: where it is, how they answer programs, and their exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from gristmill.errors import DeadlineExceededError, GristmillError, UnavailableError
from gristmill_service.cli.refusal_exit import leave_pipe

NEEDS_PERSON, UNREACHABLE = 1, 2
ADDRESS = "127.0.0.1:50051"

AddressOption = Annotated[
    str,
    typer.Option(
        envvar="GRISTMILL_ADDRESS",
        help="The service, or any of its replicas: HOST:PORT or unix:/PATH, several with commas between.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@contextmanager
def early_ends() -> Iterator[None]:
    """Turns what ends a command early into its exit status. Ctrl-C is how a person ends one that goes on: 0."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except BrokenPipeError:
        leave_pipe()
        raise typer.Exit(0) from None
    except (UnavailableError, DeadlineExceededError) as error:
        from gristmill_service.cli.watch.snapshot import reason_of

        print(f"unreachable: {reason_of(error)}", file=sys.stderr)
        raise typer.Exit(UNREACHABLE) from None
    except GristmillError as error:
        print(f"refused: {error}", file=sys.stderr)
        raise typer.Exit(NEEDS_PERSON) from None
