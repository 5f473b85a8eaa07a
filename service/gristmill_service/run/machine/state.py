"""The state of a run: the result of applying the events of its log, in order, to an empty state.

Only `apply` changes a state; it never fails and decides nothing. Decisions (`ingest`, `admission`, `sealing`,
`progress`, ...) read the state and return events. A state contains no tokens and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.credit.baselines import BaselineKey
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import ColumnPlace, Position
from gristmill_service.run.machine.batch import Batch
from gristmill_service.run.machine.batch_records import keep
from gristmill_service.run.machine.closed_groups import ClosedGroups, ClosedOutcome
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    ColumnsDropped,
    ColumnsWritten,
    Event,
    GenerationBegan,
    GroupClosed,
    GroupDropped,
    GroupKey,
    GroupsAdmitted,
    GroupTagged,
    ModelResumed,
    PolicyVersionAnnounced,
    PositionCommitted,
    RankCommitted,
    RanksBegan,
    Resized,
    RewardsSet,
    RowSchema,
    RowsStored,
    RunFinished,
    SchemaFixed,
    TagSharesLapsed,
    TagWait,
    TrajectoryAborted,
)
from gristmill_service.run.machine.groups import NOTHING, Group, Released, by_group

START = Position(0)
GIVEN_UP = "given up: "
"""Starts the failure reason of a batch that a resuming trainer skipped, rather than of one that cannot be built."""
BATCH_FAILED = "batch_failed"
"""The reason under which the groups of a failed batch are dropped."""


@dataclass(slots=True)
class ModelState:
    """The progress of a model's ranks.

    resumed_at: the position where the current incarnation started.
    incarnation: counts from 1, because a call with incarnation 0 is not checked.
    began: the newer incarnations of ranks whose trainers began without resuming all ranks.
    commits: the positions that ranks committed for themselves since the current incarnation started.
    superseded: the launches before the current one.
    furthest: the furthest position that any rank ever reached. Resuming from an older checkpoint does not lower it,
        because a newer checkpoint may still be loaded.
    """

    next: list[Position]
    committed: Position = START
    incarnation: int = 1
    launch: str = ""
    resumed_at: Position = START
    superseded: set[str] = field(default_factory=set)
    furthest: Position = START
    began: dict[int, int] = field(default_factory=dict)
    commits: dict[int, Position] = field(default_factory=dict)

    @property
    def latest(self) -> int:
        return max([self.incarnation, *self.began.values()])

    @property
    def resumes(self) -> int:
        """The number of launches that resumed. A change of `dp_size` by the other model's trainer has no launch."""
        return len(self.superseded | {self.launch}) - 1

    def has_trainer(self, incarnation: int) -> bool:
        """Returns whether at least one rank trains under this incarnation."""
        has_resumed = incarnation == self.incarnation and len(self.began) < len(self.next)
        return has_resumed or incarnation in self.began.values()


@dataclass(slots=True)
class TagGroups:
    """The number of groups of one tag in each state. `open` includes complete groups. `sealed` excludes the groups of
    failed batches whose rows were dropped."""

    open: int = 0
    complete: int = 0
    sealed: int = 0
    dropped: int = 0


@dataclass(slots=True)
class State:
    """The state of a run.

    open: the admitted groups that are not sealed, in order of admission.
    complete: the keys of the complete groups among them, in order of completion.
    surplus: how many samples of each group may be left out.
    closed: the sealed and dropped groups. Sealed ones are archived when their batch is freed.
    next_round: the round after the highest of any group that was ever begun.
    tags: the group counts of every tag that was ever used.
    tag_wait: the time since when only `tag_shares` keeps the next batch from being sealed; None if it does not.
    tags_lapsed: whether the next batch is sealed without regard to `tag_shares`.
    batches: the sealed batches that are not freed.
    prompts: the number of groups of every batch ever sealed, by batch number.
    failed: the reason why each failed batch could not be built. A failed batch is also in `batches` while its rows are
        kept, because it may be built for another number of ranks.
    freed: every batch before this number is freed, or failed without its rows being kept.
    renewed: all policy ranks had acknowledged every batch before this number when the policy version was announced.
    groups_sealed: the number of groups in all sealed batches, except failed batches whose rows were dropped.
    reasons: the reasons for which trajectories were aborted, groups dropped and batches given up.
    completions, completed_bytes: how many times a group became complete, and the total bytes of those groups.
    now: the time of the last event that has one, in seconds on the run's clock.
    generation: 1 plus the number of rollbacks, in which the log lost events that were already confirmed.
    rollbacks: for each rollback, the furthest known position of each model's ranks.
    records: the figures of all published batches, oldest first.
    baselines: the running baselines after all batches that were ever published, in the order in which they first were.
    """

    dp_size: int
    surplus: int
    epochs: int
    models: dict[Model, ModelState]
    closed: ClosedGroups
    open: dict[GroupKey, Group] = field(default_factory=dict)
    complete: dict[GroupKey, None] = field(default_factory=dict)
    next_round: int = 0
    tags: dict[str, TagGroups] = field(default_factory=dict)
    tag_wait: float | None = None
    tags_lapsed: bool = False
    batches: dict[int, Batch] = field(default_factory=dict)
    prompts: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    freed: int = 0
    renewed: int = 0
    schema: RowSchema = field(default_factory=RowSchema)
    policy_version: int = 0
    finished: bool = False
    row_bytes: int = 0
    shard_bytes: int = 0
    rows_accepted: int = 0
    groups_sealed: int = 0
    groups_dropped: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)
    completions: int = 0
    completed_bytes: int = 0
    now: float = 0.0
    generation: int = 1
    rollbacks: list[dict[Model, Position]] = field(default_factory=list)
    records: list[Figures] = field(default_factory=list)
    baselines: dict[BaselineKey, float] = field(default_factory=dict)

    @classmethod
    def initial(cls, config: RunConfig, run_id: str = "") -> State:
        models = {model: ModelState([START] * config.dp_size) for model in config.models}
        return cls(config.dp_size, config.surplus, config.update_epochs_per_batch, models, ClosedGroups(run_id))

    def outcomes(self, keys: Iterable[GroupKey]) -> dict[GroupKey, ClosedOutcome]:
        """Returns the outcome of each closed group among these."""
        return self.closed.outcomes(key for key in keys if key not in self.open)

    @property
    def batches_sealed(self) -> int:
        return len(self.prompts)

    @property
    def batches_made(self) -> int:
        """The lowest batch number that has neither failed nor been published for training."""
        unmade = (
            number
            for number, batch in self.batches.items()
            if number not in self.failed and (not batch.mini_batches or batch.awaits)
        )
        return min(unmade, default=len(self.prompts))

    @property
    def batches_to_build(self) -> list[int]:
        """Batches without shards, and batches whose awaited columns have all been written."""
        return [
            number
            for number, batch in self.batches.items()
            if number not in self.failed and (not batch.is_published or (batch.awaits and self.is_written(number)))
        ]

    @property
    def batches_awaiting(self) -> list[int]:
        """Batches whose forward shards are published and whose columns are not all written."""
        return [
            number
            for number, batch in self.batches.items()
            if batch.is_published and batch.awaits and not self.is_written(number)
        ]

    def lacking(self, number: int) -> int:
        """Returns how many columns the batch's shards still wait for."""
        batch = self.batches[number]
        shards = (batch.mini_batches or {}).get("policy", 0) * self.dp_size
        return shards * len(batch.awaits) - len(batch.written) if batch.awaits else 0

    def is_written(self, number: int) -> bool:
        """Returns whether all awaited columns of the batch are written."""
        return not self.lacking(number)

    def missing(self, number: int, ranks: Collection[int] = ()) -> list[ColumnPlace]:
        """Returns the columns that trainers still have to write for these ranks of the batch; no ranks means all."""
        batch = self.batches[number]
        asked = sorted(set(ranks) & set(range(self.dp_size))) if ranks else range(self.dp_size)
        return [place for place in batch.places(asked) if place not in batch.written]

    def is_dropped(self, number: int) -> bool:
        """Returns whether the batch failed and its rows were dropped, so that it will never be built."""
        return number in self.failed and number not in self.batches

    @property
    def batches_kept(self) -> list[int]:
        """Batches that failed for this number of ranks, and may be built for another one."""
        return [number for number in self.batches if number in self.failed]

    @property
    def groups_buffered(self) -> int:
        """The number of groups in batches that are sealed and not freed."""
        return sum(batch.prompts for batch in self.batches.values())


T = TypeVar("T")
Decision = tuple[Sequence[Event], Callable[[State], T]]
"""The result of a decision: its events, and a function that computes the call's answer from the state once the events
and their consequences are applied."""


def apply(state: State, event: Event) -> Released:
    """Applies an event to the state. Returns the rows that it releases."""
    match event:
        case RowsStored():
            return _store_rows(state, event)
        case GroupsAdmitted(groups, at):
            for new in groups:
                group = state.open[new.key] = Group(new.key, new.samples, at, state.surplus, new.tag)
                _count_tag(state, group, opened=1)
                state.next_round = max(state.next_round, new.key.round + 1)
            state.now = at
        case GroupTagged(key, tag):
            group = state.open[key]
            group.tag = tag
            _count_tag(state, group, opened=1, completed=int(key in state.complete))
        case TagWait(since):
            state.tag_wait = since
        case TagSharesLapsed():
            state.tags_lapsed = True
        case SchemaFixed(schema):
            state.schema = schema
        case RewardsSet():
            _set_rewards(state, event)
        case TrajectoryAborted(trajectory, reason, attempt):
            state.reasons.setdefault(reason)
            group = state.open[GroupKey(trajectory.round, trajectory.uid)]
            return _shrink(state, group, lambda: group.abort(trajectory.sample, reason, attempt))
        case GroupClosed(key, reason):
            group = state.open[key]
            return _shrink(state, group, lambda: group.close(reason))
        case GroupDropped():
            return _drop_group(state, event)
        case PolicyVersionAnnounced(version):
            state.policy_version = version
            state.renewed = min(state.models["policy"].next).batch
        case RunFinished():
            state.finished = True
        case Resized(dp_size):
            state.dp_size = dp_size
            for model in state.models.values():
                model.next = [min(model.next)] * dp_size
        case BatchSealed() | BatchPublished() | BatchWithdrawn() | BatchFailed() | BatchFreed():
            return _apply_batch(state, event)
        case ColumnsWritten(number, columns):
            batch = state.batches[number]
            batch.written.update(columns)
            batch.written_ranks = state.dp_size
            state.row_bytes += sum(column.nbytes for column in columns.values())
        case ColumnsDropped(number):
            return _drop_columns(state, number)
        case BatchGivenUp():
            return _give_up_batch(state, event)
        case GenerationBegan(generation, reached):
            # The generations in between were rolled back as well, and left no events.
            state.rollbacks += [dict(reached) for _ in range(state.generation, generation)]
            state.generation = generation
        case Acknowledged() | PositionCommitted() | RankCommitted() | RanksBegan() | ModelResumed():
            _apply_progress(state, event)
    return NOTHING


def _store_rows(state: State, event: RowsStored) -> Released:
    parts: list[Released] = []
    for key, rows in by_group(event.rows):
        group = state.open[key]
        before = group.nbytes
        for row in rows:
            if (released := group.store(row)) is not NOTHING:
                parts.append(released)
            _note_completion(state, group)
        state.row_bytes += group.nbytes - before
    state.rows_accepted += len(event.rows)
    return Released.of(parts) if parts else NOTHING


def _set_rewards(state: State, event: RewardsSet) -> None:
    for reward in event.rewards:
        group = state.open[GroupKey(reward.trajectory.round, reward.trajectory.uid)]
        group.set_reward(reward)
        state.row_bytes += len(reward.token_values)
        _note_completion(state, group)


def _shrink(state: State, group: Group, shrink: Callable[[], Released]) -> Released:
    before, was_complete = group.nbytes, group.key in state.complete
    released = shrink()
    state.row_bytes += group.nbytes - before
    _note_completion(state, group)
    if was_complete and group.is_complete:
        # Its surplus is not part of the group.
        state.completed_bytes += group.nbytes - before
    return released


def _note_completion(state: State, group: Group) -> None:
    if not group.is_complete:
        # A higher attempt may make a complete group incomplete.
        if group.key in state.complete:
            del state.complete[group.key]
            _count_tag(state, group, completed=-1)
    elif group.key not in state.complete:
        state.complete[group.key] = None
        _count_tag(state, group, completed=1)
        state.completions += 1
        state.completed_bytes += group.nbytes


def _count_tag(
    state: State, group: Group, *, opened: int = 0, completed: int = 0, sealed: int = 0, dropped: int = 0
) -> None:
    """Adds these numbers to the counts of the group's tag."""
    if group.tag:
        counts = state.tags.setdefault(group.tag, TagGroups())
        counts.open += opened
        counts.complete += completed
        counts.sealed += sealed
        counts.dropped += dropped


def _drop_group(state: State, event: GroupDropped) -> Released:
    group = state.open.pop(event.group)
    _count_tag(state, group, opened=-1, completed=-int(event.group in state.complete), dropped=1)
    state.complete.pop(event.group, None)
    state.reasons.setdefault(event.reason)
    state.closed.drop([group], event.reason, len(state.prompts))
    state.groups_dropped[event.reason] = state.groups_dropped.get(event.reason, 0) + 1
    state.row_bytes -= group.nbytes
    return group.released()


def _apply_batch(
    state: State, event: BatchSealed | BatchPublished | BatchWithdrawn | BatchFailed | BatchFreed
) -> Released:
    match event:
        case BatchSealed(number, keys, version, _):
            groups = [state.open.pop(key) for key in keys]
            for group in groups:
                _count_tag(state, group, opened=-1, completed=-1, sealed=1)
                del state.complete[group.key]
                state.closed.seal(group, number)
            state.tag_wait, state.tags_lapsed = None, False
            state.batches[number] = Batch(version, len(keys), groups)
            state.prompts.append(len(keys))
            state.groups_sealed += len(keys)
            return NOTHING
        case BatchPublished(number, mini_batches, nbytes, awaits, record, baselines):
            if record is not None:
                keep(state.records, record)
            batch = state.batches[number]
            # A batch that is built again begins with the same baselines, and does not change them again.
            if baselines is not None and batch.baselines is None:
                batch.baselines, state.baselines = state.baselines, dict(baselines)
            # The new shards replace the batch's forward shards, if there are any.
            state.shard_bytes += nbytes - batch.nbytes
            batch.mini_batches, batch.nbytes, batch.is_published = dict(mini_batches), nbytes, True
            batch.awaits = awaits
            return NOTHING
        case BatchWithdrawn(number):
            _withdraw_shards(state, number)
            state.failed.pop(number, None)
            return NOTHING
        case BatchFailed(number, reason, keeps_rows):
            _withdraw_shards(state, number)
            state.failed[number] = reason
            return NOTHING if keeps_rows else _drop_failed_batch(state, number)
        case BatchFreed(number):
            if number in state.failed:
                return _drop_failed_batch(state, number)
            state.closed.archive_groups(group.key for group in state.batches[number].groups)
            return _remove_batch(state, number)


def _withdraw_shards(state: State, number: int) -> None:
    batch = state.batches[number]
    state.shard_bytes -= batch.nbytes
    batch.nbytes, batch.is_published = 0, False


def _drop_columns(state: State, number: int) -> Released:
    batch = state.batches[number]
    released = batch.written_refs()
    state.row_bytes -= sum(column.nbytes for column in batch.written.values())
    batch.written = {}
    return Released(released)


def _drop_failed_batch(state: State, number: int) -> Released:
    prompts = state.batches[number].prompts
    for group in state.batches[number].groups:
        _count_tag(state, group, sealed=-1, dropped=1)
    state.groups_sealed -= prompts
    state.groups_dropped[BATCH_FAILED] = state.groups_dropped.get(BATCH_FAILED, 0) + prompts
    state.closed.drop(state.batches[number].groups, number, len(state.prompts))
    return _remove_batch(state, number)


def _give_up_batch(state: State, event: BatchGivenUp) -> Released:
    batch = state.batches[event.batch]
    for group in batch.groups:
        _count_tag(state, group, sealed=-1, dropped=1)
    state.failed[event.batch] = GIVEN_UP + event.reason
    state.reasons.setdefault(event.reason)
    state.closed.drop(batch.groups, event.reason, len(state.prompts))
    state.groups_dropped[event.reason] = state.groups_dropped.get(event.reason, 0) + batch.prompts
    return _remove_batch(state, event.batch)


def _remove_batch(state: State, number: int) -> Released:
    batch = state.batches.pop(number)
    state.shard_bytes -= batch.nbytes
    state.row_bytes -= batch.row_bytes
    state.freed = min(state.batches, default=len(state.prompts))
    state.closed.archive_dropped(state.freed)
    return Released.of([Released(batch.written_refs()), *(group.released() for group in batch.groups)])


def _apply_progress(
    state: State, event: Acknowledged | PositionCommitted | RankCommitted | RanksBegan | ModelResumed
) -> None:
    model = state.models[event.model]
    match event:
        case Acknowledged(_, rank, following):
            model.next[rank] = following
            model.furthest = max(model.furthest, following)
        case PositionCommitted(_, position):
            model.committed = position
        case RankCommitted(_, rank, position):
            model.commits[rank] = position
        case RanksBegan(_, ranks, incarnation, position):
            model.began |= dict.fromkeys(ranks, incarnation)
            for rank in ranks:
                model.commits.pop(rank, None)
                model.next[rank] = model.next[rank] if position is None else position
        case ModelResumed(_, position, incarnation, launch):
            model.next = [position] * len(model.next)
            model.furthest = max(model.furthest, position)
            model.superseded.add(model.launch)
            model.incarnation, model.launch, model.resumed_at = incarnation, launch, position
            model.began, model.commits = {}, {}
    # A trainer that resumes at an earlier position trains the batches after it again.
    state.renewed = min(state.renewed, min(state.models["policy"].next).batch)
