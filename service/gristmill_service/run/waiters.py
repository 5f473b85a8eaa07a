"""The callers that wait for a run to change: each is woken by the change that it waits for, and by no other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.queries.conditions import Condition, Topic
from gristmill_service.run.machine.state import State

Wake = Callable[[], None]


@dataclass(slots=True)
class _Waiting:
    condition: Condition
    wakes: dict[Wake, None] = field(default_factory=dict)


class Waiters:
    """A caller that was woken is no waiter any more."""

    def __init__(self) -> None:
        self._topics: dict[Topic, dict[Hashable, _Waiting]] = {topic: {} for topic in Topic}

    def add(self, condition: Condition, wake: Wake) -> None:
        waiting = self._topics[condition.topic].setdefault(condition.key, _Waiting(condition))
        waiting.wakes[wake] = None

    def remove(self, condition: Condition, wake: Wake) -> None:
        """Forgets a caller, who may have been woken already."""
        topic = self._topics[condition.topic]
        if (waiting := topic.get(condition.key)) is not None:
            waiting.wakes.pop(wake, None)
            if not waiting.wakes:
                del topic[condition.key]

    def waits_for(self, topic: Topic) -> bool:
        return bool(self._topics[topic])

    def take_met(self, topics: Collection[Topic], state: State, room: Room) -> list[Wake]:
        """Removes and returns the callers whose wait is over. room: what may be admitted now; as many callers that wait
        for room go on, those who came first first."""
        found: list[Wake] = []
        for topic in topics:
            waiting_by_key = self._topics[topic]
            for key, waiting in list(waiting_by_key.items()):
                if waiting.condition.is_met(state):
                    found += waiting.wakes
                    del waiting_by_key[key]
                elif topic is Topic.ROOM:
                    found += self._take_first(key, waiting, room.groups_of(str(key)))
        return found

    def take_all(self) -> list[Wake]:
        """Removes and returns every caller."""
        found = [wake for topic in self._topics.values() for waiting in topic.values() for wake in waiting.wakes]
        for topic in self._topics.values():
            topic.clear()
        return found

    def _take_first(self, key: Hashable, waiting: _Waiting, count: int) -> list[Wake]:
        found = list(waiting.wakes)[:count]
        for wake in found:
            del waiting.wakes[wake]
        if not waiting.wakes:
            del self._topics[Topic.ROOM][key]
        return found
