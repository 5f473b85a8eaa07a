"""`gristmill status`: one look, or two with time between."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console

from gristmill_service.cli.watch import health
from gristmill_service.cli.watch.json_documents import look_document
from gristmill_service.cli.watch.render import details, overview
from gristmill_service.cli.watch.snapshot import looking

# Wide enough that a pipe or a log gets every column whole.
_PIPE_WIDTH = 140


def show_status(address: str, run: str | None, watched_s: float, *, as_json: bool) -> bool:
    """Prints it. Returns whether all is well.

    Raises UnavailableError or DeadlineExceededError where nobody answers, NotFoundError for a run that there is not.
    """
    with looking(address, "gristmill status") as looker:
        before = None
        if watched_s:
            before = looker.look(run)
            time.sleep(watched_s)
        look = looker.look(run)
    healths = health.healths(look, before)
    if as_json:
        print(json.dumps(look_document(look, healths)))
    else:
        console().print(overview(look, healths) if run is None else details(look, healths[0]))
    return not health.trouble(look, healths)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
