"""One run, thread-safe: decide, log, apply, tell. Every call of the API ends here.

A call reads the state and gets events from the modules that know the rules, appends them to the run's book, and applies
them, all under one lock. Work per token (writing rows down, digests, gathering, the pipeline) happens outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from gristmill._wire.row_codec import Prefixes
from gristmill._wire.steps import Steps, TrajectoryKey, check_text
from gristmill.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.config import Model
from gristmill_service.pipeline.shard_address import ShardAddress
from gristmill_service.run import prefix_expansion
from gristmill_service.run.kept import with_dp_size
from gristmill_service.run.machine import aborts, admission, ingest, progress, sealing
from gristmill_service.run.machine.admission import Room
from gristmill_service.run.machine.answers import (
    Admission,
    Admissions,
    BatchAnswer,
    BatchState,
    GroupAnswer,
    Outcome,
    Position,
    Resumed,
    RewardUpdate,
    RunStatus,
    Sealed,
    ShardAnswer,
)
from gristmill_service.run.machine.events import (
    GroupDropped,
    GroupKey,
    GroupsAdmitted,
    PolicyVersionAnnounced,
    RunFinished,
)
from gristmill_service.run.machine.rewards import take_rewards
from gristmill_service.run.machine.row_schema import check_schema
from gristmill_service.run.machine.state import State
from gristmill_service.run.machine.status import status
from gristmill_service.run.making import MakingRun
from gristmill_service.run.row_buffer import values_digest
from gristmill_service.storage.run_store import LogLostError

T = TypeVar("T")


class Run(MakingRun):
    """See `KeptRun` for what a run is made of."""

    # --- Rollout workers

    def begin_groups(self, round_: int, uids: Sequence[str]) -> Admissions:
        if round_ < 0 or "" in uids:
            raise InvalidArgumentError(
                f"round is {round_} and uids are {list(uids)!r}; round is at least 0, no uid is empty"
            )
        for uid in uids:
            check_text(uid, "uid")
        keys = [GroupKey(round_, uid) for uid in uids]
        with self._deciding() as state:
            room = self._room()
            found, admitted = admission.begin(state, keys, len(keys) if state.finished else room.groups)
            if admitted and state.finished:
                raise ingest.finished()
            if admitted:
                self._commit([GroupsAdmitted(tuple(admitted), self._now())])
            self.monitor.asked_for_groups(Admission.NO_ROOM not in found)
        if Admission.NO_ROOM in found:
            return Admissions(found, admission.RETRY_AFTER_S, room.reason)
        return Admissions(found)

    def made_whole(self, steps: Steps, prefixes: Prefixes) -> Steps:
        """Rows that came without the tokens that the steps before them begin with, with those.

        Raises PrefixUnknownError where such a step is not at hand.
        """
        with self._locked() as state:
            self._check_open()
            before = self._rows.pick(prefix_expansion.rows_before(state, steps, prefixes))
        return prefix_expansion.made_whole(steps, prefixes, before)

    def submit(self, steps: Steps) -> list[Outcome]:
        if not len(steps):
            return []
        self._check_open()
        number, steps = self._book.put(steps)
        is_kept = False
        try:
            rows = ingest.describe_rows(steps, number)
            with self._deciding() as state:
                form = check_schema(steps, state.form, self.config)
                outcomes, events = ingest.take_rows(state, self.config, rows, form, self._room, self._now())
                self._duplicates += outcomes.count(Outcome.DUPLICATE)
                if accepted := [row for row, outcome in enumerate(outcomes) if outcome is Outcome.ACCEPTED]:
                    self._rows.add(number, steps, accepted)
                    # Where it is not known whether they were logged, they may have been.
                    is_kept = True
                    try:
                        self._commit(events)
                    except UnavailableError as error:
                        self._rows.drop(number)
                        is_kept = isinstance(error, LogLostError)
                        raise
        finally:
            if not is_kept:
                self._book.remove([number])
        return outcomes

    def set_rewards(self, rewards: Sequence[RewardUpdate]) -> int:
        digests = [b"" if update.token_values is None else values_digest(update.token_values) for update in rewards]
        with self._deciding() as state:
            changed, events = take_rewards(state, rewards, digests)
            self._commit(events)
        return changed

    def abort_trajectories(self, trajectories: Sequence[TrajectoryKey], reason: str) -> int:
        with self._deciding() as state:
            aborted, dropped = aborts.abort_trajectories(state, trajectories, reason)
            self._commit([*aborted, *dropped])
        return len(aborted)

    def abort_groups(self, round_: int, uids: Sequence[str], reason: str) -> int:
        with self._deciding() as state:
            dropped = aborts.abort_groups(state, [GroupKey(round_, uid) for uid in uids], reason)
            self._commit(dropped)
        return len(dropped)

    def seal(self, batch: int | None) -> Sealed:
        with self._deciding() as state:
            if batch is not None and 0 <= batch < state.batches_sealed:
                return Sealed(batch, state.prompts[batch])
            number = state.batches_sealed
            if batch is not None and batch != number:
                raise FailedPreconditionError(f"batch {batch} cannot be sealed, the next is {number}; seal that")
            self._commit([sealing.seal_now(state, self.config)])
            return Sealed(number, state.prompts[number])

    def finish(self) -> int:
        with self._deciding() as state:
            if not state.finished:
                incomplete = [key for key in state.open if key not in state.complete]
                self._commit([RunFinished(), *(GroupDropped(key, "finished") for key in incomplete)])
            return state.batches_sealed + sealing.remaining_batches(state, self.config)

    # --- Trainer ranks

    @property
    def policy_version(self) -> int:
        self._check_open()
        return self._state.policy_version

    def announce(self, version: int) -> None:
        with self._deciding() as state:
            if version < state.policy_version:
                raise FailedPreconditionError(
                    f"policy version {version} is lower than the current {state.policy_version}; versions never go back"
                )
            if version > state.policy_version:
                self._commit([PolicyVersionAnnounced(version)])

    def batch(self, number: int) -> BatchAnswer:
        with self._deciding() as state:
            found = progress.batch_state(state, number)
        if found is not BatchState.PUBLISHED:
            return BatchAnswer(found)
        try:
            return BatchAnswer(found, self._store.plan(self.name, number))
        except NotFoundError:
            self._check_published(number)
            return BatchAnswer(BatchState.PENDING)

    def shard(self, model: Model, rank: int, position: Position | None, incarnation: int) -> ShardAnswer:
        with self._deciding() as state:
            progress.check_rank(state, model, rank)
            progress.check_incarnation(state, model, incarnation)
            self.monitor.asked_for_shard(state, model, rank)
            current = state.models[model].incarnation
            position = progress.next_of(state, model, rank) if position is None else position
            found = progress.batch_state(state, position.batch)
            if found is not BatchState.PUBLISHED:
                return ShardAnswer(found, position, incarnation=current)
            progress.check_mini_batch(state, model, position)
        address = ShardAddress(model, position.mini_batch, rank)
        try:
            location = self._store.locate(self.name, position.batch, address)
        except NotFoundError:
            self._check_published(position.batch)
            return ShardAnswer(BatchState.PENDING, position, incarnation=current)
        self.monitor.gave_shard(model, rank, location.size)
        return ShardAnswer(found, position, address, location, current)

    def _check_published(self, number: int) -> None:
        """For a batch that was published a moment ago and is not in the store: returns where it was withdrawn, to come
        again. Raises NotFoundError where it was freed."""
        with self._deciding() as state:
            if progress.batch_state(state, number) is BatchState.PUBLISHED:
                raise UnavailableError(f"batch {number} is not to be found at this moment; ask again")

    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]:
        self._check_open()
        return self._store.read(self.name, batch, address)

    def read_compact_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """Its compact form, or None where the store has whole files only."""
        self._check_open()
        return self._store.read_compact(self.name, batch, address)

    def acknowledge(self, model: Model, rank: int, position: Position, incarnation: int, commit: bool) -> Position:
        with self._deciding() as state:
            progress.check_rank(state, model, rank)
            progress.check_incarnation(state, model, incarnation)
            self._commit(progress.acknowledge(state, model, rank, position))
            if commit:
                self._commit(progress.commit_acknowledged(state, model))
            return progress.next_of(state, model, rank)

    def commit(self, model: Model, position: Position, incarnation: int) -> Position:
        with self._deciding() as state:
            progress.check_incarnation(state, model, incarnation)
            self._commit(progress.commit(state, model, position))
            return state.models[model].committed

    def resume(self, model: Model, position: Position | None, launch: str, dp_size: int = 0) -> Resumed:
        """dp_size: 0 for as many ranks as before."""
        with self._deciding() as state:
            dp_size = dp_size or state.dp_size
            with_dp_size(self.created_with, dp_size)
            self._commit(progress.resume(state, model, position, launch, dp_size))
            current = state.models[model]
            return Resumed(current.incarnation, current.resumed_at)

    # --- Everyone

    def status(self) -> RunStatus:
        with self._deciding() as state:
            return status(
                state,
                run=self.name,
                config_json=self.config_json,
                room=self._room().groups,
                duplicates=self._duplicates,
            )

    def read(self, function: Callable[[State, Room], T]) -> T:
        """The function's answer to the state as it is now, under its lock: it does no I/O. Also of a closed run."""
        with self._lock:
            return function(self._state, self._room())

    @property
    def unhealthy_reason(self) -> str:
        """Why a sealed batch cannot be published now; empty while all can be."""
        return self.trouble

    @property
    def log_bytes(self) -> int:
        """The size of the run's log of events."""
        return self._book.log_bytes

    @property
    def lease(self) -> float | None:
        """Seconds for which this process still decides; None where it needs no lease."""
        return self._book.lease

    def groups(self) -> list[GroupAnswer]:
        """Every group that was ever admitted; the decided ones first."""
        with self._deciding() as state:
            closed, failed = list(state.closed.items()), dict(state.failed)
            waiting = [GroupAnswer(*key, "complete" if key in state.complete else "open") for key in state.open]
        return [_decided(key, found, failed) for key, found in closed] + waiting


def _decided(key: GroupKey, found: int | str, failed: Mapping[int, str]) -> GroupAnswer:
    if isinstance(found, str):
        return GroupAnswer(*key, "dropped", reason=found)
    if found in failed:
        return GroupAnswer(*key, "dropped", found, "batch_failed")
    return GroupAnswer(*key, "sealed", found)
