"""The conditions that callers wait for, and the events after which each is worth looking at again.

A condition is met when reading again gives a settled answer, which may be a refusal. Pure: reads the state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from gristmill.errors import GristmillError
from gristmill_service.config import Model
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.events import (
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    Event,
    GroupClosed,
    GroupDropped,
    GroupTagged,
    ModelResumed,
    PolicyVersionAnnounced,
    Resized,
    RunFinished,
    TagSharesLapsed,
    TrajectoryAborted,
)
from gristmill_service.run.machine.state import State


class Topic(Enum):
    BATCHES = auto()
    VERSION = auto()
    ROOM = auto()


_BATCHES, _ROOM = frozenset([Topic.BATCHES]), frozenset([Topic.ROOM])
_TOPICS: dict[type[Event], frozenset[Topic]] = {
    BatchSealed: _BATCHES,
    BatchPublished: _BATCHES,
    ModelResumed: _BATCHES,
    Resized: _BATCHES,
    BatchWithdrawn: _BATCHES | _ROOM,
    BatchFailed: _BATCHES | _ROOM,
    BatchGivenUp: _BATCHES | _ROOM,
    BatchFreed: _BATCHES | _ROOM,
    RunFinished: _BATCHES | _ROOM,
    # A finished run ends when nothing complete is left.
    GroupDropped: _BATCHES | _ROOM,
    # Of the room that is kept for its tag, others may have some now.
    GroupTagged: _ROOM,
    TagSharesLapsed: _ROOM,
    GroupClosed: _ROOM,
    TrajectoryAborted: _ROOM,
    PolicyVersionAnnounced: frozenset([Topic.VERSION, Topic.ROOM]),
}


def topics_of(events: Iterable[Event]) -> set[Topic]:
    """The topics that these events may settle."""
    found: set[Topic] = set()
    for event in events:
        if topics := _TOPICS.get(type(event)):
            found |= topics
    return found


@dataclass(frozen=True, slots=True)
class Condition:
    """is_met(state): whether waiting is over. Conditions of a topic with the same key are the same one; the key of a
    condition for room is the tag that it is for, and each group of room lets one caller go on."""

    topic: Topic
    key: Hashable
    is_met: Callable[[State], bool]


def batch_is_settled(number: int) -> Condition:
    return Condition(Topic.BATCHES, number, lambda state: _is_settled(lambda: progress.batch_state(state, number)))


def shard_is_settled(
    model: Model, rank: int, position: Position | None, incarnation: int, *, is_forward: bool = False
) -> Condition:
    def find(state: State) -> BatchState:
        progress.check_caller(state, model, rank, incarnation)
        wanted = progress.next_of(state, model, rank) if position is None else position
        return progress.shard_state(state, model, rank, wanted, is_forward=is_forward)

    key = (model, rank, position, incarnation, is_forward)
    return Condition(Topic.BATCHES, key, lambda state: _is_settled(lambda: find(state)))


def version_is_reached(version: int) -> Condition:
    return Condition(Topic.VERSION, version, lambda state: state.policy_version >= version)


def there_is_room(tag: str = "") -> Condition:
    return Condition(Topic.ROOM, tag, lambda state: state.finished)


def _is_settled(find: Callable[[], BatchState]) -> bool:
    try:
        return find() is not BatchState.PENDING
    except GristmillError:
        return True
