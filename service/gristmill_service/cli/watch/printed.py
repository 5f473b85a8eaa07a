"""Formats the output of `status` and `top`: tables for people, with one line per replica and run or the details of one
run, and JSON values for programs, with the names of the API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gristmill.v1 import run_pb2
from gristmill_service.cli.terminal import FittingTable, counted, printable
from gristmill_service.cli.watch.service_client import Replica, Run, Snapshot

Json = dict[str, Any]

# How many of the most frequent drop reasons are listed.
_REASONS = 20
_STYLES = {"finished": "dim", "idle": "dim", "collecting": "green", "training": "green"}
_SAME = (
    *("policy_version", "finished", "groups_open", "groups_complete", "groups_room", "batches_sealed"),
    *("batches_published", "batches_freed", "row_bytes", "shard_bytes", "rows_accepted", "rows_duplicate"),
    *("groups_archived", "next_round"),
)


def overview(snapshot: Snapshot, rates: Mapping[str, float] | None = None) -> RenderableType:
    """Shows all runs, one per line. rates: each run's rows per second, if they are known."""
    if not snapshot.runs:
        return Group(_replicas(snapshot.replicas), Text("no runs"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("state", no_wrap=True)
    for name in ("version", "open", "complete", "capacity", "sealed", "published", "freed", "stored", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    if rates is not None:
        table.add_column("rows/s", justify="right", no_wrap=True)
    for run in snapshot.runs:
        cells = [""] * 9 if run.status is None else _counts(run.status)
        rate = [] if rates is None else [f"{rates[run.name]:,.0f}" if run.name in rates else ""]
        table.add_row(Text(printable(run.name)), _state(run), *cells, *rate)
    # The reason why a run needs intervention does not fit into its line.
    reasons = [
        Text.assemble("\n", (f"{printable(run.name)}: ", "bold"), (printable(run.health.summary), "red"))
        for run in snapshot.runs
        if run.needs_person
    ]
    return Group(_replicas(snapshot.replicas), FittingTable(table), *reasons)


def details(snapshot: Snapshot) -> RenderableType:
    """Shows the one run of the snapshot."""
    [run] = snapshot.runs
    summary, status = run.health.summary, run.status
    head = Text.assemble((printable(run.name), "bold"), "  ", _state(run), "  ", printable(summary))
    if status is None:
        return Group(_replicas(snapshot.replicas), head)
    findings = [_finding(finding) for finding in run.health.findings if finding.text != summary]
    return Group(_replicas(snapshot.replicas), head, *findings, _facts(status), *_models(status))


def snapshot_document(snapshot: Snapshot) -> Json:
    replicas = [
        {
            "address": one.address,
            "reached": one.is_reached,
            "problem": one.problem,
            "version": one.version,
            "started": one.started,
            "run_store": one.run_store,
        }
        for one in snapshot.replicas
    ]
    return {"replicas": replicas, "runs": [_run_document(run) for run in snapshot.runs]}


def place_document(position: run_pb2.Position) -> Json:
    return {"batch": position.batch, "epoch": position.epoch, "mini_batch": position.mini_batch}


def model_name(number: int) -> str:
    """Returns `policy` or `critic`."""
    return run_pb2.Model.Name(number).removeprefix("MODEL_").lower()  # type: ignore[arg-type]


def place(position: run_pb2.Position) -> str:
    epoch = f" epoch {position.epoch}" if position.epoch else ""
    return f"batch {position.batch}{epoch} mini-batch {position.mini_batch}"


def order(position: run_pb2.Position) -> tuple[int, int, int]:
    """Returns a key that sorts positions in training order."""
    return position.batch, position.epoch, position.mini_batch


def _replicas(replicas: Iterable[Replica]) -> Text:
    lines = []
    for replica in replicas:
        version = f" ({replica.version})" if replica.version else ""
        word = "not ready: " if replica.is_reached else ""
        state = (f"{word}{replica.problem}", "bold red") if replica.problem else ("ready", "green")
        lines.append(Text.assemble(f"gristmill{version} at {replica.address}: ", state, _lifetime(replica)))
    return Text("\n").join([*lines, Text()])


def _lifetime(replica: Replica) -> str:
    """Returns since when the replica runs, and where its runs are."""
    if not replica.started:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(replica.started))
    place = "only in memory" if replica.run_store == "memory" else f"in {printable(replica.run_store)}"
    return f", since {since}; its runs are {place}"


def _state(run: Run) -> Text:
    return Text(run.health.state, "bold red" if run.needs_person else _STYLES.get(run.health.state, ""))


def _counts(status: run_pb2.RunStatus) -> list[str]:
    batches = (status.batches_sealed, status.batches_published, status.batches_freed)
    numbers = (status.policy_version, status.groups_open, status.groups_complete, status.groups_room, *batches)
    return [*map(str, numbers), decimal(status.row_bytes + status.shard_bytes), f"{status.rows_accepted:,}"]


def _finding(finding: run_pb2.Finding) -> Text:
    lasting = f", for {finding.for_s:.0f} s" if finding.HasField("for_s") else ""
    style = {"note": "dim", "slow": "yellow"}.get(finding.level, "bold red")
    return Text.assemble((f"{finding.level}: ", style), printable(finding.text), lasting)


def _facts(status: run_pb2.RunStatus) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _lines(status):
        table.add_row(name, Text(printable(text)))
    return table


def _lines(status: run_pb2.RunStatus) -> Iterable[tuple[str, str]]:
    archived = f", {status.groups_archived:,} archived" if status.groups_archived else ""
    yield (
        "groups",
        f"{status.groups_open} open, {status.groups_complete} complete{archived}, capacity for {status.groups_room}",
    )
    if status.groups_dropped:
        most = sorted(status.groups_dropped.items(), key=lambda item: (-item[1], item[0]))
        more = f", and {len(most) - _REASONS} more reasons" if len(most) > _REASONS else ""
        yield "dropped", ", ".join(f"{count} {reason}" for reason, count in most[:_REASONS]) + more
    yield (
        "batches",
        f"{status.batches_sealed} sealed, {status.batches_published} published, {status.batches_freed} freed",
    )
    for tag, groups in sorted(status.tags.items()):
        counts = f"{groups.open} open, {groups.complete} complete, {groups.sealed} sealed, {groups.dropped} dropped"
        yield f"tag {tag}", counts
    for number, reason in sorted(status.failed_batches.items()):
        yield f"batch {number}", f"failed: {reason}"
    yield "rows", f"{status.rows_accepted:,} accepted, {status.rows_duplicate:,} duplicates"
    yield "stored", f"{decimal(status.row_bytes)} of rows, {decimal(status.shard_bytes)} of shards"
    yield "policy version", f"{status.policy_version}{', finished' if status.finished else ''}"


def _models(status: run_pb2.RunStatus) -> Iterable[Text]:
    for model in status.models:
        ranks = [rank for rank in status.ranks if rank.model == model.model]
        at, size = place(model.committed), counted(len(ranks), "rank")
        resumed = f"resumed {counted(model.resumes, 'time')}, incarnation {model.incarnation}"
        progress = f"committed before {at}, {resumed}, {size}"
        # The other ranks wait for the slowest rank; if there are several, the first is shown.
        behind = min(ranks, key=lambda rank: order(rank.next), default=None)
        last = "" if behind is None else f"; the slowest, rank {behind.rank}, is at {place(behind.next)}"
        yield Text.assemble((f"{model_name(model.model)}: ", "bold"), progress, last)


def _run_document(run: Run) -> Json:
    health, status = run.health, run.status
    findings = [
        {"level": one.level, "text": one.text, "for_s": one.for_s if one.HasField("for_s") else None}
        for one in health.findings
    ]
    document: Json = {
        "run": run.name,
        "health": {
            "state": health.state,
            "summary": health.summary,
            "findings": findings,
            "still_s": None if status is None else health.still_s,
            "needs_person": run.needs_person,
        },
    }
    if status is None:
        return document
    return {
        **document,
        **{name: getattr(status, name) for name in _SAME},
        "groups_dropped": dict(status.groups_dropped),
        "tags": {
            tag: {"open": one.open, "complete": one.complete, "sealed": one.sealed, "dropped": one.dropped}
            for tag, one in status.tags.items()
        },
        "failed_batches": {str(number): reason for number, reason in status.failed_batches.items()},
        "models": [_model_document(status, model) for model in status.models],
        "config": json.loads(status.config_json),
    }


def _model_document(status: run_pb2.RunStatus, model: run_pb2.ModelProgress) -> Json:
    ranks = sorted((rank.rank, place_document(rank.next)) for rank in status.ranks if rank.model == model.model)
    return {
        "model": model_name(model.model),
        "committed": place_document(model.committed),
        "incarnation": model.incarnation,
        "resumes": model.resumes,
        "next": [position for _, position in ranks],
    }
