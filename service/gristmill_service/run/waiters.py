"""Callers that wait for a run to change: their conditions, the events after which each is checked, and who is woken."""

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
    ModelResumed: _BATCHES,
    # The trainer that it supersedes is refused now.
    RanksBegan: _BATCHES,
    Resized: _BATCHES,
    BatchWithdrawn: _BATCHES | _ROOM,
    BatchFailed: _BATCHES | _ROOM,
    BatchGivenUp: _BATCHES | _ROOM,
    BatchFreed: _BATCHES | _ROOM,
    RunFinished: _BATCHES | _ROOM,
    # A finished run ends when nothing complete is left.
    GroupDropped: _BATCHES | _ROOM,
    # Others may now get some of the capacity that was reserved for its tag.
    GroupTagged: _ROOM,
    TagSharesLapsed: _ROOM,
    GroupClosed: _ROOM,
    TrajectoryAborted: _ROOM,
    PolicyVersionAnnounced: frozenset([Topic.VERSION, Topic.ROOM]),
}
"""The topics of conditions that an event may settle."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that callers wait for. It is met when reading again gives a settled answer, which may be a refusal.

    key: conditions of a topic with the same key are the same. The key of a condition for capacity is the tag that needs
        it; each group that may be admitted wakes one caller.
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
    """The callers that wait. A caller that was woken does not wait any more."""

    def __init__(self) -> None:
        self._topics: dict[Topic, dict[Hashable, _Waiting]] = {topic: {} for topic in Topic}

    def add(self, condition: Condition, wake: Wake) -> None:
        waiting = self._topics[condition.topic].setdefault(condition.key, _Waiting(condition))
        waiting.wakes[wake] = None

    def remove(self, condition: Condition, wake: Wake) -> None:
        """Removes a caller, which may have been woken already."""
        topic = self._topics[condition.topic]
        if (waiting := topic.get(condition.key)) is not None:
            waiting.wakes.pop(wake, None)
            if not waiting.wakes:
                del topic[condition.key]

    def waits_for(self, topic: Topic) -> bool:
        return bool(self._topics[topic])

    def wake_met(self, topics: Collection[Topic], state: State, room: Room) -> None:
        """Wakes the callers whose condition is met. room: the groups that may be admitted now: as many callers that
        wait for capacity are woken, in the order in which they came."""
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
