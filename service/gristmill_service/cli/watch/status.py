"""`gristmill status`: one snapshot of a service."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from gristmill_service.cli.watch.json_documents import snapshot_document
from gristmill_service.cli.watch.render import details, overview
from gristmill_service.cli.watch.reported_health import healths_of, needs_person
from gristmill_service.cli.watch.snapshot import connect

# Wide enough that a pipe or a log gets every column whole.
_PIPE_WIDTH = 140


def show_status(address: str, run: str | None, stuck_after_s: float, *, as_json: bool) -> bool:
    """Prints it. Returns whether all is well.

    Raises UnavailableError or DeadlineExceededError where nobody answers, NotFoundError for a run that there is not.
    """
    with connect(address, "gristmill status") as client:
        snapshot = client.snapshot(run)
    healths = healths_of(snapshot, stuck_after_s)
    if as_json:
        print(json.dumps(snapshot_document(snapshot, healths)))
    else:
        console().print(overview(snapshot, healths) if run is None else details(snapshot, healths[0]))
    return not needs_person(snapshot, healths)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
