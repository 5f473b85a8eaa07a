"""A run's health as the service reports it. docs/page.md defines its states; nothing is judged here."""

from __future__ import annotations

from dataclasses import dataclass, field

from gristmill.v1 import run_pb2
from gristmill_service.cli.watch.snapshot import RunSnapshot, Snapshot

UNREACHABLE, STUCK, FINISHED = "unreachable", "stuck", "finished"
_NEEDS_PERSON = (UNREACHABLE, STUCK, "failed")


@dataclass(frozen=True, slots=True)
class ReportedFinding:
    """for_s: for how many seconds; None where that is not known."""

    level: str
    text: str
    for_s: float | None


@dataclass(frozen=True, slots=True)
class ReportedHealth:
    """state: the service's word, or `unreachable` where the run's owner does not answer. summary: the reason. still_s:
    seconds since anything last happened in the run, None where that is not known."""

    state: str
    summary: str
    findings: list[ReportedFinding] = field(default_factory=list)
    still_s: float | None = None

    @property
    def needs_person(self) -> bool:
        """The run will not go on by itself."""
        return self.state in _NEEDS_PERSON


def health_of(run: RunSnapshot, stuck_after_s: float = 0.0) -> ReportedHealth:
    """stuck_after_s: a run that is not finished is taken as stuck, too, when nothing happened in it for so long; 0:
    only the service decides."""
    if run.status is None:
        return ReportedHealth(UNREACHABLE, run.unreachable_reason)
    reported = run.status.health
    findings = [_finding(finding) for finding in reported.findings]
    state, summary = reported.state, reported.summary
    if stuck_after_s and reported.still_s >= stuck_after_s and state not in (FINISHED, *_NEEDS_PERSON):
        state, summary = STUCK, f"nothing happened for {reported.still_s:.0f} s: {summary}"
    return ReportedHealth(state, summary, findings, reported.still_s)


def healths_of(snapshot: Snapshot, stuck_after_s: float = 0.0) -> list[ReportedHealth]:
    """The health of each run of the snapshot, in its order."""
    return [health_of(run, stuck_after_s) for run in snapshot.runs]


def needs_person(snapshot: Snapshot, healths: list[ReportedHealth]) -> bool:
    """Returns whether a run will not go on by itself, or a replica is not ready or away."""
    return any(replica.problem for replica in snapshot.replicas) or any(health.needs_person for health in healths)


def _finding(finding: run_pb2.Finding) -> ReportedFinding:
    return ReportedFinding(finding.level, finding.text, finding.for_s if finding.HasField("for_s") else None)
