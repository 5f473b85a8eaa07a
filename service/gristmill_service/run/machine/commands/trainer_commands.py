"""The commands of trainers, and of the worker that builds batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gristmill._wire.steps import check_text
from gristmill.errors import FailedPreconditionError
from gristmill_service.config import Model, RunConfig, with_dp_size
from gristmill_service.run.machine.answers import ColumnPlace, Moved, Position, Resumed
from gristmill_service.run.machine.commands.command import Command, View
from gristmill_service.run.machine.decisions import columns as written_columns
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.decisions.resume import resume
from gristmill_service.run.machine.events import (
    BatchFailed,
    BatchPublished,
    BatchWithdrawn,
    ColumnsWritten,
    Event,
    PolicyVersionAnnounced,
    WrittenColumn,
)
from gristmill_service.run.machine.state import State


class AnnounceVersion(Command[None]):
    def __init__(self, version: int) -> None:
        self._version = version

    def decide(self, view: View) -> Sequence[Event]:
        current = view.state.policy_version
        if self._version < current:
            raise FailedPreconditionError(
                f"policy version {self._version} is lower than the current {current}; versions never go back"
            )
        return [PolicyVersionAnnounced(self._version)] if self._version > current else []

    def answer(self, state: State) -> None:
        pass


class Acknowledge(Command[Moved]):
    """commits: whether to commit up to where every rank is, as a trainer without checkpoints asks for."""

    def __init__(self, model: Model, rank: int, position: Position, incarnation: int, commits: bool) -> None:
        self.follows = commits
        self._model, self._rank, self._position, self._incarnation = model, rank, position, incarnation

    def decide(self, view: View) -> Sequence[Event]:
        progress.check_caller(view.state, self._model, self._rank, self._incarnation)
        return progress.acknowledge(view.state, self._model, self._rank, self._position)

    def follow(self, state: State) -> Sequence[Event]:
        return progress.commit_acknowledged(state, self._model)

    def answer(self, state: State) -> Moved:
        return Moved(progress.next_of(state, self._model, self._rank), state.generation)


class Commit(Command[Moved]):
    def __init__(self, model: Model, position: Position, incarnation: int) -> None:
        self._model, self._position, self._incarnation = model, position, incarnation

    def decide(self, view: View) -> Sequence[Event]:
        progress.check_incarnation(view.state, self._model, self._incarnation)
        return progress.commit(view.state, self._model, self._position)

    def answer(self, state: State) -> Moved:
        return Moved(state.models[self._model].committed, state.generation)


class Checkpoint(NamedTuple):
    """What a trainer comes back with. position: None for the committed one. run_id, generation: "" and 0 where they are
    not known. give_up_reason: why groups are dropped that the position steps over; "" refuses such a position."""

    position: Position | None
    run_id: str = ""
    generation: int = 0
    give_up_reason: str = ""


class Resume(Command[Resumed]):
    """dp_size: 0 for as many ranks as before. run_id: of this run."""

    def __init__(self, model: Model, checkpoint: Checkpoint, launch: str, dp_size: int, run_id: str) -> None:
        self._model, self._checkpoint, self._launch = model, checkpoint, launch
        self._dp_size, self._run_id = dp_size, run_id

    def decide(self, view: View) -> Sequence[Event]:
        given = self._checkpoint
        check_text(given.run_id, "run_id")
        if given.run_id not in ("", self._run_id):
            raise FailedPreconditionError(
                f"the checkpoint is of another run of this name, run_id {given.run_id}, and this one has "
                f"{self._run_id}: that run was deleted since; start without the checkpoint's state, or restore that run"
            )
        dp_size = self._dp_size or view.state.dp_size
        with_dp_size(view.config, dp_size)
        return resume(
            view.state, self._model, given.position, self._launch, dp_size, given.generation, given.give_up_reason
        )

    def answer(self, state: State) -> Resumed:
        own = state.models[self._model]
        return Resumed(own.incarnation, own.resumed_at, self._run_id, state.generation)


class WriteColumns(Command[int | None]):
    """A trainer wrote columns for one of the policy's shards. Answers how many the batch lacks then, of all shards;
    None, and takes nothing, where others were written for the shard since: what came has to be judged beside them.

    beside: those that were there when it was judged.
    """

    def __init__(
        self,
        batch: int,
        incarnation: int,
        columns: Mapping[ColumnPlace, WrittenColumn],
        beside: frozenset[ColumnPlace],
    ) -> None:
        self._batch, self._incarnation, self._columns, self._beside = batch, incarnation, columns, beside
        self._is_judged = True

    def decide(self, view: View) -> Sequence[Event]:
        digests = {place: column.digest for place, column in self._columns.items()}
        new = written_columns.unwritten(view.state, self._batch, self._incarnation, digests)
        self._is_judged = not new or written_columns.beside(view.state, self._batch, new) == self._beside
        if not new or not self._is_judged:
            return []
        return [ColumnsWritten(self._batch, {place: self._columns[place] for place in new})]

    def answer(self, state: State) -> int | None:
        if not self._is_judged:
            return None
        return state.lacking(self._batch) if self._batch in state.batches else 0


class WithdrawBatch(Command[bool]):
    """The store has lost shards of a batch: it is built anew, from its rows. Answers whether it was published."""

    is_internal = True

    def __init__(self, number: int) -> None:
        self._number, self._was_published = number, False

    def decide(self, view: View) -> Sequence[Event]:
        batch = view.state.batches.get(self._number)
        self._was_published = batch is not None and batch.is_published
        return [BatchWithdrawn(self._number)] if self._was_published else []

    def answer(self, state: State) -> bool:
        return self._was_published


class RecordBatch(Command[bool]):
    """What became of a batch that was built for this configuration, of what was written for it (None: of its rows
    alone). Answers whether it is recorded: it is not where the batch is gone, or is to be built for another number of
    ranks, or of what is written anew."""

    is_internal = True

    def __init__(
        self,
        event: BatchPublished | BatchFailed,
        built_with: RunConfig,
        written: Mapping[ColumnPlace, WrittenColumn] | None = None,
    ) -> None:
        self._event, self._built_with, self._written, self._is_wanted = event, built_with, written, False

    def decide(self, view: View) -> Sequence[Event]:
        batch = view.state.batches.get(self._event.batch)
        is_same = batch is not None and self._written in (None, batch.written)
        self._is_wanted = is_same and view.state.dp_size == self._built_with.dp_size
        return [self._event] if self._is_wanted else []

    def answer(self, state: State) -> bool:
        return self._is_wanted
