"""`gristmill runs` creates, lists, shows and deletes runs. Heavy modules are imported when a command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gristmill.errors import InvalidArgumentError
from gristmill_service.cli.options import ADDRESS, AddressOption, JsonOption
from gristmill_service.cli.terminal import early_ends, printable, screen

_runs = typer.Typer(no_args_is_help=True, help="Create, list, show and delete runs.")
_OWNER = "gristmill runs"

RunArgument = Annotated[str, typer.Argument(help="The run.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(_runs, name="runs")


@_runs.callback()
def about() -> None:
    """Create, list, show and delete runs.

    Exit status 1: the service refused the call; the reason is on standard error. 2: the service is unreachable.
    """


@_runs.command("create")
def create(
    run: RunArgument,
    config: Annotated[
        Path,
        typer.Option(
            "--config", metavar="CONFIG", help="A file with the run's settings, YAML or JSON.", show_default=False
        ),
    ],
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Create a run with the settings in CONFIG.

    If the run exists with the same settings, nothing changes. If it exists with other settings, the command fails.

    Example: gristmill runs create my-run --config run.yaml
    """
    from gristmill_service.cli.watch.service_client import connect
    from gristmill_service.config import read_config

    with early_ends():
        settings = read_config(config).model_dump_json(exclude_defaults=True)
        with connect(address, _OWNER) as client:
            answer = client.create(run, settings)
    for warning in answer.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps({"run": run, "created": answer.created, "warnings": list(answer.warnings)}))
    else:
        print(f"run {run!r} created" if answer.created else f"run {run!r} already exists with these settings")


@_runs.command("list")
def list_runs(address: AddressOption = ADDRESS, as_json: JsonOption = False) -> None:
    """List all runs with their states and the reasons for these.

    Example: gristmill runs list --json | jq -r '.runs[] | select(.state == "finished").run'
    """
    from rich.table import Table
    from rich.text import Text

    from gristmill_service.cli.watch.service_client import connect

    with early_ends():
        with connect(address, _OWNER) as client:
            runs = client.snapshot().runs
        if as_json:
            listed = [{"run": run.name, "state": run.health.state, "summary": run.health.summary} for run in runs]
            print(json.dumps({"runs": listed}))
            return
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("run", "state", "reason"):
            table.add_column(name, overflow="fold")
        for run in runs:
            table.add_row(*map(Text, (printable(run.name), run.health.state, printable(run.health.summary))))
        screen().print(table if runs else "no runs")


@_runs.command("show")
def show(run: RunArgument, address: AddressOption = ADDRESS, as_json: JsonOption = False) -> None:
    """Show the details of a run: its state, what blocks it, its counts, and its settings.

    Example: gristmill runs show my-run --json | jq .config
    """
    import yaml
    from rich.text import Text

    from gristmill_service.cli.watch.printed import details, snapshot_document
    from gristmill_service.cli.watch.service_client import connect

    with early_ends():
        with connect(address, _OWNER) as client:
            snapshot = client.snapshot(run)
        if as_json:
            print(json.dumps(snapshot_document(snapshot)["runs"][0]))
            return
        output = screen()
        output.print(details(snapshot))
        if (status := snapshot.runs[0].status) is not None:
            settings = yaml.safe_dump(json.loads(status.config_json), sort_keys=False, allow_unicode=True)
            output.print(Text("settings", "bold"), *map(printable, settings.splitlines()), sep="\n  ", markup=False)


@_runs.command("delete")
def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    address: AddressOption = ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Delete a run with its rows, plans, shards and state. This cannot be undone.

    Asks for confirmation on a terminal; without a terminal, --yes is required. Waiting calls for the run end with
    NOT_FOUND.

    Example: gristmill runs delete my-run --yes
    """
    from gristmill_service.cli.watch.service_client import connect

    with early_ends():
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidArgumentError(f"run {run!r} would be deleted with rows and shards; pass --yes to confirm")
            typer.confirm(f"Delete run {run!r} at {address} with its rows and shards?", abort=True, err=True)
        with connect(address, _OWNER) as client:
            client.delete(run)
    print(json.dumps({"run": run, "deleted": True}) if as_json else f"run {run!r} deleted")
