"""The facts of a run at one time from which its health is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from pydantic import Field

from gristmill_service.config import Model
from gristmill_service.estimators import GroupEstimator
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.collectors.run_history import BatchTimes, RunHistory
from gristmill_service.monitoring.collectors.run_monitor import monitor_of
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions import progress, sealing
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.groups import Group, Lacking
from gristmill_service.run.machine.state import START, State
from gristmill_service.run.run import Run

SHOWN_GROUPS = 20
EXAMINED_GROUPS = 100
SHOWN_BATCHES = 32
SHOWN_FAILURES = 3
SHOWN_SHARDS = 8
SHOWN_REASONS = 20
LONGEST_UID = 80
_UNBOUNDED = 1 << 31
_DROPPED_IN_A_ROW = 16


Stage = Literal["published", "waiting for columns", "being built", "failed"]
"""The stage of a batch that is not freed. failed: its rows are retained for another dp_size."""


class OpenGroup(Document):
    uid: str
    round: int
    since: float
    complete: int = Field(description="Samples that are complete.")
    aborted: int
    retried: int = Field(description="Samples of which a later attempt takes part.")
    samples: int
    rows: int
    reason: str = Field(description="Why it is not complete.")
    tag: str = Field(default="", description="Its environment or task.")


class HeldBatch(Document):
    batch: int
    state: Stage
    prompts: int
    since: float | None = Field(description="Since when it is in this state; null: not known.")


class RunCounts(Document):
    generation: int = Field(description="How often the run's log was found shorter than confirmed, plus 1.")
    policy_version: int
    finished: bool = Field(description="Whether no more rollouts come.")
    groups_open: int
    groups_complete: int
    groups_room: int
    groups_sealed: int
    groups_dropped: dict[str, int]
    batches_sealed: int
    batches_published: int
    batches_freed: int
    batches_failed: int
    row_bytes: int
    shard_bytes: int
    rows_accepted: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's progress. next: the position that each rank must acknowledge next. has_trainer: whether a trainer has
    called at least once, according to the log and this process."""

    model: Model
    committed: Position
    incarnation: int
    next: list[Position]
    has_trainer: bool


@dataclass(frozen=True, slots=True)
class AwaitingBatch:
    """A batch that waits for columns that trainers write. missing: the first shards with missing columns, as
    (mini-batch, rank). lacking, shards: the number of shards with missing columns, and of all shards."""

    number: int
    columns: tuple[str, ...]
    missing: list[tuple[int, int]]
    lacking: int
    shards: int


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run at one time.

    seals_by_call: whether batches are sealed only by calls of SealBatch.
    compaction_failed: why the last snapshot of the log was not written; empty if it was.
    missing_tags: the number of groups of each tag that the next batch still needs (`tag_shares`).
    failed: the last failed batches, with the reason. kept: the failed batches whose rows are retained for another
        dp_size.
    published: the batches that are published and not freed. building: the oldest batch that is not built. awaiting: the
        oldest batch that waits for columns. held: the number of batches that are sealed and not freed.
    newest: the figures of the last published batch; None if they are merged with others. compares_groups: whether an
        advantage depends only on the scores of its group.
    open_groups: the oldest groups that are not complete. lacking: why they are not; empty if none is open.
    batches: the oldest batches that are not freed.
    """

    run: str
    now: float
    counts: RunCounts
    train_batch_size: int
    seals_by_call: bool
    max_buffered_batches: int
    room: Room
    missing_tags: dict[str, int]
    unhealthy_reason: str
    compaction_failed: str
    failed: dict[int, str]
    kept: frozenset[int]
    published: frozenset[int]
    building: int | None
    awaiting: AwaitingBatch | None
    held: int
    newest: Figures | None
    compares_groups: bool
    open_groups: list[OpenGroup]
    lacking: str
    batches: list[HeldBatch]
    models: list[ModelFacts]
    history: RunHistory

    @property
    def ranks_have_work(self) -> bool:
        """Whether the next shard of any rank is published."""
        return any(position.batch in self.published for model in self.models for position in model.next)

    @property
    def dropped_in_a_row(self) -> int:
        """The number of groups that were dropped since the last batch was sealed, if there are at least as many as a
        batch has, and 16, and none is complete; else 0."""
        dropped = sum(self.history.dropped.values())
        is_over = self.counts.finished or self.counts.groups_complete
        return dropped if dropped >= max(self.train_batch_size, _DROPPED_IN_A_ROW) and not is_over else 0

    @property
    def has_trainer(self) -> bool:
        return any(model.has_trainer for model in self.models)

    @property
    def has_groups(self) -> bool:
        """Whether any group is open, or complete and not sealed."""
        return self.counts.groups_open + self.counts.groups_complete > 0


def facts_of(run: Run, state: State, room: Room) -> RunFacts:
    """Reads the facts, which are valid until the next event of the run. state: the run's state."""
    history = monitor_of(run).history
    history.follow(state)
    return RunFacts(
        run=run.name,
        now=history.now(),
        counts=_counts(state, room),
        train_batch_size=run.config.train_batch_size,
        seals_by_call=run.config.seal_by == "call",
        max_buffered_batches=run.config.max_buffered_batches,
        room=room,
        missing_tags=sealing.missing_tags(state, run.config),
        unhealthy_reason=run.blocked_reason,
        compaction_failed=run.compaction.failed,
        failed=dict(list(state.failed.items())[-SHOWN_FAILURES:]),
        kept=frozenset(state.batches_kept),
        published=frozenset(
            number for number, batch in state.batches.items() if batch.is_published and not batch.awaits
        ),
        building=next(iter(state.batches_to_build), None),
        awaiting=_awaiting(state),
        held=len(state.batches),
        newest=next((record for record in state.records[-1:] if record.batches == 1), None),
        compares_groups=isinstance(run.config.estimator, GroupEstimator)
        and not run.config.estimator.reads_components
        and not run.config.estimator.compares_steps
        and run.config.kl_in_reward is None
        and run.config.length_penalty is None,
        open_groups=[_open_group(group, history) for group in islice(_incomplete(state), SHOWN_GROUPS)],
        lacking=_lacking(state),
        batches=_batches(state, history),
        models=[
            ModelFacts(
                model,
                own.committed,
                own.incarnation,
                next_positions(state, model),
                own.latest > 1 or own.furthest > START or model in history.pulling,
            )
            for model, own in state.models.items()
        ],
        history=history,
    )


def next_positions(state: State, model: Model) -> list[Position]:
    """Returns the position that each rank must acknowledge next.

    Raises InvalidArgumentError if the run has no such model.
    """
    model_progress = progress.model_state(state, model)
    # Hundreds of ranks share a few positions.
    settled = {position: progress.settle(state, model, position) for position in set(model_progress.next)}
    return [settled[position] for position in model_progress.next]


def seconds(value: float) -> float:
    """Rounds a time in seconds for documents."""
    return round(value, 1)


def _counts(state: State, room: Room) -> RunCounts:
    return RunCounts(
        generation=state.generation,
        policy_version=state.policy_version,
        finished=state.finished,
        groups_open=len(state.open) - len(state.complete),
        groups_complete=len(state.complete),
        groups_room=0 if state.finished else min(room.groups, _UNBOUNDED),
        groups_sealed=state.groups_sealed,
        groups_dropped=dict(islice(state.groups_dropped.items(), SHOWN_REASONS)),
        batches_sealed=state.batches_sealed,
        batches_published=state.batches_made,
        batches_freed=state.freed,
        batches_failed=len(state.failed),
        row_bytes=state.row_bytes,
        shard_bytes=state.shard_bytes,
        rows_accepted=state.rows_accepted,
    )


def _awaiting(state: State) -> AwaitingBatch | None:
    for number in state.batches_awaiting:
        batch = state.batches[number]
        in_all = (batch.mini_batches or {}).get("policy", 0) * state.dp_size
        of_shard = Counter((place.mini_batch, place.rank) for place in batch.written)
        of_column = Counter(place.column for place in batch.written)
        whole = sum(count == len(batch.awaits) for count in of_shard.values())
        lacking = (
            (mini_batch, rank)
            for mini_batch in range(in_all // state.dp_size)
            for rank in range(state.dp_size)
            if of_shard[mini_batch, rank] < len(batch.awaits)
        )
        columns = tuple(name for name in batch.awaits if of_column[name] < in_all)
        return AwaitingBatch(number, columns, list(islice(lacking, SHOWN_SHARDS)), in_all - whole, in_all)
    return None


def _incomplete(state: State) -> Iterator[Group]:
    return (group for key, group in state.open.items() if key not in state.complete)


def _lacking(state: State) -> str:
    """Returns why the open groups are not complete; of many, only the oldest are examined."""
    parts = [group.lacking() for group in islice(_incomplete(state), EXAMINED_GROUPS)]
    total = str(Lacking.of(parts)) if parts else ""
    return f"{total} (in the oldest {len(parts)} groups)" if len(parts) == EXAMINED_GROUPS else total


def _open_group(group: Group, history: RunHistory) -> OpenGroup:
    return OpenGroup(
        uid=group.key.uid[:LONGEST_UID],
        round=group.key.round,
        since=seconds(group.admitted_at + history.run_offset),
        complete=group.done,
        aborted=len(group.aborted),
        retried=sum(trajectory.attempt > 0 for trajectory in group.trajectories.values()),
        samples=group.samples,
        rows=sum(len(trajectory.rows) for trajectory in group.trajectories.values()),
        reason=str(group.lacking()),
        tag=group.tag,
    )


def _batches(state: State, history: RunHistory) -> list[HeldBatch]:
    batches = []
    for number, batch in islice(state.batches.items(), SHOWN_BATCHES):
        stage, since = _stage(state, number, history.of_batch(number))
        at = None if since is None else seconds(since)
        batches.append(HeldBatch(batch=number, state=stage, prompts=batch.prompts, since=at))
    return batches


def _stage(state: State, number: int, times: BatchTimes) -> tuple[Stage, float | None]:
    """Returns the stage of a batch that is not freed, and since when it is in that stage."""
    if number in state.failed:
        return "failed", times.ended
    batch = state.batches[number]
    if not batch.is_published:
        return "being built", times.sealed
    if not batch.awaits:
        return "published", times.published
    return ("being built" if state.is_written(number) else "waiting for columns"), times.columns
