"""Pace rollouts by training: which batches the policy has trained, and how many groups may begin ahead of it.

A batch is trained when every policy rank has acknowledged it and a policy version was announced since, or every rank
has asked for a later batch. Most trainers acknowledge a batch before its weights are out, so that groups which begin in
between would sample with weights that are about to be replaced. Trainers that announce no version are followed by the
batches that they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions.progress import next_of, settle
from gristmill_service.run.machine.events import ModelResumed, RanksBegan, Resized
from gristmill_service.run.machine.state import State

Asked = Mapping[int, int]
"""The latest batch that each policy rank asked for. It is not in the log: a rank that waits for a batch asks again."""

UNBOUNDED = 1 << 31
_NAMED_RANKS = 8


class Pace(NamedTuple):
    """How many groups may still begin ahead of training. reason: the limit and its use, for messages."""

    groups: int
    reason: str = ""


def trained(state: State, asked: Asked) -> int:
    """Returns the number of the first batch that is not trained, or will be trained again."""
    positions = state.models["policy"].next
    acknowledged = settle(state, "policy", min(positions)).batch
    if acknowledged <= state.renewed:
        return state.renewed
    asked_by_all = min(max(asked.get(rank, 0), _reached(state, position)) for rank, position in enumerate(positions))
    return max(state.renewed, min(acknowledged, asked_by_all))


def forget(asked: dict[int, int], event: RanksBegan | ModelResumed | Resized) -> None:
    """Forgets what policy ranks asked for before another trainer began to train them."""
    match event:
        case RanksBegan("policy", ranks):
            for rank in ranks:
                asked.pop(rank, None)
        case ModelResumed("policy") | Resized():
            asked.clear()


def asks(state: State, rank: int, position: Position | None, batch_state: BatchState, *, waits: bool) -> bool:
    """Returns whether a call for a shard of this policy rank asks for its batch.

    Other processes of the rank read shards that are published, and clients that read ahead do not wait; neither asks.
    position: None for the rank's next. batch_state: the batch's. waits: whether the call may wait.
    """
    if position is None:
        return True
    return batch_state is BatchState.PENDING and (waits or position.batch <= next_of(state, "policy", rank).batch)


def pace(state: State, config: RunConfig, asked: Asked) -> Pace:
    """Returns how many groups may begin before more batches are trained. Failed batches do not count."""
    if config.batches_ahead is None:
        return Pace(UNBOUNDED)
    most, first = config.batches_ahead + 1, trained(state, asked)
    untrained = [number for number in range(first, state.batches_sealed) if number not in state.failed]
    if config.seal_by == "call":
        # Batches have any size, so they are counted instead of their groups.
        groups = UNBOUNDED if len(untrained) < most else 0
        allowed = f"{_count(most, 'untrained batch', 'es')}, and there are {len(untrained)}"
    else:
        most, sealed = most * config.train_batch_size, sum(state.prompts[number] for number in untrained)
        groups = most - len(state.open) - sealed
        allowed = f"{_count(most, 'untrained group')}: {len(state.open)} are open, and {sealed} in sealed batches"
    name = "max_staleness" if config.max_batches_ahead is None else "max_batches_ahead"
    waits = _waits_for(state, untrained[0], asked) if untrained else "complete or abort open groups"
    return Pace(groups, f"{name}: {config.batches_ahead} allows {allowed}; {waits}, or raise max_batches_ahead")


def _waits_for(state: State, batch: int, asked: Asked) -> str:
    """Returns what has to happen until the batch is trained."""
    positions = state.models["policy"].next
    behind = [rank for rank, position in enumerate(positions) if position.batch <= batch]
    if behind:
        return f"wait until policy {_ranks(behind)} {_have(behind)} acknowledged batch {batch}"
    silent = [
        rank for rank, position in enumerate(positions) if max(asked.get(rank, 0), _reached(state, position)) <= batch
    ]
    return (
        f"batch {batch} is acknowledged, and counts as trained when a policy version is announced, or policy "
        f"{_ranks(silent)} {_have(silent)} asked for a later batch; wait for either"
    )


def _reached(state: State, position: Position) -> int:
    """Returns the latest batch that a rank at this position must have asked for. Failed batches were passed over."""
    reached = position.batch if position > Position(position.batch) else position.batch - 1
    while reached in state.failed:
        reached -= 1
    return reached


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{' and more' if len(ranks) > _NAMED_RANKS else ''}"
