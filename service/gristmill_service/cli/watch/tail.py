"""`gristmill tail` prints a run's events: the changes between consecutive statuses that the service reports."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from gristmill.errors import GristmillError, NotFoundError
from gristmill.v1 import run_pb2
from gristmill_service.cli.terminal import counted, printable, reason_of
from gristmill_service.cli.watch.printed import model_name, order, place, place_document
from gristmill_service.cli.watch.service_client import CANNOT_BE_REACHED, ServiceClient, connect

Change = dict[str, Any]
"""An event: its name under the key `event`, and its values."""

Groups = Callable[[], Sequence[run_pb2.GroupStatus]]


def show_tail(address: str, run: str, interval_s: float, *, as_json: bool) -> None:
    """Prints events until the run is done or deleted. If the first call fails, raises like `ServiceClient.status`."""
    with connect(address, "gristmill tail") as client:
        for change in _follow(client, run, lambda: time.sleep(interval_s)):
            now = datetime.now(UTC)
            if as_json:
                line = json.dumps({"time": now.isoformat(timespec="milliseconds"), "run": run, **change})
            else:
                line = f"{now.astimezone():%H:%M:%S} {sentence(change)}"
            print(line, flush=True)


def _follow(client: ServiceClient, run: str, pause: Callable[[], None]) -> Iterator[Change]:
    before, is_reached = client.status(run), True
    counts = ("batches_sealed", "batches_published", "batches_freed", "groups_open", "groups_complete")
    yield {"event": "following", **{name: getattr(before, name) for name in counts}}
    while not _is_done(before):
        pause()
        try:
            after = client.status(run)
        except NotFoundError:
            yield {"event": "gone", "reason": "the run was deleted, or a service without a journal restarted"}
            return
        except CANNOT_BE_REACHED as error:
            if is_reached:
                yield {"event": "unreachable", "reason": reason_of(error)}
            is_reached = False
            continue
        if not is_reached:
            yield {"event": "reached again"}
        is_reached = True
        yield from changes(before, after, lambda: _groups(client, run))
        before = after
    yield {"event": "done"}


def _is_done(status: run_pb2.RunStatus) -> bool:
    """Whether no event will follow, also if the last batch failed."""
    waiting = status.groups_open + status.groups_complete
    return status.finished and not waiting and status.batches_freed == status.batches_sealed


def _groups(client: ServiceClient, run: str) -> Sequence[run_pb2.GroupStatus]:
    """Returns the run's groups; none if the service is unreachable, because drops are then reported without uids."""
    with suppress(GristmillError):
        return client.groups(run)
    return ()


def changes(before: run_pb2.RunStatus, after: run_pb2.RunStatus, groups: Groups) -> Iterator[Change]:
    """Yields the changes in causal order. groups: called only if groups were dropped."""
    if after.batches_sealed < before.batches_sealed or after.rows_accepted < before.rows_accepted:
        # The run was deleted, or lost with its process, and then created again.
        yield {"event": "recreated"}
        before = run_pb2.RunStatus(run=after.run, policy_version=after.policy_version)
    if after.policy_version != before.policy_version:
        yield {"event": "policy version", "version": after.policy_version}
    yield from _dropped(before, after, groups)
    yield from _batches(before, after)
    yield from _trained(before, after)
    yield from ({"event": "freed", "batch": number} for number in range(before.batches_freed, after.batches_freed))
    if after.finished and not before.finished:
        yield {"event": "finished"}
    # A failed run has a separate event, for the failed batch.
    is_stuck, was_stuck = after.health.state == "stuck", before.health.state == "stuck"
    if is_stuck and not (was_stuck and before.health.summary == after.health.summary):
        yield {"event": "stuck", "reason": after.health.summary}
    elif was_stuck and not is_stuck:
        yield {"event": "unstuck", "reason": f"{after.health.state}: {after.health.summary}"}


def _dropped(before: run_pb2.RunStatus, after: run_pb2.RunStatus, groups: Groups) -> Iterator[Change]:
    more = {reason: count - before.groups_dropped.get(reason, 0) for reason, count in after.groups_dropped.items()}
    more = {reason: count for reason, count in sorted(more.items()) if count > 0}
    listed = groups() if more else ()
    for reason, count in more.items():
        # Groups are listed in the order in which they were dropped, so the last groups are new.
        names = [{"uid": one.uid, "round": one.round} for one in listed if one.reason == reason][-count:]
        yield {"event": "groups dropped", "reason": reason, "count": count, "groups": names}


def _batches(before: run_pb2.RunStatus, after: run_pb2.RunStatus) -> Iterator[Change]:
    for number in range(before.batches_sealed, after.batches_sealed):
        yield {"event": "sealed", "batch": number}
    for number in range(max(after.batches_published, after.batches_freed), before.batches_published):
        # A restarted service rebuilds the same batches, byte for byte.
        yield {"event": "rebuilt", "batch": number}
    for number, reason in sorted(after.failed_batches.items()):
        # The batch may have failed before, for another dp_size.
        if before.failed_batches.get(number) != reason:
            yield {"event": "failed", "batch": number, "reason": reason}
    for number in range(before.batches_published, after.batches_published):
        if number not in after.failed_batches:
            yield {"event": "published", "batch": number}


def _trained(before: run_pb2.RunStatus, after: run_pb2.RunStatus) -> Iterator[Change]:
    earlier = {model.model: model for model in before.models}
    for model in after.models:
        name, was = model_name(model.model), earlier.get(model.model, run_pb2.ModelProgress())
        is_at, was_at = (
            {rank.rank: rank.next for rank in status.ranks if rank.model == model.model} for status in (after, before)
        )
        if model.incarnation != was.incarnation:
            at = place_document(min(is_at.values(), key=order, default=model.committed))
            yield {"event": "resumed", "model": name, "incarnation": model.incarnation, "position": at}
        else:
            # Ranks at the same position share an event, because a trainer may have hundreds of ranks.
            moved: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
            for rank, position in sorted(is_at.items()):
                if position != was_at.get(rank, run_pb2.Position()):
                    moved[order(position)].append(rank)
            for _, ranks in sorted(moved.items()):
                at = place_document(is_at[ranks[0]])
                yield {"event": "acknowledged", "model": name, "ranks": ranks, "position": at}
        if model.committed != was.committed:
            yield {"event": "committed", "model": name, "position": place_document(model.committed)}


def sentence(change: Change) -> str:
    """Formats the change as a line for a terminal."""
    return printable(_sentence(change))


def _sentence(change: Change) -> str:
    event = change["event"]
    if event == "following":
        return "following: " + ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in change.items() if n != event)
    if event == "groups dropped":
        names = ", ".join(group["uid"] for group in change["groups"][:8])
        more = ", ..." if len(change["groups"]) > 8 else ""
        return f"{counted(change['count'], 'group')} dropped ({change['reason']}): {names}{more}"
    if "position" in change:
        at, model = place(run_pb2.Position(**change["position"])), change["model"]
        if event == "acknowledged":
            return f"acknowledged by {model} rank {_ranges(change['ranks'])}; next is {at}"
        return f"{model} {event} {'at' if event == 'resumed' else 'up to'} {at}"
    if event == "policy version":
        return f"{event} {change['version']}"
    subject = f"batch {change['batch']} " if "batch" in change else ""
    return f"{subject}{event}" + (f": {change['reason']}" if "reason" in change else "")


def _ranges(ranks: list[int]) -> str:
    """Formats ranks as ranges, such as `0-3,5`."""
    starts = [rank for last, rank in pairwise([-2, *ranks]) if rank != last + 1]
    ends = [rank for rank, following in pairwise([*ranks, ranks[-1] + 2]) if following != rank + 1]
    return ",".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
