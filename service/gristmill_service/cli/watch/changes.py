"""The changes of a run between two statuses of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from gristmill.v1 import run_pb2
from gristmill_service.cli.counted import counted
from gristmill_service.cli.escape import printable
from gristmill_service.cli.watch.json_documents import place_document
from gristmill_service.cli.watch.positions import model_name, order, place
from gristmill_service.cli.watch.reported_health import STUCK

Change = dict[str, Any]
"""`event`, and the values that belong to it."""

Groups = Callable[[], Sequence[run_pb2.GroupStatus]]


def changes(before: run_pb2.RunStatus, after: run_pb2.RunStatus, groups: Groups) -> Iterator[Change]:
    """In the order in which one leads to the next. groups: asked only where groups were dropped."""
    if after.batches_sealed < before.batches_sealed or after.rows_accepted < before.rows_accepted:
        # Deleted, or lost with the process that held it, and created again by the same name.
        yield {"event": "begun anew"}
        before = run_pb2.RunStatus(run=after.run, policy_version=after.policy_version)
    if after.policy_version != before.policy_version:
        yield {"event": "policy version", "version": after.policy_version}
    yield from _dropped(before, after, groups)
    yield from _batches(before, after)
    yield from _trained(before, after)
    yield from ({"event": "freed", "batch": number} for number in range(before.batches_freed, after.batches_freed))
    if after.finished and not before.finished:
        yield {"event": "finished"}
    yield from _health(before.health, after.health)


def sentence(change: Change) -> str:
    """For a person at a terminal."""
    return printable(_sentence(change))


def _sentence(change: Change) -> str:
    event = change["event"]
    if event == "following":
        return "following: " + ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in change.items() if n != event)
    if event == "groups dropped":
        names = ", ".join(group["uid"] for group in change["groups"][:8])
        more = ", ..." if len(change["groups"]) > 8 else ""
        what = counted(change["count"], "group")
        return f"{what} dropped ({change['reason']}): {names}{more}"
    if event == "acknowledged":
        return f"acknowledged by {change['model']} rank {_ranges(change['ranks'])}; next is {_place(change)}"
    if event in ("committed", "resumed"):
        return f"{change['model']} {event} {'at' if event == 'resumed' else 'up to'} {_place(change)}"
    rest = " ".join(str(change[name]) for name in ("version", "batch") if name in change)
    reason = f": {change['reason']}" if change.get("reason") else ""
    return f"{'batch ' if 'batch' in change else ''}{rest} {event}{reason}".strip() if rest else f"{event}{reason}"


def _batches(before: run_pb2.RunStatus, after: run_pb2.RunStatus) -> Iterator[Change]:
    for number in range(before.batches_sealed, after.batches_sealed):
        yield {"event": "sealed", "batch": number}
    for number in range(max(after.batches_published, after.batches_freed), before.batches_published):
        # A service that starts again makes them again, byte for byte.
        yield {"event": "made again", "batch": number}
    for number, reason in sorted(after.failed_batches.items()):
        # It may have failed before, for other ranks.
        if before.failed_batches.get(number) != reason:
            yield {"event": "failed", "batch": number, "reason": reason}
    for number in range(before.batches_published, after.batches_published):
        if number not in after.failed_batches:
            yield {"event": "published", "batch": number}


def _health(before: run_pb2.RunHealth, after: run_pb2.RunHealth) -> Iterator[Change]:
    """A batch that could not be built, which makes a run failed, is a change of its own."""
    if after.state == STUCK and (before.state, before.summary) != (after.state, after.summary):
        yield {"event": "stuck", "reason": after.summary}
    elif before.state == STUCK and after.state != STUCK:
        yield {"event": "stuck no more", "reason": f"{after.state}: {after.summary}"}


def _trained(before: run_pb2.RunStatus, after: run_pb2.RunStatus) -> Iterator[Change]:
    earlier = {model.model: model for model in before.models}
    for model in after.models:
        name, was = model_name(model.model), earlier.get(model.model, run_pb2.ModelProgress())
        if model.incarnation != was.incarnation:
            at = min(_next_of(after, model.model).values(), key=order, default=model.committed)
            yield {"event": "resumed", "model": name, "incarnation": model.incarnation, "position": place_document(at)}
        else:
            yield from _acknowledged(name, _next_of(before, model.model), _next_of(after, model.model))
        if model.committed != was.committed:
            yield {"event": "committed", "model": name, "position": place_document(model.committed)}


def _acknowledged(
    model: str, before: dict[int, run_pb2.Position], after: dict[int, run_pb2.Position]
) -> Iterator[Change]:
    """Ranks that are at the same place now, together: a trainer has hundreds."""
    moved: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, position in sorted(after.items()):
        if position != before.get(rank, run_pb2.Position()):
            moved[order(position)].append(rank)
    for (batch, epoch, mini_batch), ranks in sorted(moved.items()):
        position = run_pb2.Position(batch=batch, epoch=epoch, mini_batch=mini_batch)
        yield {"event": "acknowledged", "model": model, "ranks": ranks, "position": place_document(position)}


def _dropped(before: run_pb2.RunStatus, after: run_pb2.RunStatus, groups: Groups) -> Iterator[Change]:
    more = {reason: count - before.groups_dropped.get(reason, 0) for reason, count in after.groups_dropped.items()}
    more = {reason: count for reason, count in sorted(more.items()) if count > 0}
    found = groups() if more else ()
    for reason, count in more.items():
        # They are listed as they were decided, so that the last ones are the new ones.
        names = [{"uid": one.uid, "round": one.round} for one in found if one.reason == reason][-count:]
        yield {"event": "groups dropped", "reason": reason, "count": count, "groups": names}


def _next_of(status: run_pb2.RunStatus, model: int) -> dict[int, run_pb2.Position]:
    return {rank.rank: rank.next for rank in status.ranks if rank.model == model}


def _place(change: Change) -> str:
    return place(run_pb2.Position(**change["position"]))


def _ranges(ranks: list[int]) -> str:
    """0-3,5"""
    starts = [rank for last, rank in pairwise([-2, *ranks]) if rank != last + 1]
    ends = [rank for rank, following in pairwise([*ranks, ranks[-1] + 2]) if following != rank + 1]
    return ",".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
