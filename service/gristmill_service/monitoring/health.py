"""How a run is, for people: what holds it up and since when, its oldest open groups, its batches and its ranks.

Times are wall-clock seconds, never ages, so that the answer stays the same while nothing happens. Bounded: of many
groups, batches and ranks the oldest are told, and how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

from gristmill_service.config import Model
from gristmill_service.monitoring.history import LOOK_S, History, RankHistory, reading
from gristmill_service.run.machine import progress
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run

Json = dict[str, Any]
Level = Literal["stuck", "slow", "note"]

SHOWN_GROUPS = 20
SHOWN_RANKS = 128
SHOWN_BATCHES = 32
_SHOWN_STEPS = 4_000
"""Of a time line, all ranks together."""

_LONG_S = 60.0
"""A rank or a full buffer that stands still for so long is worth a look."""
_LONG_GROUP_S = 300.0
_LONG_MAKING_S = 30.0


class Finding(NamedTuple):
    """since: None where it is not known."""

    level: Level
    text: str
    since: float | None


def health(run: Run, seen: History, now: float) -> Json:
    with reading(run) as (state, room):
        groups = _open_groups(state, seen)
        batches = _batches(state, seen)
        told: Json = {
            "run": run.name,
            "watched_since": _rough(seen.began),
            "steps_seen": seen.steps,
            "policy_version": state.policy_version,
            "finished": state.finished,
            "groups_open": len(state.open) - len(state.complete),
            "groups_complete": len(state.complete),
            "groups_room": 0 if state.finished else min(room.groups, 1 << 31),
            "groups_sealed": state.groups_sealed,
            "groups_dropped": dict(islice(state.groups_dropped.items(), 20)),
            "batches_sealed": state.batches_sealed,
            "batches_published": state.batches_made,
            "batches_freed": state.freed,
            "batches_failed": len(state.failed),
            "row_bytes": state.row_bytes,
            "shard_bytes": state.shard_bytes,
            "rows_accepted": state.rows_accepted,
            "rows_since": _rough(seen.rows_since),
            "train_batch_size": run.config.train_batch_size,
            "max_buffered_batches": run.config.max_buffered_batches,
            "open_groups": groups,
            "batches": batches,
            "models": [_model(state, seen, model) for model in state.models],
        }
        reason, full = room.reason, not room.groups and not state.finished
        failed, ended = list(state.failed.items())[-3:], state.finished and not state.batches
    findings = [
        *([Finding("stuck", run.blocked_reason, None)] if run.blocked_reason else []),
        *(Finding("slow", f"batch {number} failed: {why}", None) for number, why in failed),
        *(_ranks(told, seen, now)),
        *(_making(told, now)),
        *([Finding(_level(seen.full_since, now), f"workers wait for room: {reason}", seen.full_since)] if full else []),
        *(_stragglers(told, now)),
    ]
    told["findings"] = [{"level": one.level, "text": one.text[:500], "since": _known(one.since)} for one in findings]
    levels = {one.level for one in findings}
    told["state"] = "finished" if ended else next((one for one in ("stuck", "slow") if one in levels), "well")
    return told


def timeline(run: Run, seen: History, model: Model, now: float, seconds: float) -> Json:
    """When each rank acknowledged what in the last seconds, and when the batches were published."""
    with reading(run) as (state, _):
        progress.model_state(state, model)
    ranks = seen.ranks.get(model, [])
    shown = ranks[:SHOWN_RANKS]
    each, begin = max(4, _SHOWN_STEPS // max(1, len(shown))), max(now - seconds, seen.began)
    return {
        "run": run.name,
        "model": model,
        "begin": _rough(begin),
        "end": _rough(now),
        "ranks_in_all": len(ranks),
        "ranks": [_line(rank, begin, each) for rank in shown],
        "batches": [
            {"batch": number, "published": _rough(batch.published)}
            for number, batch in seen.batches.items()
            if batch.published is not None
        ],
    }


def _line(rank: RankHistory, begin: float, most: int) -> Json:
    passed = [(at, place) for at, place in rank.passed.copy() if at >= begin][-most:]
    return {
        "next": rank.next._asdict(),
        "since": _rough(rank.since),
        "passed": [[_rough(at), place.batch, place.epoch, place.mini_batch] for at, place in passed],
    }


def _open_groups(state: State, seen: History) -> list[Json]:
    """The oldest that are not complete."""
    incomplete = (group for key, group in state.open.items() if key not in state.complete)
    return [_group(group, seen) for group in islice(incomplete, SHOWN_GROUPS)]


def _group(group: Group, seen: History) -> Json:
    return {
        "uid": group.key.uid[:80],
        "round": group.key.round,
        "since": _rough(group.admitted_at + seen.run_offset),
        "complete": group.done,
        "aborted": len(group.aborted),
        "samples": group.samples,
        "rows": sum(len(trajectory.rows) for trajectory in group.trajectories.values()),
    }


def _batches(state: State, seen: History) -> list[Json]:
    """Those that are held, oldest first."""
    found = []
    for number, batch in islice(state.batches.items(), SHOWN_BATCHES):
        when = seen.batches.get(number)
        since = None if when is None else when.published if batch.is_published else when.sealed
        found.append(
            {
                "batch": number,
                "state": "published" if batch.is_published else "being made",
                "prompts": batch.prompts,
                "since": _known(since),
            }
        )
    return found


def _model(state: State, seen: History, model: Model) -> Json:
    own, ranks = state.models[model], seen.ranks.get(model, [])
    order = sorted(range(len(ranks)), key=lambda rank: (ranks[rank].next, rank))
    return {
        "model": model,
        "committed": own.committed._asdict(),
        "incarnation": own.incarnation,
        "ranks_in_all": len(ranks),
        "ranks": [
            {
                "rank": rank,
                "next": ranks[rank].next._asdict(),
                "since": _rough(ranks[rank].since),
                "has_shard": _is_there(state, ranks[rank].next),
                "available": _available(seen, ranks[rank]),
                "pulled": _known(ranks[rank].pulled),
                "has_pulled": _has_pulled(seen, ranks[rank]),
            }
            for rank in sorted(order[:SHOWN_RANKS])
        ],
    }


def _is_there(state: State, position: Position) -> bool:
    batch = state.batches.get(position.batch)
    return batch is not None and batch.is_published


def _available(seen: History, rank: RankHistory) -> float:
    """Since when the rank could have begun with its next shard: it moved on to it, and it was published."""
    batch = seen.batches.get(rank.next.batch)
    published = None if batch is None else batch.published
    return _rough(max(rank.since, published or rank.since))


def _has_pulled(seen: History, rank: RankHistory) -> bool | None:
    """Whether it asked for a shard of its next batch, or of one after that, as far as is known: what it has of a batch
    that was there before anybody looked is not."""
    batch = seen.batches.get(rank.next.batch)
    if batch is None or batch.published is None:
        return None
    if rank.pulled is not None and rank.pulled >= batch.published:
        return True
    return None if batch.published <= seen.began + LOOK_S else False


def _ranks(told: Json, seen: History, now: float) -> Iterator[Finding]:
    for model in told["models"]:
        busy = [rank for rank in model["ranks"] if rank["has_shard"]]
        least = min((tuple(rank["next"].values()) for rank in busy), default=())
        # Where all stand still, those that are least far are what the others wait for.
        late = [rank for rank in busy if tuple(rank["next"].values()) == least and now - rank["available"] >= _LONG_S]
        if late:
            others = model["ranks_in_all"] - len([rank for rank in busy if tuple(rank["next"].values()) == least])
            yield Finding(
                "stuck" if others else "slow",
                f"{model['model']} {_few([rank['rank'] for rank in late])} did not {_missing(late)} "
                f"{_place(late[0]['next'])}, which is published" + _past(others),
                min(rank["available"] for rank in late),
            )
        elif not busy and model["ranks"] and not told["finished"]:
            since = max(rank["since"] for rank in model["ranks"])
            have, need = told["groups_complete"], told["train_batch_size"]
            yield Finding(
                _level(since, now),
                f"{model['model']} ranks wait for batch {model['ranks'][0]['next']['batch']}: {have} of {need} groups "
                "are complete",
                since,
            )


def _past(others: int) -> str:
    return f"; {others} other {'rank is' if others == 1 else 'ranks are'} past it" if others else ""


def _missing(late: list[Json]) -> str:
    return "even pull" if all(rank["has_pulled"] is False for rank in late) else "acknowledge"


def _making(told: Json, now: float) -> Iterator[Finding]:
    for batch in told["batches"]:
        since = batch["since"]
        if batch["state"] == "being made" and since is not None and now - since >= _LONG_MAKING_S:
            yield Finding("slow", f"batch {batch['batch']} is sealed and not published", since)
            return


def _stragglers(told: Json, now: float) -> Iterator[Finding]:
    old = [group for group in told["open_groups"] if now - group["since"] >= _LONG_GROUP_S]
    if old:
        first, more = old[0], "or more " if len(old) == SHOWN_GROUPS else ""
        yield Finding(
            "slow",
            f"{len(old)} {more}groups are open for long; the oldest, {first['uid']!r}, has {first['complete']} of "
            f"{first['samples']} samples",
            first["since"],
        )


def _level(since: float | None, now: float) -> Level:
    return "slow" if since is not None and now - since >= _LONG_S else "note"


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{' and more' if len(ranks) > 8 else ''}"


def _place(position: Json) -> str:
    epoch = f" epoch {position['epoch']}" if position["epoch"] else ""
    return f"batch {position['batch']}{epoch} mini-batch {position['mini_batch']}"


def _known(seconds: float | None) -> float | None:
    return None if seconds is None else _rough(seconds)


def _rough(seconds: float) -> float:
    return round(seconds, 1)
