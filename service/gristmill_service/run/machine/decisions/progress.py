"""Ranks on their way through the batches: the order of positions, and what acknowledging and committing do.

Reads the state, returns events. A batch that failed, or that has nothing for a model, has no positions: it is stepped
over. A failed batch whose rows are kept is stepped over, too, where a rank asks for its next position; but where a rank
*stands*, as the state has it, is before it, until the rank acknowledges it or something behind it.
"""

from __future__ import annotations

from collections.abc import Collection

from gristmill.errors import (
    BatchFailedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    StaleIncarnationError,
)
from gristmill_service.config import Model
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFreed,
    Event,
    PositionCommitted,
)
from gristmill_service.run.machine.state import ModelState, State


def model_state(state: State, model: Model) -> ModelState:
    found = state.models.get(model)
    if found is None:
        raise InvalidArgumentError(
            f"model is {model} and this run has none; it has {', '.join(state.models)} (critic_mini_batch_size "
            "configures a critic)"
        )
    return found


def check_rank(state: State, model: Model, rank: int) -> None:
    size = len(model_state(state, model).next)
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank is {rank} and dp_size is {size}; ranks are 0..{size - 1}")


def check_caller(state: State, model: Model, rank: int, incarnation: int) -> None:
    """The incarnation comes first: a rank of an older, larger launch is stale, not out of range."""
    check_incarnation(state, model, incarnation)
    check_rank(state, model, rank)


def check_incarnation(state: State, model: Model, incarnation: int) -> None:
    """0 is not checked."""
    current = model_state(state, model).incarnation
    if incarnation and incarnation < current:
        raise StaleIncarnationError(
            f"{model}: incarnation {incarnation} was superseded by {current}: the trainer was resumed elsewhere; end "
            "this process, or resume again"
        )
    if incarnation > current:
        why = "it may be of another run, or of a deleted run of this name"
        if state.generation > 1:
            why = f"its log was rolled back, and it is in generation {state.generation}"
        raise FailedPreconditionError(
            f"{model}: this run never gave incarnation {incarnation}, and the current one is {current}: {why}; resume "
            "first"
        )


def batch_state(state: State, number: int) -> BatchState:
    """Raises BatchFailedError or NotFoundError for a batch that will never be there (again)."""
    if number < 0:
        raise InvalidArgumentError(f"batch is {number}; batches are numbered from 0")
    _check_made(state, number)
    batch = state.batches.get(number)
    if batch is not None:
        if not batch.is_published or (batch.awaits and state.is_written(number)):
            return BatchState.PENDING
        return BatchState.FORWARD if batch.awaits else BatchState.PUBLISHED
    if number < state.batches_sealed:
        raise NotFoundError(f"batch {number} is freed: every model has committed it; ask for {state.freed} or later")
    _check_not_rolled_back(state, number)
    return BatchState.END if state.finished and not state.complete else BatchState.PENDING


def shard_state(state: State, model: Model, rank: int, position: Position, *, is_forward: bool) -> BatchState:
    """The same for a rank that wants its shard of a mini-batch. is_forward: whether the forward shard is wanted, too.

    Raises InvalidArgumentError for a mini-batch that the batch does not have."""
    found = batch_state(state, position.batch)
    if found is BatchState.FORWARD and not is_forward:
        found = BatchState.PENDING
    if found is BatchState.PENDING:
        check_not_ahead(state, model, [rank], position.batch)
    elif found is not BatchState.END:
        _check_mini_batch(state, model, position)
    return found


def _check_mini_batch(state: State, model: Model, position: Position) -> None:
    """For a position of a published batch."""
    count = (state.batches[position.batch].mini_batches or {}).get(model, 0)
    if not 0 <= position.mini_batch < count or not 0 <= position.epoch < state.epochs:
        raise InvalidArgumentError(
            f"batch {position.batch} has {count} {model} mini-batches and {state.epochs} epochs; there is no epoch "
            f"{position.epoch} mini-batch {position.mini_batch}"
        )


def settle(state: State, model: Model, position: Position) -> Position:
    """The position itself, or the next that exists where its batch has none or it is past the batch's last."""
    position = standing(state, model, position)
    while position.batch in state.failed:
        position = standing(state, model, Position(position.batch + 1))
    return position


def standing(state: State, model: Model, position: Position) -> Position:
    """As `settle`, but not past a failed batch whose rows are kept."""
    # A committed position may stand at the end of a batch that is freed since.
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


def acknowledge(state: State, model: Model, rank: int, position: Position) -> list[Event]:
    """Moves the rank past the position, its next; nothing for one it is past already. To acknowledge a failed batch is
    to go on without it."""
    expected = next_of(state, model, rank)
    if position < expected:
        stands = standing(state, model, model_state(state, model).next[rank])
        is_step = stands <= position and position.batch in state.failed
        return [Acknowledged(model, rank, _behind(state, model, position.batch))] if is_step else []
    _check_made(state, position.batch)
    batch = state.batches.get(position.batch)
    if position != expected or batch is None or batch.mini_batches is None or batch.awaits:
        awaits = f", and waits for {', '.join(batch.awaits)}" if batch is not None and batch.awaits else ""
        raise FailedPreconditionError(
            f"{model} rank {rank}: {text_of(position)} cannot be acknowledged, the next is {text_of(expected)}"
            + ("" if position != expected else f", which is not published yet{awaits}")
            + "; acknowledge in order"
        )
    following = standing(state, model, position._replace(mini_batch=position.mini_batch + 1))
    return [Acknowledged(model, rank, following)]


def _behind(state: State, model: Model, batch: int) -> Position:
    return standing(state, model, Position(batch + 1))


def commit(state: State, model: Model, position: Position) -> list[Event]:
    """Raises the committed position; nothing for one before it."""
    check_exists(state, model, position)
    if position <= model_state(state, model).committed:
        return []
    return [PositionCommitted(model, position)]


def commit_acknowledged(state: State, model: Model) -> list[Event]:
    """Commits up to where every rank is: what a trainer without checkpoints asks for."""
    return commit(state, model, min(standing(state, model, position) for position in state.models[model].next))


def freed(state: State) -> list[Event]:
    """Batches that every model has both committed and acknowledged past, and failed ones that every model went past."""
    return [*_freed_failures(state), *_freed_trained(state)] if state.batches else []


def _freed_trained(state: State) -> list[Event]:
    # Commits come with checkpoints, seldom: without one the ranks, of which there may be hundreds, need no look.
    for bound in (_committed, _reached):
        safe = min((settle(state, model, bound(own)).batch for model, own in state.models.items()))
        found = [
            BatchFreed(number)
            for number, batch in state.batches.items()
            if number < safe and batch.mini_batches and number not in state.failed
        ]
        if not found:
            return []
    return [*found]


def _freed_failures(state: State) -> list[Event]:
    if not (kept := state.batches_kept):
        return []
    past = min(went_past(own) for own in state.models.values())
    return [BatchFreed(number) for number in kept if number < past.batch]


def went_past(model: ModelState) -> Position:
    """Failed batches before this are of no use to the model any more: its trainer went on without them, or says that a
    checkpoint did."""
    return max(model.committed, min(model.next))


def _committed(model: ModelState) -> Position:
    return model.committed


def _reached(model: ModelState) -> Position:
    return min(model.committed, *model.next)


def furthest(state: State, model: Model) -> Position:
    """How far any rank of the model has ever come, as the run knows it."""
    own = state.models[model]
    return max(own.furthest, own.committed)


def check_not_ahead(state: State, model: Model, ranks: Collection[int], number: int) -> None:
    """For a batch that is not there, which these ranks of the model (none: all) want to train. One that is not sealed
    and lies behind their next was theirs before a rollback: it would come when they train what is before it, or never.
    """
    own = model_state(state, model).next
    if state.generation == 1 or number < state.batches_sealed:
        return
    for rank in ranks:
        check_rank(state, model, rank)
    following = max(settle(state, model, own[rank]) for rank in ranks or range(len(own)))
    if number > following.batch:
        raise FailedPreconditionError(
            f"{model}: batch {number} lies ahead of this run, which knows only the training before "
            f"{text_of(following)}: its log was rolled back, and it is in generation {state.generation}; resume from a "
            "checkpoint at or before that position"
        )


def _check_not_rolled_back(state: State, number: int) -> None:
    """A trainer that asks for a batch far ahead of what the run knows as trained was there before a rollback."""
    reached = max(model.furthest.batch for model in state.models.values())
    if state.generation > 1 and number > max(state.batches_sealed, reached + 1):
        raise FailedPreconditionError(
            f"batch {number} lies ahead of this run, which knows batches before {reached} as trained and has sealed "
            f"{state.batches_sealed}: its log was rolled back, it is in generation {state.generation}; resume from a "
            "checkpoint"
        )


def _check_made(state: State, number: int) -> None:
    if number in state.failed:
        raise BatchFailedError(f"batch {number} failed: {state.failed[number]}", number)


def check_exists(state: State, model: Model, position: Position) -> None:
    """Raises for a position that the run cannot have given out."""
    model_state(state, model)
    if min(position) < 0:
        raise InvalidArgumentError(f"{model}: {text_of(position)} is no position; its parts are not negative")
    if position > Position(state.batches_sealed):
        why = "it may be of another run"
        if state.generation > 1:
            why = (
                f"this run's log was rolled back, and it is in generation {state.generation}; resume from a checkpoint "
                f"at or before {text_of(furthest(state, model))}, or without one, at the committed position"
            )
        raise FailedPreconditionError(
            f"{model}: {text_of(position)} is past the last sealed batch, number {state.batches_sealed - 1}: {why}"
        )


def text_of(position: Position) -> str:
    return f"batch {position.batch} epoch {position.epoch} mini-batch {position.mini_batch}"
