"""A run's health: the one definition, which the page, the API, the commands and the metrics tell.

Documents hold times in seconds since 1970, never ages, so that they stay the same while nothing happens. They are
bounded: of many groups, batches and ranks they have the oldest, and how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gristmill_service.config import Model
from gristmill_service.monitoring.collectors.run_history import HistorySnapshot, Passed
from gristmill_service.monitoring.collectors.run_monitor import monitor_of
from gristmill_service.monitoring.health.findings import available, findings_of, has_pulled, state_of, summary_of
from gristmill_service.monitoring.health.health_models import (
    Finding,
    HealthState,
    ModelHealth,
    PublishedBatch,
    RankHealth,
    RankLine,
    RunHealth,
    RunSummary,
    Timeline,
    TrainingPlace,
)
from gristmill_service.monitoring.health.run_facts import ModelFacts, RunFacts, facts_of, next_positions, seconds
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run

SHOWN_RANKS = 128
_SHOWN_STEPS = 4_000
"""The entries of a time line, of all ranks together."""


class Assessment(NamedTuple):
    """findings: worst first. summary: the state's reason, in one sentence."""

    facts: RunFacts
    state: HealthState
    summary: str
    findings: list[Finding]


def assess(facts: RunFacts) -> Assessment:
    findings = findings_of(facts)
    state = state_of(facts, findings)
    return Assessment(facts, state, summary_of(facts, state, findings), findings)


def assess_run(run: Run) -> Assessment:
    return assess(run.read(lambda state, room: facts_of(run, state, room)))


def health(run: Run) -> RunHealth:
    facts, state, summary, findings = assess_run(run)
    history = facts.history
    return RunHealth(
        **dict(facts.counts),
        now=seconds(history.now),
        run=run.name,
        state=state,
        summary=summary,
        findings=findings,
        watched_since=seconds(history.began),
        last_event=seconds(history.last_event),
        steps_seen=history.steps,
        rows_since=seconds(history.rows_since),
        train_batch_size=facts.train_batch_size,
        max_buffered_batches=facts.max_buffered_batches,
        open_groups=facts.open_groups,
        batches=facts.batches,
        models=[_model(facts, model) for model in facts.models],
    )


def summary(run: Run) -> RunSummary:
    """The run's line in an overview of all runs."""
    facts, state, text, findings = assess_run(run)
    counts = facts.counts
    return RunSummary(
        run=run.name,
        state=state,
        summary=text,
        findings=sum(finding.level != "note" for finding in findings),
        newest_batch=max(facts.published, default=None),
        rows_since=seconds(facts.history.rows_since),
        groups_open=counts.groups_open,
        groups_complete=counts.groups_complete,
        batches_sealed=counts.batches_sealed,
        batches_published=counts.batches_published,
        batches_freed=counts.batches_freed,
        policy_version=counts.policy_version,
        finished=counts.finished,
    )


def timeline(run: Run, model: Model, back_s: float) -> Timeline:
    """The acknowledgements of each rank in the last seconds, and the publications of batches.

    Raises InvalidArgumentError where the run has no such model.
    """
    recorded = monitor_of(run).history

    def read(state: State, _: Room) -> tuple[list[Position], HistorySnapshot, float, Sequence[Sequence[Passed]]]:
        positions, history = next_positions(state, model), recorded.snapshot(state)
        begin, shown = max(history.now - back_s, history.began), min(len(positions), SHOWN_RANKS)
        return positions, history, begin, recorded.passed(model, shown, begin, max(4, _SHOWN_STEPS // max(1, shown)))

    positions, history, begin, passed = run.read(read)
    return Timeline(
        run=run.name,
        model=model,
        begin=seconds(begin),
        end=seconds(history.now),
        ranks_in_all=len(positions),
        ranks=[
            RankLine(next=TrainingPlace.of(position), since=seconds(times.since), passed=[_entry(one) for one in own])
            for position, times, own in zip(positions, history.ranks[model], passed, strict=False)
        ],
        batches=[
            PublishedBatch(batch=number, published=seconds(batch.published))
            for number, batch in history.batches.items()
            if batch.published is not None
        ],
    )


def _model(facts: RunFacts, model: ModelFacts) -> ModelHealth:
    least_far = sorted(range(len(model.next)), key=lambda rank: (model.next[rank], rank))[:SHOWN_RANKS]
    return ModelHealth(
        model=model.model,
        committed=TrainingPlace.of(model.committed),
        incarnation=model.incarnation,
        ranks_in_all=len(model.next),
        ranks=[_rank(facts, model, rank) for rank in sorted(least_far)],
    )


def _rank(facts: RunFacts, model: ModelFacts, rank: int) -> RankHealth:
    times = facts.history.ranks[model.model][rank]
    return RankHealth(
        rank=rank,
        next=TrainingPlace.of(model.next[rank]),
        since=seconds(times.since),
        has_shard=model.next[rank].batch in facts.published,
        available=seconds(available(facts, model, rank)),
        pulled=None if times.pulled is None else seconds(times.pulled),
        has_pulled=has_pulled(facts, model, rank),
    )


def _entry(passed: Passed) -> tuple[float, int, int, int]:
    return (seconds(passed.at), *passed.position)
