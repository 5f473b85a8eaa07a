"""Assembles the command line from all commands."""

from __future__ import annotations

from typing import Annotated

import typer

import gristmill
from gristmill_service.cli import doctor, export, record, runs, serve, token
from gristmill_service.cli.offline import offline
from gristmill_service.cli.watch import commands as watching

app = typer.Typer(name="gristmill", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gristmill {gristmill.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = (False),
) -> None:
    """Rollouts of LLM reinforcement learning in, train-ready shards out."""


serve.register(app)
record.register(app)
offline.register(app)
export.register(app)
token.register(app)
runs.register(app)
watching.register(app)
doctor.register(app)
