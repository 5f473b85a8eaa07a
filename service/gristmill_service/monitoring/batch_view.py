"""Pictures of a published batch, as plain values: shards row by row, loads, breaks of merging, scores. Bounded in size:
what would be larger is added up or given in part, and says so.

Blocking: who asks gives a thread of its own. What was read is kept for the batches asked for last, also when they are
freed meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import Any

from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.config import Model, RunConfig
from gristmill_service.monitoring.batch_summary import BatchSummary, Break, outline
from gristmill_service.monitoring.shard_bars import LARGEST, ShardBars
from gristmill_service.pipeline.plan_document import PlanDocument, decode_plan
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.run import Run

Json = dict[str, Any]

KEPT_BATCHES = 4
SHOWN_GROUPS = 200
_LONGEST_UID = 80


class BatchView:
    """One batch: its plan, and its rows in outline."""

    def __init__(self, run: Run, batch: int, config: RunConfig, plan: PlanDocument, rows: BatchSummary) -> None:
        self._head = {"run": run.name, "batch": batch}
        self._config, self._plan, self._rows = config, plan, rows
        self._shapes = ShardBars(rows, config)

    def shards(self, model: Model, mini_batch: int | None) -> Json:
        """Of all mini-batches as far as they fit, or of one alone, with finer bars then."""
        if model not in self._config.models:
            raise InvalidArgumentError(
                f"model is {model} and this run has none; it has {', '.join(self._config.models)} "
                "(critic_mini_batch_size configures a critic)"
            )
        own = [part for part in self._plan.mini_batches if part.model == model]
        chosen = own if mini_batch is None else own[mini_batch : mini_batch + 1] if mini_batch >= 0 else []
        if own and not chosen:
            raise InvalidArgumentError(
                f"mini_batch is {mini_batch} and the batch has {len(own)} {model} mini-batches, from 0; ask for one of "
                "those"
            )
        chosen = chosen[: max(1, LARGEST.shards // self._plan.dp_size)]
        return {
            **self._head,
            "model": model,
            "models": list(self._config.models),
            "layout": self._config.layout,
            "pad_width": self._config.pad_width,
            "merge": self._config.merge,
            "prompts": self._plan.prompts,
            "rows_received": self._plan.rows_received,
            "rows": self._plan.rows,
            "dropped_uids": len(self._plan.dropped_uids),
            "metrics": self._plan.metrics,
            "counts": self._plan.counts,
            "mini_batches_in_all": len(own),
            **self._shapes.shown(own, chosen),
            "groups": [_short(uid) for _, uid in self._rows.received.groups[: LARGEST.bars]],
        }

    def breaks(self) -> Json:
        found = self._rows.breaks
        return {
            **self._head,
            "merge": self._config.merge,
            "in_all": found.in_all,
            "rows_received": self._plan.rows_received,
            "rows": self._plan.rows,
            "pairs": [{"was": was, "now": now, "count": count} for (was, now), count in found.pairs],
            "breaks": [_told(one) for one in found.shown],
        }

    def scores(self, start: int) -> Json:
        """Of some groups, from this one on."""
        received = self._rows.received
        stop = min(max(start, 0) + SHOWN_GROUPS, len(received.groups))
        return {
            **self._head,
            "estimator": self._config.advantage_estimator,
            "groups_in_all": len(received.groups),
            "start": max(start, 0),
            "groups": [self._group(group) for group in range(max(start, 0), stop)],
        }

    def _group(self, group: int) -> Json:
        received, advantages = self._rows.received, self._rows.advantages
        own = slice(int(received.group_bounds[group]), int(received.group_bounds[group + 1]))
        samples = received.steps.samples[received.trajectory_bounds[:-1][own]]
        round_, uid = received.groups[group]
        return {
            "uid": _short(uid),
            "round": round_,
            "samples": samples.tolist(),
            "scores": self._rows.scores[own].tolist(),
            "advantages": None if advantages is None else advantages[own].tolist(),
        }


class BatchViewCache:
    """The pictures of the batches asked for last. Thread-safe. turn: held while one is made, so that who looks never
    takes more than one core."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._pictures: OrderedDict[tuple[int, int, int], tuple[Run, BatchView]] = OrderedDict()

    def kept(self, run: Run, batch: int) -> BatchView | None:
        # By the object: a run of the same name that was created anew is another one.
        key = id(run), batch, run.config.dp_size
        with self._lock:
            found = self._pictures.get(key)
            if found is not None:
                self._pictures.move_to_end(key)
            return None if found is None else found[1]

    def get(self, run: Run, batch: int) -> BatchView:
        """Raises as `Run.batch` does, and NotFoundError where the batch is not published yet."""
        found = self.kept(run, batch)
        if found is not None:
            return found
        picture = _picture(run, batch)
        with self._lock:
            self._pictures[id(run), batch, run.config.dp_size] = run, picture
            while len(self._pictures) > KEPT_BATCHES:
                self._pictures.popitem(last=False)
        return picture


def _picture(run: Run, batch: int) -> BatchView:
    view = run.batch(batch)
    if view.state is not BatchState.PUBLISHED:
        raise NotFoundError(
            f"batch {batch} is not published yet, so there is nothing to be seen of it; ask again later"
        )
    config, plan = run.config, decode_plan(view.plan)
    return BatchView(run, batch, config, plan, outline(run.export(batch), config))


def _told(one: Break) -> Json:
    key = one.trajectory
    where = {"uid": _short(key.uid), "round": key.round, "sample": key.sample, "step": one.step, "index": one.at}
    return {**where, "before": one.before, "was": one.was, "now": one.now}


def _short(uid: str) -> str:
    return uid if len(uid) <= _LONGEST_UID else f"{uid[: _LONGEST_UID - 1]}…"
