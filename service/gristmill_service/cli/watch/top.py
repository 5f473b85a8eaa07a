"""`gristmill top`: looks, one after another, on a screen of their own."""

from __future__ import annotations

import json
import sys
import time
from collections import deque

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gristmill.errors import GristmillError
from gristmill_service.cli.watch.health import healths
from gristmill_service.cli.watch.json_documents import look_document
from gristmill_service.cli.watch.keyboard import keys
from gristmill_service.cli.watch.render import overview
from gristmill_service.cli.watch.snapshot import CANNOT_BE_REACHED, Look, Looker, looking, why
from gristmill_service.cli.watch.status import console

# Rates are over so many looks, and a run in which nothing moved for so long is shown as stuck.
_RATED_LOOKS = 10
_STUCK_S = 120.0


def show_top(address: str, interval_s: float, *, as_json: bool) -> None:
    """Returns when q is pressed. Raises as `Looker.look` does where the first look fails; later ones may."""
    with looking(address, "gristmill top") as looker:
        seen = _Seen()
        seen.add(looker.look())
        if not sys.stdout.isatty():
            _print(seen, as_json=as_json)
        elif as_json:
            _print_on(seen, looker, interval_s)
        else:
            _watch(seen, looker, interval_s)


class _Seen:
    """The last looks, and of each run the look since which nothing moved."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=_RATED_LOOKS)
        self._unmoved: dict[str, tuple[bytes, float]] = {}

    @property
    def last(self) -> Look:
        return self._looks[-1]

    def add(self, look: Look) -> None:
        self._looks.append(look)
        was, self._unmoved = self._unmoved, {}
        for run in look.runs:
            now = b"" if run.status is None else run.status.SerializeToString(deterministic=True)
            before, since = was.get(run.run, (now, look.at))
            self._unmoved[run.run] = (now, since if before == now else look.at)

    def before(self) -> Look | None:
        """The last look as if it were as old as what is too old; only of runs in which nothing moved for so long."""
        last = self.last
        still = [run for run in last.runs if last.at - self._unmoved[run.run][1] >= _STUCK_S]
        return Look(last.at - _STUCK_S, last.replicas, still) if still else None

    def rates(self) -> dict[str, float]:
        """Rows a second, of each run."""
        first, last = self._looks[0], self.last
        if last.at <= first.at:
            return {}
        counts = {run.run: run.status.rows_accepted for run in first.runs if run.status is not None}
        return {
            run.run: max(0, run.status.rows_accepted - counts[run.run]) / (last.at - first.at)
            for run in last.runs
            if run.status is not None and run.run in counts
        }


def _print(seen: _Seen, *, as_json: bool) -> None:
    found = healths(seen.last)
    if as_json:
        print(json.dumps(look_document(seen.last, found)), flush=True)
    else:
        console().print(overview(seen.last, found))


def _print_on(seen: _Seen, looker: Looker, interval_s: float) -> None:
    while True:
        _print(seen, as_json=True)
        time.sleep(interval_s)
        seen.add(looker.look())


def _watch(seen: _Seen, looker: Looker, interval_s: float) -> None:
    with keys() as pressed, Live(_screen(seen, ""), console=console(), screen=True, auto_refresh=False) as live:
        while pressed(interval_s) not in ("q", "Q"):
            away = ""
            try:
                seen.add(looker.look())
            except CANNOT_BE_REACHED as error:
                away = why(error)
            except GristmillError as error:
                away = f"refused: {error}"
            live.update(_screen(seen, away), refresh=True)


def _screen(seen: _Seen, away: str) -> RenderableType:
    """away: why what is shown is old."""
    head = Text.assemble((away, "bold red"), "\n") if away else Text(time.strftime("%H:%M:%S   q ends"), "dim")
    return Group(head, overview(seen.last, healths(seen.last, seen.before()), seen.rates()))
