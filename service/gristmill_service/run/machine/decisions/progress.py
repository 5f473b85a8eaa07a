"""The progress of ranks through batches: the order of positions, acknowledgements and commits.

Reads the state, returns events. A batch that failed, or that has no mini-batches for a model, has no positions and is
skipped. A failed batch whose rows are kept is skipped as well when a rank requests its next position, but the rank's
stored position stays before the batch until the rank acknowledges the batch or a later position.
"""

from __future__ import annotations

from collections.abc import Collection
from zlib import crc32

from gristmill.errors import (
    BatchFailedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    StaleIncarnationError,
)
from gristmill_service.config import Model
from gristmill_service.run.machine.answers import BatchState, Moved, Position
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFreed,
    Event,
    PolicyVersionAnnounced,
    PositionCommitted,
    RankCommitted,
)
from gristmill_service.run.machine.state import Decision, ModelState, State

# Each generation starts its incarnations at a number of its own, and each run in the lower half of a generation.
_INCARNATION_BITS = 20


def model_state(state: State, model: Model) -> ModelState:
    if model not in state.models:
        raise InvalidArgumentError(
            f"model {model} does not exist in this run; use {', '.join(state.models)}, or set critic_mini_batch_size "
            "to train a critic"
        )
    return state.models[model]


def check_rank(state: State, model: Model, rank: int) -> None:
    size = len(model_state(state, model).next)
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank {rank} does not exist with dp_size {size}; use 0..{size - 1}")


def check_caller(state: State, model: Model, rank: int, incarnation: int, *, acks: bool = False) -> None:
    """Rejects an old incarnation, then an unknown rank, so that a rank of an older, larger launch gets the error about
    its incarnation. acks: whether the caller acknowledges for the rank; other callers may read the rank's shards."""
    check_incarnation(state, model, incarnation)
    check_rank(state, model, rank)
    own = model_state(state, model)
    began = own.began.get(rank, 0)
    if incarnation and incarnation < began and (acks or incarnation > own.incarnation):
        raise superseded(model, incarnation, began, f"another trainer of rank {rank} started")


def superseded(model: Model, incarnation: int, by: int, why: str) -> StaleIncarnationError:
    return StaleIncarnationError(
        f"{model}: incarnation {incarnation} was superseded by {by}: {why}; end this process, or resume again"
    )


def check_incarnation(state: State, model: Model, incarnation: int) -> None:
    """Rejects an incarnation that is superseded or was never assigned; 0 is not checked."""
    own = model_state(state, model)
    current = own.latest
    if incarnation and incarnation < own.incarnation:
        raise superseded(model, incarnation, own.incarnation, "the trainer was resumed elsewhere")
    if incarnation > current:
        why = "it may be of another run, or of a deleted run of this name"
        if state.generation > 1:
            why = f"its log was rolled back (generation {state.generation})"
        raise FailedPreconditionError(
            f"{model}: incarnation {incarnation} is unknown in this run, and the current one is {current}: {why}; "
            "resume first"
        )


def next_incarnation(state: State, model: Model, run_id: str) -> int:
    """Returns an incarnation that was never used, not even by a generation that was rolled back.

    Its first number depends on the run's id, so that trainers of a deleted run of this name, which may still be
    running, are refused: two runs use the same numbers once in half a million times.
    """
    of_run = crc32(run_id.encode()) >> (32 - _INCARNATION_BITS + 1)
    return max(state.models[model].latest, ((state.generation - 1) << _INCARNATION_BITS) + of_run) + 1


def batch_state(state: State, number: int) -> BatchState:
    """Returns the batch's state. Raises BatchFailedError or NotFoundError for a batch that will never be available
    again."""
    if number < 0:
        raise InvalidArgumentError(f"batch {number} does not exist; batches are numbered from 0")
    _check_built(state, number)
    batch = state.batches.get(number)
    if batch is not None:
        if not batch.is_published or (batch.awaits and state.is_written(number)):
            return BatchState.PENDING
        return BatchState.FORWARD if batch.awaits else BatchState.PUBLISHED
    if number < state.batches_sealed:
        later = f"request batch {state.freed} or later"
        raise NotFoundError(f"batch {number} is freed, as every model committed it; {later}")
    _check_not_rolled_back(state, number)
    return BatchState.END if state.finished and not state.complete else BatchState.PENDING


def after_the_end(state: State, number: int) -> NotFoundError:
    """Returns the error of a call for a batch that a finished run does not have."""
    end = state.batches_sealed
    return NotFoundError(f"batch {number} does not exist: the run is finished; request a batch before {end}")


def shard_state(state: State, model: Model, rank: int, position: Position, *, is_forward: bool) -> BatchState:
    """Returns the state of the batch for a rank that requests its shard of a mini-batch. is_forward: whether the caller
    accepts a forward shard.

    Raises InvalidArgumentError if the batch has no such mini-batch.
    """
    result = batch_state(state, position.batch)
    if result is BatchState.FORWARD and not is_forward:
        result = BatchState.PENDING
    if result is BatchState.PENDING:
        check_not_ahead(state, model, [rank], position.batch)
    elif result is not BatchState.END:
        _check_mini_batch(state, model, position)
    return result


def _check_mini_batch(state: State, model: Model, position: Position) -> None:
    """Rejects a mini-batch that a published batch does not have."""
    count = (state.batches[position.batch].mini_batches or {}).get(model, 0)
    if not 0 <= position.mini_batch < count or not 0 <= position.epoch < state.epochs:
        raise InvalidArgumentError(
            f"epoch {position.epoch} mini-batch {position.mini_batch} does not exist: batch {position.batch} has "
            f"{state.epochs} epochs and {count} {model} mini-batches; numbers start at 0"
        )


def settle(state: State, model: Model, position: Position) -> Position:
    """Returns the position if it exists, or the next one that does: a batch may have no positions, or fewer."""
    position = standing(state, model, position)
    while position.batch in state.failed:
        position = standing(state, model, Position(position.batch + 1))
    return position


def standing(state: State, model: Model, position: Position) -> Position:
    """Like `settle`, but does not skip a failed batch whose rows are kept."""
    # A committed position may be at the end of a batch that has been freed since.
    position = max(position, Position(state.freed))
    while True:
        batch = state.batches.get(position.batch)
        if batch is None and position.batch in state.failed:
            position = Position(position.batch + 1)
            continue
        if batch is None or batch.mini_batches is None or position.batch in state.failed:
            return position
        count = batch.mini_batches.get(model, 0)
        if not count or position.epoch >= state.epochs:
            position = Position(position.batch + 1)
        elif position.mini_batch >= count:
            position = Position(position.batch, position.epoch + 1)
        else:
            return position


def next_of(state: State, model: Model, rank: int) -> Position:
    return settle(state, model, model_state(state, model).next[rank])


def acknowledge(
    state: State, model: Model, rank: int, position: Position, incarnation: int, commits: bool, *, alone: bool = False
) -> Decision[Moved]:
    """Moves the rank past the position, which must be its next; changes nothing if the rank is already past it.
    Acknowledging a failed batch skips it. The answer is the rank's next position.

    commits: whether to commit up to the rank that is furthest behind, for a trainer without checkpoints. alone: whether
        to commit for this rank only.
    """
    check_caller(state, model, rank, incarnation, acks=True)
    standing_at = list(state.models[model].next)
    after = _after(state, model, rank, position)
    events: list[Event] = []
    if after is not None:
        events.append(Acknowledged(model, rank, after))
        standing_at[rank] = after
    if commits and alone:
        events += _committed_by_rank(state, model, rank, standing(state, model, standing_at[rank]))
    elif commits:
        events += _committed(state, model, min(standing(state, model, one) for one in standing_at))
    return events, lambda after_all: Moved(next_of(after_all, model, rank), after_all.generation)


def _after(state: State, model: Model, rank: int, position: Position) -> Position | None:
    """Returns the rank's position after acknowledging this one; None if the rank is already past it."""
    expected = next_of(state, model, rank)
    if position < expected:
        is_skipped = standing(state, model, state.models[model].next[rank]) <= position
        return _first_behind(state, model, position.batch) if is_skipped and position.batch in state.failed else None
    _check_built(state, position.batch)
    batch = state.batches.get(position.batch)
    if position != expected or batch is None or batch.mini_batches is None or batch.awaits:
        awaits = f", and waits for {', '.join(batch.awaits)}" if batch is not None and batch.awaits else ""
        raise FailedPreconditionError(
            f"{model} rank {rank}: {text_of(position)} cannot be acknowledged, because the next is {text_of(expected)}"
            + ("" if position != expected else f", which is not published yet{awaits}")
            + "; acknowledge in order"
        )
    return standing(state, model, position._replace(mini_batch=position.mini_batch + 1))


def _first_behind(state: State, model: Model, batch: int) -> Position:
    return standing(state, model, Position(batch + 1))


def commit(
    state: State, model: Model, position: Position, incarnation: int, rank: int | None = None
) -> Decision[Moved]:
    """Raises the committed position; ignores an earlier one. The answer is the committed position.

    rank: the only rank that the caller may commit for; None: it commits for all.
    """
    check_incarnation(state, model, incarnation)
    own = model_state(state, model)
    if incarnation and not own.has_trainer(incarnation):
        raise superseded(model, incarnation, own.latest, "other trainers of its ranks started")
    check_exists(state, model, position)
    _check_trained(state, model, position)
    if rank is None:
        events = _committed(state, model, position)
    else:
        check_caller(state, model, rank, incarnation, acks=True)
        events = _committed_by_rank(state, model, rank, position)
    return events, lambda after: Moved(after.models[model].committed, after.generation)


def _check_trained(state: State, model: Model, position: Position) -> None:
    """Rejects a commit beyond the positions that trainers reached in this generation of the run."""
    reached = max(furthest(state, model), *state.models[model].next)
    if state.generation > 1 and settle(state, model, position) > settle(state, model, reached):
        raise StaleIncarnationError(
            f"{model}: {text_of(position)} cannot be committed: this run's log was rolled back, and generation "
            f"{state.generation} records only the training before {text_of(reached)}, so this trainer is superseded; "
            "end this process, and resume from a checkpoint at or before that position"
        )


def _committed(state: State, model: Model, position: Position) -> list[Event]:
    return [PositionCommitted(model, position)] if position > state.models[model].committed else []


def _committed_by_rank(state: State, model: Model, rank: int, position: Position) -> list[Event]:
    """Commits for one rank, and for the model what all of its ranks have committed."""
    own = state.models[model]
    if position <= max(own.committed, own.commits.get(rank, own.committed)):
        return []
    commits = own.commits | {rank: position}
    by_all = min(commits.get(one, own.committed) for one in range(len(own.next)))
    return [RankCommitted(model, rank, position), *_committed(state, model, by_all)]


def announce(state: State, version: int) -> Decision[None]:
    """Raises the policy version. The current one again, after more batches were acknowledged, says that their weights
    are out as well."""
    if version < state.policy_version:
        raise FailedPreconditionError(
            f"policy version {version} is lower than the current {state.policy_version}; announce a higher version"
        )
    is_new = version > state.policy_version or min(state.models["policy"].next).batch > state.renewed
    return [PolicyVersionAnnounced(version)] if is_new else [], lambda _: None


def freed(state: State) -> list[Event]:
    """Returns the events that free batches: batches that all models have committed and acknowledged, and failed
    batches that all models have passed."""
    failures: list[int] = []
    if kept := state.batches_kept:
        past = min(went_past(model) for model in state.models.values())
        failures = [number for number in kept if number < past.batch]
    return [BatchFreed(number) for number in (*failures, *_trained(state))]


def _trained(state: State) -> list[int]:
    """Returns the batches that every model has committed and acknowledged."""
    numbers = [number for number, batch in state.batches.items() if batch.mini_batches and number not in state.failed]
    # Commits are as rare as checkpoints. Compare the ranks, of which there may be hundreds, only after a commit.
    for is_committed in (True, False):
        if not numbers:
            break
        reached = {
            name: model.committed if is_committed else min(model.committed, *model.next)
            for name, model in state.models.items()
        }
        safe = min(settle(state, name, position).batch for name, position in reached.items())
        numbers = [number for number in numbers if number < safe]
    return numbers


def went_past(model: ModelState) -> Position:
    """Returns the position before which the model does not need failed batches, because its trainer acknowledged or
    committed later positions."""
    return max(model.committed, min(model.next))


def furthest(state: State, model: Model) -> Position:
    """Returns the furthest position that any rank of the model is known to have reached."""
    progress = state.models[model]
    return max(progress.furthest, progress.committed)


def check_not_ahead(state: State, model: Model, ranks: Collection[int], number: int) -> None:
    """Rejects a batch that is not sealed and is beyond the next position of these ranks (of all ranks, if empty): the
    trainer reached it before a rollback."""
    next_positions = model_state(state, model).next
    if state.generation == 1 or number < state.batches_sealed:
        return
    for rank in ranks:
        check_rank(state, model, rank)
    following = max(settle(state, model, next_positions[rank]) for rank in ranks or range(len(next_positions)))
    if number > following.batch:
        raise FailedPreconditionError(
            f"{model}: batch {number} lies ahead of this run, which records only the training before "
            f"{text_of(following)}: its log was rolled back (generation {state.generation}); resume from a checkpoint "
            "at or before that position"
        )


def _check_not_rolled_back(state: State, number: int) -> None:
    """Rejects a batch far beyond the batches that the run knows: the trainer reached it before a rollback."""
    reached = max(model.furthest.batch for model in state.models.values())
    if state.generation > 1 and number > max(state.batches_sealed, reached + 1):
        raise FailedPreconditionError(
            f"batch {number} lies ahead of this run, which has trained the batches before {reached} and sealed "
            f"{state.batches_sealed}: its log was rolled back (generation {state.generation}); resume from a checkpoint"
        )


def _check_built(state: State, number: int) -> None:
    if number in state.failed:
        raise BatchFailedError(f"batch {number} failed: {state.failed[number]}", number)


def check_exists(state: State, model: Model, position: Position) -> None:
    """Rejects a position that the run cannot have returned."""
    model_state(state, model)
    if min(position) < 0:
        raise InvalidArgumentError(
            f"{model}: {text_of(position)} is not a valid position; use a batch, epoch and mini-batch of 0 or more"
        )
    if position > Position(state.batches_sealed):
        why = "it may be of another run"
        if state.generation > 1:
            why = (
                f"this run's log was rolled back (generation {state.generation}); resume from a checkpoint "
                f"at or before {text_of(furthest(state, model))}, or without one, at the committed position"
            )
        raise FailedPreconditionError(
            f"{model}: {text_of(position)} is past the last sealed batch, number {state.batches_sealed - 1}: {why}"
        )


def text_of(position: Position) -> str:
    return f"batch {position.batch} epoch {position.epoch} mini-batch {position.mini_batch}"
