"""Callers that wait for a run to change: their conditions, the events that may meet each, and whom to wake."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

from gristmill.errors import GristmillError
from gristmill_service.config import Model
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.decisions.admission import Room
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
    RanksBegan,
    Resized,
    RunFinished,
    TagSharesLapsed,
    TrajectoryAborted,
)
from gristmill_service.run.machine.state import State

Wake = Callable[[], None]


class Topic(Enum):
    BATCHES = auto()
    VERSION = auto()
    ROOM = auto()


_BATCHES, _ROOM = frozenset([Topic.BATCHES]), frozenset([Topic.ROOM])
TOPICS: dict[type[Event], frozenset[Topic]] = {
    BatchSealed: _BATCHES,
    BatchPublished: _BATCHES,
    ModelResumed: _BATCHES | _ROOM,
    # Wakes the superseded trainer, whose calls are refused from now on.
    RanksBegan: _BATCHES | _ROOM,
    Resized: _BATCHES | _ROOM,
    BatchWithdrawn: _BATCHES | _ROOM,
    BatchFailed: _BATCHES | _ROOM,
    BatchGivenUp: _BATCHES | _ROOM,
    BatchFreed: _BATCHES | _ROOM,
    RunFinished: _BATCHES | _ROOM,
    # A finished run ends when no complete group is left.
    GroupDropped: _BATCHES | _ROOM,
    # Capacity that was reserved for the group's tag may now be free for other groups.
    GroupTagged: _ROOM,
    TagSharesLapsed: _ROOM,
    GroupClosed: _ROOM,
    TrajectoryAborted: _ROOM,
    PolicyVersionAnnounced: frozenset([Topic.VERSION, Topic.ROOM]),
}
"""For each event, the topics of the conditions that it may meet."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that callers wait for. It is met when reading the state again returns a final answer or an error.

    key: conditions of a topic with the same key are the same. For capacity, the key is the tag of the group to begin,
        and each group that may be admitted wakes one caller.
    """

    topic: Topic
    key: Hashable
    is_met: Callable[[State], bool]


def batch_is_settled(number: int) -> Condition:
    return Condition(Topic.BATCHES, number, lambda state: _is_settled(lambda: progress.batch_state(state, number)))


def shard_is_settled(
    model: Model, rank: int, position: Position | None, incarnation: int, is_forward: bool = False
) -> Condition:
    def shard_state(state: State) -> BatchState:
        progress.check_caller(state, model, rank, incarnation)
        wanted = progress.next_of(state, model, rank) if position is None else position
        return progress.shard_state(state, model, rank, wanted, is_forward=is_forward)

    key = (model, rank, position, incarnation, is_forward)
    return Condition(Topic.BATCHES, key, lambda state: _is_settled(lambda: shard_state(state)))


def version_is_reached(version: int) -> Condition:
    return Condition(Topic.VERSION, version, lambda state: state.policy_version >= version)


def there_is_room(tag: str = "") -> Condition:
    return Condition(Topic.ROOM, tag, lambda state: state.finished)


def _is_settled(batch_state: Callable[[], BatchState]) -> bool:
    try:
        return batch_state() is not BatchState.PENDING
    except GristmillError:
        return True


@dataclass(slots=True)
class _Waiting:
    condition: Condition
    wakes: dict[Wake, None] = field(default_factory=dict)


class Waiters:
    """The waiting callers. Waking a caller removes it."""

    def __init__(self) -> None:
        self._topics: dict[Topic, dict[Hashable, _Waiting]] = {topic: {} for topic in Topic}

    def add(self, condition: Condition, wake: Wake) -> None:
        waiting = self._topics[condition.topic].setdefault(condition.key, _Waiting(condition))
        waiting.wakes[wake] = None

    def remove(self, condition: Condition, wake: Wake) -> None:
        """Removes a caller; ignores one that was already woken."""
        topic = self._topics[condition.topic]
        if (waiting := topic.get(condition.key)) is not None:
            waiting.wakes.pop(wake, None)
            if not waiting.wakes:
                del topic[condition.key]

    def __bool__(self) -> bool:
        """Whether any caller waits."""
        return any(self._topics.values())

    def waits_for(self, topic: Topic) -> bool:
        return bool(self._topics[topic])

    def wake_met(self, topics: Collection[Topic], state: State, room: Room) -> None:
        """Wakes the callers whose condition is met. room: the capacity for new groups; each group wakes one caller that
        waits for capacity, in order of arrival."""
        wakes: list[Wake] = []
        for topic in topics:
            waiting_by_key = self._topics[topic]
            for key, waiting in list(waiting_by_key.items()):
                count = room.groups_of(str(key)) if topic is Topic.ROOM else 0
                if waiting.condition.is_met(state):
                    count = len(waiting.wakes)
                going = list(waiting.wakes)[:count]
                wakes += going
                for wake in going:
                    del waiting.wakes[wake]
                if not waiting.wakes:
                    del waiting_by_key[key]
        for wake in wakes:
            wake()

    def wake_all(self) -> None:
        """Wakes every caller."""
        wakes = [wake for topic in self._topics.values() for waiting in topic.values() for wake in waiting.wakes]
        for topic in self._topics.values():
            topic.clear()
        for wake in wakes:
            wake()
