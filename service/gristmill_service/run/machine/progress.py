"""Ranks on their way through the batches: the order of positions, and what acknowledging, committing and resuming do.

Reads the state, returns events. A batch that failed, or that has nothing for a model, has no positions: it is stepped
over.
"""

from __future__ import annotations

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
    BatchWithdrawn,
    Event,
    ModelResumed,
    PositionCommitted,
    Resized,
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


def check_incarnation(state: State, model: Model, incarnation: int) -> None:
    """0 is not checked."""
    current = model_state(state, model).incarnation
    if incarnation and incarnation < current:
        raise StaleIncarnationError(
            f"{model}: incarnation {incarnation} was superseded by {current}: the trainer was resumed elsewhere; end "
            "this process, or resume again"
        )
    if incarnation > current:
        raise FailedPreconditionError(
            f"{model}: incarnation {incarnation} was never given out, the current is {current}; is it of another run, "
            "or of one that was created anew? Resume first"
        )


def batch_state(state: State, number: int) -> BatchState:
    """Raises BatchFailedError or NotFoundError for a batch that will never be there (again)."""
    if number < 0:
        raise InvalidArgumentError(f"batch is {number}; batches are numbered from 0")
    _check_made(state, number)
    if number in state.batches:
        return BatchState.PUBLISHED if state.batches[number].is_published else BatchState.PENDING
    if number < state.batches_sealed:
        raise NotFoundError(f"batch {number} is freed: every model has committed it; ask for {state.freed} or later")
    return BatchState.END if state.finished and not state.complete else BatchState.PENDING


def check_mini_batch(state: State, model: Model, position: Position) -> None:
    """For a position of a published batch."""
    count = (state.batches[position.batch].mini_batches or {}).get(model, 0)
    if not 0 <= position.mini_batch < count or not 0 <= position.epoch < state.epochs:
        raise InvalidArgumentError(
            f"batch {position.batch} has {count} {model} mini-batches and {state.epochs} epochs; there is no epoch "
            f"{position.epoch} mini-batch {position.mini_batch}"
        )


def settle(state: State, model: Model, position: Position) -> Position:
    """The position itself, or the next that exists where its batch has none or it is past the batch's last."""
    # A committed position may stand at the end of a batch that is freed since.
    position = max(position, Position(state.freed))
    while True:
        batch = state.batches.get(position.batch)
        if position.batch in state.failed:
            position = Position(position.batch + 1)
            continue
        if batch is None or batch.mini_batches is None:
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
    """Moves the rank past the position, its next; nothing for one it is past already."""
    expected = next_of(state, model, rank)
    if position < expected:
        return []
    _check_made(state, position.batch)
    batch = state.batches.get(position.batch)
    if position != expected or batch is None or batch.mini_batches is None:
        raise FailedPreconditionError(
            f"{model} rank {rank}: {_text(position)} cannot be acknowledged, the next is {_text(expected)}"
            + ("" if position != expected else ", which is not published yet")
            + "; acknowledge in order"
        )
    following = settle(state, model, position._replace(mini_batch=position.mini_batch + 1))
    return [Acknowledged(model, rank, following)]


def commit(state: State, model: Model, position: Position) -> list[Event]:
    """Raises the committed position; nothing for one before it."""
    _check_exists(state, model, position)
    if position <= model_state(state, model).committed:
        return []
    return [PositionCommitted(model, position)]


def commit_acknowledged(state: State, model: Model) -> list[Event]:
    """Commits up to where every rank is: what a trainer without checkpoints asks for."""
    return commit(state, model, min(settle(state, model, position) for position in state.models[model].next))


def freed(state: State) -> list[Event]:
    """Batches that every model has both committed and acknowledged past."""
    # Commits come with checkpoints, seldom: without one the ranks, of which there may be hundreds, need no look.
    for bound in (_committed, _reached):
        safe = min((settle(state, model, bound(own)).batch for model, own in state.models.items()))
        found = [BatchFreed(number) for number, batch in state.batches.items() if number < safe and batch.mini_batches]
        if not found:
            return []
    return [*found]


def _committed(model: ModelState) -> Position:
    return model.committed


def _reached(model: ModelState) -> Position:
    return min(model.committed, *model.next)


def resume(state: State, model: Model, position: Position | None, launch: str, dp_size: int) -> list[Event]:
    """Puts all ranks to the position under a new incarnation; nothing where this launch did so already.

    With another `dp_size`, batches that are published are withdrawn, and a run's other model has to resume, too.
    """
    current = model_state(state, model)
    if not launch:
        raise InvalidArgumentError("launch is empty; name this start of the trainer, the same on all its ranks")
    if launch == current.launch:
        if position is not None and position != current.resumed_at:
            raise FailedPreconditionError(
                f"{model}: launch {launch!r} resumed at {_text(current.resumed_at)}, and this rank asks for "
                f"{_text(position)}; all ranks load the same checkpoint"
            )
        if dp_size != state.dp_size:
            raise FailedPreconditionError(
                f"{model}: launch {launch!r} resumed with dp_size {state.dp_size}, and this rank asks for {dp_size}; "
                "all ranks have the same"
            )
        return []
    if launch in current.superseded:
        # A rank of it that comes late must not take the run from the launch that came after.
        raise StaleIncarnationError(
            f"{model}: launch {launch!r} was superseded by {current.launch!r}: the trainer was started again; end this "
            "process"
        )
    target = current.committed if position is None else position
    _check_exists(state, model, target)
    if target < current.committed:
        raise FailedPreconditionError(
            f"{model}: {_text(target)} lies before the committed {_text(current.committed)}, and its data may be gone; "
            "resume from the newer checkpoint, and commit only what a checkpoint holds"
        )
    resumed = ModelResumed(model, target, current.incarnation + 1, launch)
    return [resumed] if dp_size == state.dp_size else [*_resized(state, dp_size, model), resumed]


def _resized(state: State, dp_size: int, asked: Model) -> list[Event]:
    """Ranks of the other model, which there may not be as many of any more, are refused from now on."""
    others = [
        ModelResumed(model, min(own.next), own.incarnation + 1, "")
        for model, own in state.models.items()
        if model != asked
    ]
    withdrawn = [BatchWithdrawn(number) for number, batch in state.batches.items() if batch.is_published]
    return [Resized(dp_size), *others, *withdrawn]


def _check_made(state: State, number: int) -> None:
    if number in state.failed:
        raise BatchFailedError(f"batch {number} failed: {state.failed[number]}", number)


def _check_exists(state: State, model: Model, position: Position) -> None:
    model_state(state, model)
    if min(position) < 0:
        raise InvalidArgumentError(f"{model}: {_text(position)} is no position; its parts are not negative")
    if position > Position(state.batches_sealed):
        raise FailedPreconditionError(
            f"{model}: {_text(position)} is past the last sealed batch, number {state.batches_sealed - 1}; is it of "
            "another run?"
        )


def _text(position: Position) -> str:
    return f"batch {position.batch} epoch {position.epoch} mini-batch {position.mini_batch}"
