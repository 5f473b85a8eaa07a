"""What trainers may write for a batch that waits for columns. Reads the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gristmill.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from gristmill_service.run.machine.answers import ColumnPlace
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.state import State


def beside(state: State, number: int, places: Iterable[ColumnPlace]) -> frozenset[ColumnPlace]:
    """What is written of the shards that these places are of: by which what comes is judged."""
    batch, shards = state.batches.get(number), {place[:2] for place in places}
    return frozenset(place for place in (batch.written if batch else ()) if place[:2] in shards)


def unwritten(state: State, number: int, incarnation: int, digests: Mapping[ColumnPlace, bytes]) -> list[ColumnPlace]:
    """The columns that are not there yet; of the others the same bytes are there. digests: of what comes.

    Raises AlreadyExistsError where other bytes are there, UnavailableError where the shards are being built, and
    FailedPreconditionError where the batch waits for nothing, or was the ranks' before a rollback.
    """
    if not incarnation:
        raise InvalidArgumentError(
            "incarnation is 0; columns are written under an incarnation of the trainer; give the one that came with "
            "the shard"
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
                f"batch {number} has {count} policy mini-batches; there is no mini-batch {place.mini_batch}"
            )
    new = [place for place in digests if place not in batch.written]
    for place in digests.keys() - set(new):
        if batch.written[place].digest != digests[place]:
            raise AlreadyExistsError(
                f"batch {number} mini-batch {place.mini_batch} rank {place.rank}: {place.column} was written before "
                "with other values; a trainer that was started again has to resume before it writes columns anew"
            )
    if new and not batch.is_published:
        raise UnavailableError(
            f"batch {number}: its forward shards are being published again; write the columns when they are"
        )
    if new and not batch.awaits:
        raise FailedPreconditionError(f"batch {number} has all columns that trainers write; train it")
    return new
