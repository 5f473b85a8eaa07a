"""`gristmill top`: snapshots, one after another, on a screen of their own."""

from __future__ import annotations

import json
import sys
import time
from collections import deque

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gristmill.errors import GristmillError
from gristmill_service.cli.watch.json_documents import snapshot_document
from gristmill_service.cli.watch.keyboard import keys
from gristmill_service.cli.watch.render import overview
from gristmill_service.cli.watch.reported_health import healths_of
from gristmill_service.cli.watch.snapshot import CANNOT_BE_REACHED, ServiceClient, Snapshot, connect, reason_of
from gristmill_service.cli.watch.status import console

# Rates are over so many snapshots.
_RATED = 10


def show_top(address: str, interval_s: float, *, as_json: bool) -> None:
    """Returns when q is pressed. Raises as `ServiceClient.snapshot` does where the first fails; later ones may."""
    with connect(address, "gristmill top") as client:
        recent = deque([client.snapshot()], maxlen=_RATED)
        if not sys.stdout.isatty():
            _print(recent[-1], as_json=as_json)
        elif as_json:
            _print_on(recent[-1], client, interval_s)
        else:
            _watch(recent, client, interval_s)


def _print(snapshot: Snapshot, *, as_json: bool) -> None:
    healths = healths_of(snapshot)
    if as_json:
        print(json.dumps(snapshot_document(snapshot, healths)), flush=True)
    else:
        console().print(overview(snapshot, healths))


def _print_on(snapshot: Snapshot, client: ServiceClient, interval_s: float) -> None:
    while True:
        _print(snapshot, as_json=True)
        time.sleep(interval_s)
        snapshot = client.snapshot()


def _watch(recent: deque[Snapshot], client: ServiceClient, interval_s: float) -> None:
    with keys() as pressed, Live(_screen(recent, ""), console=console(), screen=True, auto_refresh=False) as live:
        while pressed(interval_s) not in ("q", "Q"):
            stale_reason = ""
            try:
                recent.append(client.snapshot())
            except CANNOT_BE_REACHED as error:
                stale_reason = reason_of(error)
            except GristmillError as error:
                stale_reason = f"refused: {error}"
            live.update(_screen(recent, stale_reason), refresh=True)


def _screen(recent: deque[Snapshot], stale_reason: str) -> RenderableType:
    """stale_reason: why no newer snapshot is shown."""
    head = (
        Text.assemble((stale_reason, "bold red"), "\n")
        if stale_reason
        else Text(time.strftime("%H:%M:%S   q ends"), "dim")
    )
    return Group(head, overview(recent[-1], healths_of(recent[-1]), _rates(recent)))


def _rates(recent: deque[Snapshot]) -> dict[str, float]:
    """Rows a second of each run, over the snapshots."""
    first, last = recent[0], recent[-1]
    if last.at <= first.at:
        return {}
    counts = {run.run: run.status.rows_accepted for run in first.runs if run.status is not None}
    return {
        run.run: max(0, run.status.rows_accepted - counts[run.run]) / (last.at - first.at)
        for run in last.runs
        if run.status is not None and run.run in counts
    }
