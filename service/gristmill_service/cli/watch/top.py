"""`gristmill top` shows snapshots of a service on a full screen."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.text import Text

from gristmill.errors import GristmillError
from gristmill_service.cli.terminal import reason_of, screen
from gristmill_service.cli.watch.printed import overview, snapshot_document
from gristmill_service.cli.watch.service_client import CANNOT_BE_REACHED, ServiceClient, Snapshot, connect

# Rates are computed over this many snapshots.
_RATED = 10


def show_top(address: str, interval_s: float, *, as_json: bool) -> None:
    """Shows snapshots until q is pressed. Raises like `ServiceClient.snapshot` if the first one fails."""
    with connect(address, "gristmill top") as client:
        snapshot = client.snapshot()
        if not as_json and sys.stdout.isatty():
            _watch(deque([snapshot], maxlen=_RATED), client, interval_s)
            return
        if not as_json:
            screen().print(overview(snapshot))
            return
        print(json.dumps(snapshot_document(snapshot)), flush=True)
        while sys.stdout.isatty():
            time.sleep(interval_s)
            print(json.dumps(snapshot_document(client.snapshot())), flush=True)


def _watch(recent: deque[Snapshot], client: ServiceClient, interval_s: float) -> None:
    stale_reason = ""
    with _keys() as pressed, Live(console=screen(), screen=True, auto_refresh=False) as live:
        while True:
            title = time.strftime("%H:%M:%S   press q to quit")
            head = Text(stale_reason, "bold red") if stale_reason else Text(title, "dim")
            live.update(Group(head, overview(recent[-1], _rates(recent))), refresh=True)
            if pressed(interval_s) in ("q", "Q"):
                return
            stale_reason = ""
            try:
                recent.append(client.snapshot())
            except CANNOT_BE_REACHED as error:
                stale_reason = reason_of(error)
            except GristmillError as error:
                stale_reason = f"refused: {error}"


def _rates(recent: deque[Snapshot]) -> dict[str, float]:
    """Returns each run's rows per second, averaged over the snapshots."""
    first, last = recent[0], recent[-1]
    if last.at <= first.at:
        return {}
    counts = {run.name: run.status.rows_accepted for run in first.runs if run.status is not None}
    return {
        run.name: max(0, run.status.rows_accepted - counts[run.name]) / (last.at - first.at)
        for run in last.runs
        if run.status is not None and run.name in counts
    }


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits at most n seconds for a key, and returns the key or an empty string. Ctrl-C still
    interrupts. Without a terminal on standard input, the function only waits."""
    terminals = [0] if os.isatty(0) else []

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select(terminals, [], [], seconds)
        return os.read(0, 1).decode(errors="replace") if ready else ""

    before = [termios.tcgetattr(terminal) for terminal in terminals]
    try:
        for terminal in terminals:
            tty.setcbreak(terminal)
        yield pressed
    finally:
        for terminal, attributes in zip(terminals, before, strict=True):
            termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
