"""The tables of `status` and `top`: a line a replica, a line a run, or one run whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gristmill.v1 import run_pb2
from gristmill_service.cli.counted import counted
from gristmill_service.cli.escape import printable
from gristmill_service.cli.watch.positions import model_name, place, slowest
from gristmill_service.cli.watch.reported_health import ReportedFinding, ReportedHealth
from gristmill_service.cli.watch.snapshot import ReplicaSnapshot, Snapshot

# The most frequent reasons for which groups were dropped.
_REASONS = 20
_STYLES = {"finished": "dim", "idle": "dim", "collecting": "green", "training": "green"}


def overview(
    snapshot: Snapshot, healths: list[ReportedHealth], rates: Mapping[str, float] | None = None
) -> RenderableType:
    """Every run, a line each. rates: rows a second, of each run, where they are known."""
    if not snapshot.runs:
        return Group(_replicas(snapshot.replicas), Text("no runs"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("state", no_wrap=True)
    for name in ("version", "open", "complete", "room", "sealed", "published", "freed", "held", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    if rates is not None:
        table.add_column("rows/s", justify="right", no_wrap=True)
    for run, health in zip(snapshot.runs, healths, strict=True):
        cells = [""] * 9 if run.status is None else _counts(run.status)
        rate = [] if rates is None else [f"{rates[run.run]:,.0f}" if run.run in rates else ""]
        table.add_row(Text(printable(run.run)), _state(health), *cells, *rate)
    return Group(_replicas(snapshot.replicas), table, *_reasons(snapshot, healths))


def details(snapshot: Snapshot, health: ReportedHealth) -> RenderableType:
    """The one run of the snapshot."""
    [run] = snapshot.runs
    head = Text.assemble((printable(run.run), "bold"), "  ", _state(health), "  ", printable(health.summary))
    status = run.status
    if status is None:
        return Group(_replicas(snapshot.replicas), head)
    findings = [_finding(finding) for finding in health.findings if finding.text != health.summary]
    return Group(_replicas(snapshot.replicas), head, *findings, _facts(status), *_models(status))


def _replicas(replicas: Iterable[ReplicaSnapshot]) -> Text:
    lines = []
    for replica in replicas:
        version = f" ({replica.version})" if replica.version else ""
        word = "not ready: " if replica.is_reached else ""
        state = (f"{word}{replica.problem}", "bold red") if replica.problem else ("ready", "green")
        lines.append(Text.assemble(f"gristmill{version} at {replica.address}: ", state))
    return Text("\n").join([*lines, Text()])


def _state(health: ReportedHealth) -> Text:
    return Text(health.state, "bold red" if health.needs_person else _STYLES.get(health.state, ""))


def _reasons(snapshot: Snapshot, healths: list[ReportedHealth]) -> list[Text]:
    """The reason why a run will not go on does not fit into its line."""
    found = [
        (run.run, health.summary) for run, health in zip(snapshot.runs, healths, strict=True) if health.needs_person
    ]
    return [Text.assemble("\n", (f"{printable(run)}: ", "bold"), (printable(reason), "red")) for run, reason in found]


def _counts(status: run_pb2.RunStatus) -> list[str]:
    batches = (status.batches_sealed, status.batches_published, status.batches_freed)
    numbers = (status.policy_version, status.groups_open, status.groups_complete, status.groups_room, *batches)
    return [*map(str, numbers), decimal(status.row_bytes + status.shard_bytes), f"{status.rows_accepted:,}"]


def _finding(finding: ReportedFinding) -> Text:
    lasting = "" if finding.for_s is None else f", for {finding.for_s:.0f} s"
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
    yield "groups", f"{status.groups_open} open, {status.groups_complete} complete, room for {status.groups_room}"
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
    yield "rows", f"{status.rows_accepted:,} accepted, {status.rows_duplicate:,} came again"
    yield "held", f"{decimal(status.row_bytes)} of rows, {decimal(status.shard_bytes)} of shards"
    yield "policy version", f"{status.policy_version}{', finished' if status.finished else ''}"


def _models(status: run_pb2.RunStatus) -> Iterable[Text]:
    for model in status.models:
        ranks = [rank for rank in status.ranks if rank.model == model.model]
        behind = slowest(run_pb2.RunStatus(ranks=ranks))
        progress = (
            f"committed up to {place(model.committed)}, incarnation {model.incarnation}, {counted(len(ranks), 'rank')}"
        )
        last = "" if behind is None else f"; the slowest, rank {behind.rank}, is at {place(behind.next)}"
        yield Text.assemble((f"{model_name(model.model)}: ", "bold"), progress, last)
