"""Accept columns that trainers write for a batch that waits for them. Reads the state, returns events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gristmill.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from gristmill_service.run.machine.answers import ColumnPlace
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.events import ColumnsWritten, WrittenColumn
from gristmill_service.run.machine.state import Decision, State


def write_columns(
    state: State,
    number: int,
    incarnation: int,
    columns: Mapping[ColumnPlace, WrittenColumn],
    siblings: frozenset[ColumnPlace],
) -> Decision[int | None]:
    """Stores columns of one policy shard. The answer is the number of columns that the batch's shards still wait for.
    The answer is None, and nothing is stored, if other columns of the shard were written since these were checked,
    because the columns of a shard are checked together.

    siblings: the columns of the shard that were written when these were checked.
    """
    digests = {place: column.digest for place, column in columns.items()}
    new = unwritten(state, number, incarnation, digests)
    if not new:
        return [], lambda after: after.lacking(number) if number in after.batches else 0
    if written_siblings(state, number, new) != siblings:
        return [], lambda _: None
    written = ColumnsWritten(number, {place: columns[place] for place in new})
    return [written], lambda after: after.lacking(number) if number in after.batches else 0


def written_siblings(state: State, number: int, places: Iterable[ColumnPlace]) -> frozenset[ColumnPlace]:
    """Returns the columns that are already written for the shards of these places."""
    batch, shards = state.batches.get(number), {place[:2] for place in places}
    return frozenset(place for place in (batch.written if batch else ()) if place[:2] in shards)


def unwritten(state: State, number: int, incarnation: int, digests: Mapping[ColumnPlace, bytes]) -> list[ColumnPlace]:
    """Returns the columns that are not written yet. digests: the digest of each received column.

    Raises AlreadyExistsError if a column was written with other bytes, UnavailableError while the shards are being
    built, and FailedPreconditionError if the batch waits for no columns, or if it is ahead of the ranks after a
    rollback.
    """
    if not incarnation:
        raise InvalidArgumentError(
            "incarnation is 0, but columns are written under an incarnation of the trainer; send the incarnation that "
            "was returned with the shard"
        )
    progress.check_incarnation(state, "policy", incarnation)
    progress.batch_state(state, number)
    batch = state.batches.get(number)
    if batch is None or batch.mini_batches is None:
        progress.check_not_ahead(state, "policy", {place.rank for place in digests}, number)
        raise UnavailableError(f"batch {number} has no forward shards yet; read them before you write their columns")
    for place in digests:
        progress.check_rank(state, "policy", place.rank)
        count = batch.mini_batches.get("policy", 0)
        if not 0 <= place.mini_batch < count:
            raise InvalidArgumentError(
                f"mini-batch {place.mini_batch} does not exist: batch {number} has {count} policy mini-batches; send "
                f"one of 0..{count - 1}"
            )
    new = [place for place in digests if place not in batch.written]
    for place in digests.keys() - set(new):
        if batch.written[place].digest != digests[place]:
            raise AlreadyExistsError(
                f"batch {number} mini-batch {place.mini_batch} rank {place.rank}: {place.column} was already written "
                "with other values; resume first, if the trainer was restarted"
            )
    if new and not batch.is_published:
        raise UnavailableError(f"batch {number}: its forward shards are being republished; retry after that")
    if new and not batch.awaits:
        raise FailedPreconditionError(f"batch {number} already has all columns that trainers write; train on it")
    return new
