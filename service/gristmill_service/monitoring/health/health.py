"""The health of a run: a single definition for the page, the API, the commands and the metrics.

Documents contain times in seconds since 1970 instead of ages, so that they do not change while nothing happens. Their
size is limited: of many groups, batches and ranks, they contain the oldest ones, and the number of all.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from gristmill_service.config import Model
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.collectors.run_history import Passed
from gristmill_service.monitoring.collectors.run_monitor import monitor_of
from gristmill_service.monitoring.health.findings import (
    Finding,
    HealthState,
    available,
    findings_of,
    has_pulled,
    state_of,
    summary_of,
)
from gristmill_service.monitoring.health.run_facts import (
    LONGEST_UID,
    SHOWN_BATCHES,
    SHOWN_REASONS,
    HeldBatch,
    ModelFacts,
    OpenGroup,
    RunCounts,
    RunFacts,
    facts_of,
    next_positions,
    seconds,
)
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run

SHOWN_RANKS = 128
_SHOWN_STEPS = 4_000
"""The maximum number of entries of a timeline, over all ranks."""


class TrainingPlace(Document):
    """A position in a model's training order."""

    batch: int
    epoch: int
    mini_batch: int

    @classmethod
    def of(cls, position: Position) -> TrainingPlace:
        return cls(batch=position.batch, epoch=position.epoch, mini_batch=position.mini_batch)


class RankHealth(Document):
    rank: int
    next: TrainingPlace = Field(description="The shard that it has to acknowledge next.")
    since: float = Field(description="When it acknowledged the shard before, or watched_since, whichever is later.")
    has_shard: bool = Field(description="Whether its next shard is published.")
    available: float = Field(description="Since when it could have begun with its next shard.")
    pulled: float | None = Field(description="When it last asked for a shard that was published.")
    has_pulled: bool | None = Field(description="Whether it did so since that batch was published; null: not known.")


class ModelHealth(Document):
    model: Model
    committed: TrainingPlace
    incarnation: int
    has_trainer: bool = Field(description="Whether a trainer has called, as far as the log and this process know.")
    ranks_in_all: int
    ranks: list[RankHealth] = Field(description="The ranks that are furthest behind, at most 128.")


class AbortedSamples(Document):
    """The known samples that were aborted for a reason. uid, round: the last group with such a sample."""

    reason: str
    samples: int
    uid: str
    round: int


class RunHealth(RunCounts):
    now: float = Field(description="The service's clock, seconds since 1970.")
    run: str
    state: HealthState
    summary: str = Field(description="The state's reason, in one sentence.")
    findings: list[Finding] = Field(description="What holds the run up, worst first.")
    watched_since: float = Field(description="The times of earlier events are not known.")
    last_event: float = Field(description="The time of the run's last event.")
    steps_seen: int = Field(description="Grows with every entry of the timeline.")
    rows_since: float = Field(description="When a row was last accepted.")
    train_batch_size: int
    max_buffered_batches: int
    samples_aborted: list[AbortedSamples] = Field(
        description="By reason, the most frequent first, at most 20; surplus samples are not counted."
    )
    samples_retried: int = Field(description="How often a later attempt of a sample took part.")
    open_groups: list[OpenGroup] = Field(description="The oldest that are not complete, at most 20.")
    batches: list[HeldBatch] = Field(description="The batches that are not freed, oldest first, at most 32.")
    batches_shown: list[int] = Field(description="The newest batches whose numbers are kept, freed or not, at most 32.")
    models: list[ModelHealth]


class RunSummary(Document):
    """The summary of a run; only its name if another process owns it. Any process returns any run's health. Of a
    dormant run, this is the summary from when it was closed."""

    run: str
    state: HealthState | None = None
    summary: str | None = Field(default=None, description="The state's reason, in one sentence.")
    findings: int | None = Field(default=None, description="How many findings are worse than a note.")
    newest_batch: int | None = Field(default=None, description="The newest batch that is published and not freed.")
    last_event: float | None = Field(default=None, description="The time of the run's last event, seconds since 1970.")
    watched_since: float | None = Field(default=None, description="The times of earlier events are not known.")
    groups_open: int | None = None
    groups_complete: int | None = None
    batches_sealed: int | None = None
    batches_published: int | None = None
    batches_freed: int | None = None
    policy_version: int | None = None
    finished: bool | None = None


class Overview(Document):
    now: float = Field(description="The service's clock, seconds since 1970.")
    not_ready: str = Field(description="Why the service is not ready; empty when it is.")
    grpc_address: str = Field(description="The address of this process for gRPC.")
    runs: list[RunSummary] = Field(description="The first 1,000 by name.")


class RankLine(Document):
    next: TrainingPlace
    since: float
    passed: list[tuple[float, int, int, int]] = Field(
        description="Time, batch, epoch and mini-batch of each acknowledgement."
    )


class PublishedBatch(Document):
    batch: int
    published: float


class Timeline(Document):
    run: str
    model: Model
    begin: float
    end: float = Field(description="Now, or when the run ended: finished, all trained and committed.")
    ranks_in_all: int
    ranks: list[RankLine]
    batches: list[PublishedBatch]


class Assessment(NamedTuple):
    """A run's health. findings: worst first. summary: the state's reason, in one sentence."""

    facts: RunFacts
    state: HealthState
    summary: str
    findings: list[Finding]


def assess(facts: RunFacts) -> Assessment:
    """Computes a run's health."""
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
        now=seconds(facts.now),
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
        samples_aborted=[
            AbortedSamples(reason=reason, samples=count, uid=key.uid[:LONGEST_UID], round=key.round)
            for reason, (count, key) in sorted(history.aborted.items(), key=lambda one: -one[1][0])[:SHOWN_REASONS]
        ],
        samples_retried=history.retried,
        open_groups=facts.open_groups,
        batches=facts.batches,
        batches_shown=run.tables.batches(run.run_id)[-SHOWN_BATCHES:],
        models=[_model(facts, model) for model in facts.models],
    )


def summary(run: Run) -> RunSummary:
    """Returns the run's entry in the overview of all runs."""
    facts, state, text, findings = assess_run(run)
    return RunSummary(
        **{name: value for name, value in facts.counts if name in RunSummary.model_fields},
        run=run.name,
        state=state,
        summary=text,
        findings=sum(finding.level != "note" for finding in findings),
        newest_batch=max(facts.published, default=None),
        last_event=seconds(facts.history.last_event),
        watched_since=seconds(facts.history.began),
    )


def timeline(run: Run, model: Model, back_s: float) -> Timeline:
    """Returns each rank's acknowledgements and the batches' publications in the last `back_s` seconds, or, for an ended
    run, before its end.

    Raises InvalidArgumentError if the run has no such model.
    """
    history = monitor_of(run).history

    def read(state: State, _: Room) -> tuple[list[Position], bool]:
        history.follow(state)
        return next_positions(state, model), state.finished and not state.batches and not state.open

    positions, is_over = run.read(read)
    end = history.last_event if is_over else history.now()
    begin, shown = max(end - back_s, history.began), min(len(positions), SHOWN_RANKS)
    most = max(4, _SHOWN_STEPS // max(1, shown))
    return Timeline(
        run=run.name,
        model=model,
        begin=seconds(begin),
        end=seconds(end),
        ranks_in_all=len(positions),
        ranks=[
            RankLine(
                next=TrainingPlace.of(position),
                since=seconds(rank.since),
                passed=[_entry(passed) for passed in rank.passed if passed.at >= begin][-most:],
            )
            for position, rank in zip(positions[:shown], history.ranks[model], strict=False)
        ],
        batches=[
            PublishedBatch(batch=number, published=seconds(batch.published))
            for number, batch in history.batches.items()
            if batch.published is not None
        ],
    )


def _model(facts: RunFacts, model: ModelFacts) -> ModelHealth:
    furthest_behind = sorted(range(len(model.next)), key=lambda rank: (model.next[rank], rank))[:SHOWN_RANKS]
    return ModelHealth(
        model=model.model,
        committed=TrainingPlace.of(model.committed),
        incarnation=model.incarnation,
        has_trainer=model.has_trainer,
        ranks_in_all=len(model.next),
        ranks=[_rank(facts, model, rank) for rank in sorted(furthest_behind)],
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
