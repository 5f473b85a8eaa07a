"""The commands `gristmill status`, `top` and `tail`. Heavy modules are imported when a command runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gristmill_service.cli.options import ADDRESS, AddressOption, JsonOption
from gristmill_service.cli.terminal import NEEDS_PERSON, early_ends, screen


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command()(status)
    app.command()(top)
    app.command()(tail)


def status(
    run: Annotated[
        str | None, typer.Argument(help="Show this run in detail; by default all runs.", show_default=False)
    ] = None,
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
    stuck_after_s: Annotated[
        float,
        typer.Option(
            "--for",
            min=0.0,
            metavar="SECONDS",
            help="Also report a run as stuck after this number of seconds without an event.",
        ),
    ] = 0.0,
) -> None:
    """Show the service's runs and their states.

    Exit status 1: a run failed or is stuck, its owner or a replica is unreachable, a replica is not ready, or the run
    does not exist. 2: no replica is reachable. The states are those on the service's page and in its metrics; with
    --for, an unfinished run also counts as stuck after this number of seconds without an event.

    Example: gristmill status --for 300 --json | jq '.runs[].health'
    """
    from gristmill_service.cli.watch.printed import details, overview, snapshot_document
    from gristmill_service.cli.watch.service_client import connect

    with early_ends():
        with connect(address, "gristmill status") as client:
            snapshot = client.snapshot(run, stuck_after_s)
        if as_json:
            print(json.dumps(snapshot_document(snapshot)))
        else:
            screen().print(overview(snapshot) if run is None else details(snapshot))
    raise typer.Exit(NEEDS_PERSON if snapshot.needs_person else 0)


def top(
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Seconds between snapshots.")
    ] = 1.0,
) -> None:
    """Watch the service's runs until q or Ctrl-C is pressed.

    Without a terminal, prints one snapshot. With --json, prints one object per snapshot to a terminal.
    """
    from gristmill_service.cli.watch.top import show_top

    with early_ends():
        show_top(address, interval_s, as_json=as_json)


def tail(
    run: Annotated[str, typer.Argument(help="The run.", show_default=False)],
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="Seconds between snapshots.")
    ] = 0.5,
) -> None:
    """Print a run's events from now on, one per line, until the run is done or deleted, or Ctrl-C is pressed.

    Prints when batches are sealed, published, acknowledged, committed, freed or failed, which groups are dropped
    and why, and when the run is stuck. Continues after the service was unreachable, and reports that.

    Example: gristmill tail my-run --json | jq 'select(.event == "groups dropped")'
    """
    from gristmill_service.cli.watch.tail import show_tail

    with early_ends():
        show_tail(address, run, interval_s, as_json=as_json)
