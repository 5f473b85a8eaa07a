"""What the overview and GetRun report of a run. It is stored with a dormant run, so that reading it opens no run."""

from __future__ import annotations

import time

import msgspec

from gristmill_service.monitoring.health.findings import HealthState, Level
from gristmill_service.monitoring.health.health import RunSummary, assess_run
from gristmill_service.monitoring.health.run_facts import seconds
from gristmill_service.run.machine.answers import RunStatus
from gristmill_service.run.run import Run


class RunReport(msgspec.Struct, frozen=True):
    """A report of a run. Times are in seconds since 1970. now: the time of the report. findings: the level of each, its
    text, and its beginning; None: not known."""

    now: float
    status: RunStatus
    state: HealthState
    summary: str
    last_event: float
    watched_since: float
    findings: list[tuple[Level, str, float | None]]


def report(run: Run, status: RunStatus) -> RunReport:
    """Reports a run that is open. status: its current status."""
    facts, state, text, findings = assess_run(run)
    return RunReport(
        now=facts.now,
        status=status,
        state=state,
        summary=text,
        last_event=facts.history.last_event,
        watched_since=facts.history.began,
        findings=[(finding.level, finding.sentence, finding.since) for finding in findings],
    )


def described(run: Run) -> bytes:
    """Returns the report of a run that becomes dormant."""
    return msgspec.json.encode(report(run, run.read(lambda state, _: run.status_of(state))))


def reported(description: bytes | None) -> RunReport | None:
    """Returns the report of a dormant run. None if there is none, or if another version has written it."""
    if description is None:
        return None
    try:
        return msgspec.structs.replace(msgspec.json.decode(description, type=RunReport), now=time.time())
    except msgspec.DecodeError:
        return None


def listed(run: str, description: bytes | None) -> RunSummary:
    """Returns the entry in the overview of a run that this process does not own."""
    if (dormant := reported(description)) is None:
        return RunSummary(run=run)
    status = dormant.status
    return RunSummary(
        **{name: getattr(status, name) for name in RunSummary.model_fields if hasattr(status, name)},
        state=dormant.state,
        summary=dormant.summary,
        findings=sum(level != "note" for level, _, _ in dormant.findings),
        newest_batch=None,
        last_event=seconds(dormant.last_event),
        watched_since=seconds(dormant.watched_since),
    )
