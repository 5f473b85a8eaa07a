"""`gristmill tail`: what happens in a run, a line each, from look to look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from gristmill.errors import GristmillError, NotFoundError
from gristmill.v1 import run_pb2
from gristmill_service.cli.watch.changes import Happening, happenings, told
from gristmill_service.cli.watch.health import is_done
from gristmill_service.cli.watch.snapshot import CANNOT_BE_REACHED, Looker, looking, why


def show_tail(address: str, run: str, interval_s: float, *, as_json: bool) -> None:
    """Returns when the run is done, or gone. Raises as `Looker.look` does where the first look fails."""
    with looking(address, "gristmill tail") as looker:
        for happening in _follow(looker, run, lambda: time.sleep(interval_s)):
            print(_line(run, happening, as_json=as_json), flush=True)


def _follow(looker: Looker, run: str, pause: Callable[[], None]) -> Iterator[Happening]:
    before, is_away = looker.status(run), False
    yield _beginning(before)
    while not is_done(before):
        pause()
        try:
            after = looker.status(run)
        except NotFoundError:
            yield {"event": "gone", "reason": "the run was deleted, or a service that keeps nothing has started again"}
            return
        except CANNOT_BE_REACHED as error:
            if not is_away:
                yield {"event": "unreachable", "reason": why(error)}
            is_away = True
            continue
        if is_away:
            yield {"event": "reached again"}
        is_away = False
        yield from happenings(before, after, lambda: _groups(looker, run))
        before = after
    yield {"event": "done"}


def _beginning(status: run_pb2.RunStatus) -> Happening:
    counts = ("batches_sealed", "batches_published", "batches_freed", "groups_open", "groups_complete")
    return {"event": "following", **{name: getattr(status, name) for name in counts}}


def _groups(looker: Looker, run: str) -> Sequence[run_pb2.GroupStatus]:
    """Nothing where the service went away just now: that they were dropped is told all the same."""
    with suppress(GristmillError):
        return looker.groups(run)
    return ()


def _line(run: str, happening: Happening, *, as_json: bool) -> str:
    now = datetime.now(UTC)
    if as_json:
        return json.dumps({"time": now.isoformat(timespec="milliseconds"), "run": run, **happening})
    return f"{now.astimezone():%H:%M:%S} {told(happening)}"
