"""Resume a trainer at its checkpoint, after checking that the checkpoint fits the run. Reads the state, returns events.

A checkpoint fits if everything before its position was acknowledged in this run and generation. A checkpoint that is
ahead would silently skip accepted rows. It is refused, unless the trainer sends a reason for giving up the batches in
between.
"""

from __future__ import annotations

from typing import NamedTuple

from gristmill._wire.texts import check_length, check_text
from gristmill.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    StaleIncarnationError,
)
from gristmill_service.config import Model, RunConfig, with_dp_size
from gristmill_service.run.machine.answers import Position, Resumed
from gristmill_service.run.machine.decisions.aborts import counted_reason
from gristmill_service.run.machine.decisions.progress import (
    check_exists,
    check_rank,
    furthest,
    model_state,
    next_incarnation,
    settle,
    text_of,
    went_past,
)
from gristmill_service.run.machine.events import (
    BatchGivenUp,
    BatchWithdrawn,
    ColumnsDropped,
    Event,
    ModelResumed,
    RanksBegan,
    Resized,
)
from gristmill_service.run.machine.state import START, Decision, State

_LONGEST_LAUNCH = 1000


class Checkpoint(NamedTuple):
    """The checkpoint of a resuming trainer.

    position: None for the run's committed position. run_id, generation: those of the run when the checkpoint was saved;
    "" and 0 if unknown. give_up_reason: the reason for dropping the groups that the position skips; "" to refuse a
    position that skips groups.
    """

    position: Position | None
    run_id: str = ""
    generation: int = 0
    give_up_reason: str = ""


def resume(
    state: State,
    config: RunConfig,
    model: Model,
    checkpoint: Checkpoint,
    launch: str,
    dp_size: int,
    run_id: str,
    rank: int | None = None,
) -> Decision[Resumed]:
    """Moves all ranks to the checkpoint's position under a new incarnation; changes nothing if this launch has resumed
    already.

    With another `dp_size`, published batches are withdrawn, failed batches ahead whose rows are kept are tried again,
    and the run's other model has to resume as well.
    dp_size: 0 keeps the number of ranks. run_id: the id of this run.
    rank: the only rank that the caller may resume; None: it resumes all.
    """
    check_text(checkpoint.run_id, "run_id")
    if checkpoint.run_id not in ("", run_id):
        raise FailedPreconditionError(
            f"the checkpoint is of another run of this name: its run_id is {checkpoint.run_id}, and this run's is "
            f"{run_id}, so the other run was deleted; start without the checkpoint's state, or restore that run"
        )
    if rank is not None:
        return _of_rank(state, model, rank, checkpoint, dp_size, run_id)
    dp_size = dp_size or state.dp_size
    with_dp_size(config, dp_size)
    events = _events(state, config, model, checkpoint, launch, dp_size, run_id)

    def answer(after: State) -> Resumed:
        progress = after.models[model]
        return Resumed(progress.incarnation, progress.resumed_at, run_id, after.generation)

    return events, answer


def _of_rank(
    state: State, model: Model, rank: int, checkpoint: Checkpoint, dp_size: int, run_id: str
) -> Decision[Resumed]:
    """Moves one rank to the checkpoint's position, as an incarnation of its own. Raises PermissionDeniedError for what
    concerns all ranks."""
    check_rank(state, model, rank)
    if checkpoint.give_up_reason or dp_size not in (0, state.dp_size):
        what = f"dp_size {dp_size}" if dp_size not in (0, state.dp_size) else "give_up_reason"
        raise PermissionDeniedError(
            f"{model} rank {rank}: {what} affects all ranks, but this token is for one rank; resume with a trainer's "
            "token without a rank"
        )
    target = _target(state, model, checkpoint)
    _skipped(state, model, target, checkpoint)
    began = RanksBegan(model, (rank,), next_incarnation(state, model, run_id), target)
    return [began], lambda after: Resumed(began.incarnation, target, run_id, after.generation)


def _events(
    state: State, config: RunConfig, model: Model, checkpoint: Checkpoint, launch: str, dp_size: int, run_id: str
) -> list[Event]:
    position, current = checkpoint.position, model_state(state, model)
    _check_launch(launch)
    if launch == current.launch:
        if position is not None and position != current.resumed_at:
            raise FailedPreconditionError(
                f"{model}: launch {launch!r} resumed at {text_of(current.resumed_at)}, but this rank requests "
                f"{text_of(position)}; load the same checkpoint on all ranks"
            )
        if dp_size != state.dp_size:
            raise FailedPreconditionError(
                f"{model}: launch {launch!r} resumed with dp_size {state.dp_size}, but this rank requests {dp_size}; "
                "use the same on all ranks"
            )
        return []
    if launch in current.superseded:
        # A late rank of an earlier launch must not supersede a later launch.
        raise StaleIncarnationError(
            f"{model}: launch {launch!r} was superseded by {current.launch!r}, when the trainer restarted; end this"
        )
    target = _target(state, model, checkpoint)
    skipped = _skipped(state, model, target, checkpoint)
    resumed = ModelResumed(model, target, next_incarnation(state, model, run_id), launch)
    given_up = {event.batch for event in skipped}
    resized = [] if dp_size == state.dp_size else _resized(state, dp_size, resumed, given_up, run_id)
    dropped = [] if model != "policy" and not resized else _dropped(state, config, bool(resized), given_up)
    return [*skipped, *dropped, *resized, resumed]


def _target(state: State, model: Model, checkpoint: Checkpoint) -> Position:
    """Returns the checkpoint's position, which the run still has."""
    committed = model_state(state, model).committed
    target = committed if checkpoint.position is None else checkpoint.position
    check_exists(state, model, target)
    if target < committed:
        raise FailedPreconditionError(
            f"{model}: {text_of(target)} lies before the committed {text_of(committed)}, so its data may be "
            "freed; resume from a newer checkpoint, and commit only what a checkpoint includes"
        )
    return target


def _check_launch(launch: str) -> None:
    """Rejects a launch name that is empty or too long, because the run stores every name."""
    if not launch:
        raise InvalidArgumentError("launch is empty; send an id of this start of the trainer, the same on all ranks")
    subject = f"launch {launch[:50]!r}..."
    check_length(launch, _LONGEST_LAUNCH, subject, "shorten it")
    check_text(launch, "launch")


def _dropped(state: State, config: RunConfig, is_resized: bool, given_up: set[int]) -> list[Event]:
    """Drops the columns that the previous trainer wrote for batches that still wait for columns, so that all values of
    a batch come from one trainer.

    Complete columns stay, also for another dp_size: they are values of rows, and nobody writes a batch again that the
    policy has trained, and a critic has not. With drop_trailing, for which there is no critic, another dp_size trains
    other rows, which the policy writes.
    """
    is_other_rows = is_resized and config.on_misaligned == "drop_trailing"
    return [
        ColumnsDropped(number)
        for number, batch in state.batches.items()
        if batch.written and (batch.awaits or is_other_rows) and number not in given_up
    ]


def _resized(state: State, dp_size: int, resumed: ModelResumed, given_up: set[int], run_id: str) -> list[Event]:
    """Changes dp_size. The other model must resume before its ranks continue, because their number may have changed."""
    other_models = {model: progress for model, progress in state.models.items() if model != resumed.model}
    others = [
        ModelResumed(model, min(progress.next), next_incarnation(state, model, run_id), "")
        for model, progress in other_models.items()
    ]
    first = min([resumed.position, *map(went_past, other_models.values())]).batch
    again = [number for number in state.batches_kept if number >= first]
    withdrawn = [
        BatchWithdrawn(number)
        for number, batch in state.batches.items()
        if (batch.is_published or number in again) and number not in given_up
    ]
    return [Resized(dp_size), *others, *withdrawn]


def _skipped(state: State, model: Model, target: Position, checkpoint: Checkpoint) -> list[BatchGivenUp]:
    """Returns the batches between the acknowledged position and the target. Raises FailedPreconditionError if the
    target skips anything and the checkpoint has no reason for it."""
    fits = _furthest_fit(state, model, checkpoint.generation)
    if settle(state, model, target) <= settle(state, model, fits):
        return []
    # A batch that was trained in part is not given up: only this model skips the rest.
    first = fits.batch + (fits > Position(fits.batch))
    between = [number for number in state.batches if first <= number < target.batch]
    if not checkpoint.give_up_reason:
        raise FailedPreconditionError(_refusal(state, model, target, fits, between, checkpoint.generation))
    reason = counted_reason(state, checkpoint.give_up_reason)
    return [BatchGivenUp(number, reason) for number in between]


def _furthest_fit(state: State, model: Model, generation: int) -> Position:
    """Returns the furthest position at which a checkpoint of this generation fits; generation 0 is the current one."""
    if generation > state.generation:
        return START
    rolled_back = [known.get(model, START) for known in state.rollbacks[generation - 1 :]] if generation else []
    return min([furthest(state, model), *rolled_back])


def _refusal(state: State, model: Model, target: Position, fits: Position, between: list[int], generation: int) -> str:
    groups = sum(state.batches[number].prompts for number in between)
    why = ""
    if generation and generation != state.generation:
        why = (
            f" The checkpoint is of generation {generation} of the run, and the run is in generation "
            f"{state.generation}, because its log was rolled back in between."
        )
    return (
        f"{model}: the checkpoint is at {text_of(target)}, and this run records only the training before "
        f"{text_of(fits)}.{why} Resuming there would skip accepted rows: {len(between)} sealed batches with {groups} "
        "groups, and the rest of a started batch; load a checkpoint at or before that position, or set "
        "give_up_reason to drop these groups"
    )
