"""`gristmill tail`: the changes of a run, a line each, from one status to the next."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from gristmill.errors import GristmillError, NotFoundError
from gristmill.v1 import run_pb2
from gristmill_service.cli.watch.changes import Change, changes, sentence
from gristmill_service.cli.watch.snapshot import CANNOT_BE_REACHED, ServiceClient, connect, reason_of


def show_tail(address: str, run: str, interval_s: float, *, as_json: bool) -> None:
    """Returns when the run is done, or gone. Raises as `ServiceClient.status` does where the first call fails."""
    with connect(address, "gristmill tail") as client:
        for change in _follow(client, run, lambda: time.sleep(interval_s)):
            print(_line(run, change, as_json=as_json), flush=True)


def _follow(client: ServiceClient, run: str, pause: Callable[[], None]) -> Iterator[Change]:
    before, is_away = client.status(run), False
    yield _beginning(before)
    while not _is_done(before):
        pause()
        try:
            after = client.status(run)
        except NotFoundError:
            yield {"event": "gone", "reason": "the run was deleted, or a service that keeps nothing has started again"}
            return
        except CANNOT_BE_REACHED as error:
            if not is_away:
                yield {"event": "unreachable", "reason": reason_of(error)}
            is_away = True
            continue
        if is_away:
            yield {"event": "reached again"}
        is_away = False
        yield from changes(before, after, lambda: _groups(client, run))
        before = after
    yield {"event": "done"}


def _is_done(status: run_pb2.RunStatus) -> bool:
    """Returns whether nothing will happen any more, be it that the last batch could not be built."""
    waiting = status.groups_open + status.groups_complete
    return status.finished and not waiting and status.batches_freed == status.batches_sealed


def _beginning(status: run_pb2.RunStatus) -> Change:
    counts = ("batches_sealed", "batches_published", "batches_freed", "groups_open", "groups_complete")
    return {"event": "following", **{name: getattr(status, name) for name in counts}}


def _groups(client: ServiceClient, run: str) -> Sequence[run_pb2.GroupStatus]:
    """Nothing where the service went away just now: the drops are reported all the same."""
    with suppress(GristmillError):
        return client.groups(run)
    return ()


def _line(run: str, change: Change, *, as_json: bool) -> str:
    now = datetime.now(UTC)
    if as_json:
        return json.dumps({"time": now.isoformat(timespec="milliseconds"), "run": run, **change})
    return f"{now.astimezone():%H:%M:%S} {sentence(change)}"
