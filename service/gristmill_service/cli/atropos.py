"""`gristmill atropos`: the routes that Atropos' environments call. What they need is imported when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gristmill.errors import GristmillError
from gristmill_service.cli.options import AddressOption

CANNOT_START = 2


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("atropos")(atropos)


def atropos(
    run: Annotated[str, typer.Option(help="The run that they feed; environments wait until it is created.")],
    address: AddressOption = "127.0.0.1:50051",
    host: Annotated[str, typer.Option(help="Where environments find the routes.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    wandb_project: Annotated[str | None, typer.Option(help="Where they log, if they do. [default: the run]")] = None,
    wandb_group: Annotated[str | None, typer.Option(help="Under this group. [default: the run]")] = None,
    checkpoint_dir: Annotated[str, typer.Option(help="Where they keep their own state.")] = "",
    checkpoint_interval: Annotated[int, typer.Option(help="Each how many batches; -1: never.")] = -1,
    num_steps: Annotated[int, typer.Option(help="For how many batches those run that are told -1 themselves.")] = -1,
) -> None:
    """Let environments of Atropos feed a run.

    They call the HTTP routes of Atropos' own server (rollout_server_url), which are served here, in a process beside
    the service; trainers use gristmill's TrainerClient. What an environment posts and the run cannot take is refused,
    and logged with the remedy.

    It listens on this machine only unless --host says otherwise; it asks nobody who they are. SIGTERM or Ctrl-C answers
    what is being asked and exits with 0. Exit status 2: the address is taken.
    """
    from gristmill.environments.atropos.routes import TrainerFacts
    from gristmill.environments.atropos.server import serve
    from gristmill_service.logs import configure_logs

    configure_logs("info", "human")
    facts = TrainerFacts(wandb_project or run, wandb_group or run, checkpoint_dir, checkpoint_interval, num_steps)
    try:
        serve(address, run, host, port, facts)
    except GristmillError as error:
        print(f"gristmill atropos: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_START) from None
