"""The documents that `--json` prints: plain values, names as in the contract."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from gristmill.v1 import run_pb2
from gristmill_service.cli.watch.positions import model_name
from gristmill_service.cli.watch.reported_health import ReportedHealth
from gristmill_service.cli.watch.snapshot import RunSnapshot, Snapshot

Json = dict[str, Any]

_SAME = (
    *("policy_version", "finished", "groups_open", "groups_complete", "groups_room", "batches_sealed"),
    *("batches_published", "batches_freed", "row_bytes", "shard_bytes", "rows_accepted", "rows_duplicate"),
)


def snapshot_document(snapshot: Snapshot, healths: list[ReportedHealth]) -> Json:
    replicas = [
        {"address": one.address, "reached": one.is_reached, "problem": one.problem, "version": one.version}
        for one in snapshot.replicas
    ]
    runs = [_run_document(run, health) for run, health in zip(snapshot.runs, healths, strict=True)]
    return {"replicas": replicas, "runs": runs}


def place_document(position: run_pb2.Position) -> Json:
    return {"batch": position.batch, "epoch": position.epoch, "mini_batch": position.mini_batch}


def _run_document(run: RunSnapshot, health: ReportedHealth) -> Json:
    found: Json = {"run": run.run, "health": {**asdict(health), "needs_person": health.needs_person}}
    status = run.status
    if status is None:
        return found
    return {
        **found,
        **{name: getattr(status, name) for name in _SAME},
        "groups_dropped": dict(status.groups_dropped),
        "tags": {tag: _tag_document(groups) for tag, groups in status.tags.items()},
        "failed_batches": {str(number): reason for number, reason in status.failed_batches.items()},
        "models": [_model_document(status, model) for model in status.models],
        "config": json.loads(status.config_json),
    }


def _tag_document(groups: run_pb2.TagGroups) -> Json:
    return {"open": groups.open, "complete": groups.complete, "sealed": groups.sealed, "dropped": groups.dropped}


def _model_document(status: run_pb2.RunStatus, model: run_pb2.ModelProgress) -> Json:
    ranks = sorted((rank.rank, place_document(rank.next)) for rank in status.ranks if rank.model == model.model)
    return {
        "model": model_name(model.model),
        "committed": place_document(model.committed),
        "incarnation": model.incarnation,
        "next": [position for _, position in ranks],
    }
