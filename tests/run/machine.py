"""A run without anything around it: its state, decided, applied and followed up as by its writer, in one process and
no time. Thousands of runs take seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from gristmill._wire.steps import TrajectoryKey
from gristmill_service.access.quotas import Quota
from gristmill_service.config import parse_config
from gristmill_service.run.machine.answers import Position, RewardUpdate
from gristmill_service.run.machine.decisions import aborts, admission, ingest, progress, rewards, sealing
from gristmill_service.run.machine.decisions.admission import BytesLeft, Room
from gristmill_service.run.machine.decisions.pacing import UNBOUNDED
from gristmill_service.run.machine.described_rows import RowKeys
from gristmill_service.run.machine.events import BatchPublished, Event
from gristmill_service.run.machine.state import Decision, State, apply
from gristmill_service.run.rows.declared_prefixes import prepare
from tests.run.harness import CONFIG, table
from tests.strategies import Row

T = TypeVar("T")


class Machine:
    """A run's state, and the calls that change it. It has capacity for everything. events: all that happened."""

    def __init__(self, **settings: Any) -> None:
        self.config = parse_config(CONFIG | settings)
        self.state = State.initial(self.config)
        self.events: list[Event] = []
        self.time = 0.0
        self._tables = count()

    def room(self) -> Room:
        return Room(UNBOUNDED, "")

    def bytes_left(self) -> BytesLeft:
        return BytesLeft(UNBOUNDED, "")

    def quota(self) -> Quota | None:
        return None

    def now(self) -> float:
        return self.time

    def execute(self, decide: Callable[[Machine], Decision[T]]) -> T:
        events, answer = decide(self)
        self._apply(events)
        for following in sealing.consequences(self.state, self.config, events):
            self._apply(following)
        return answer(self.state)

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            apply(self.state, event)
            self.events.append(event)
            self.happened(event)

    def happened(self, event: Event) -> None:
        """Called after each event."""

    def submit(self, rows: Sequence[Row]) -> list[str]:
        steps, number = table(*rows), next(self._tables)
        described, _ = prepare(number, steps, RowKeys.of(steps), None, {}, {}, lambda _: steps)
        return [one.name for one in self.execute(lambda view: ingest.take_rows(view, steps, described)).outcomes]

    def set_rewards(self, updates: Sequence[RewardUpdate]) -> int:
        return self.execute(lambda view: rewards.set_rewards(view.state, updates, [b""] * len(updates)))

    def abort(self, trajectories: Sequence[TrajectoryKey]) -> int:
        return self.execute(lambda view: aborts.abort_trajectories(view.state, view.config, trajectories, ""))

    def let_pass(self, seconds: float) -> None:
        self.time += seconds
        self.execute(aborts.close_stragglers)

    def begin(self, groups: Mapping[str, str]) -> list[str]:
        """groups: the tag of each uid, "" for none."""
        wanted = admission.new_groups(0, list(groups), [], list(groups.values()))
        answer = self.execute(lambda view: admission.begin_groups(view, wanted, None))
        return [one.name for one in answer.admissions]

    def announce(self, version: int) -> None:
        self.execute(lambda view: progress.announce(view.state, version))

    def publish(self) -> None:
        """Makes the sealed batches: a mini-batch for each group."""
        for number in self.state.batches_to_build:
            self._publish(BatchPublished(number, dict.fromkeys(self.config.models, self.state.prompts[number]), 0))

    def _publish(self, event: BatchPublished) -> None:
        self.execute(lambda view: sealing.record_batch(view.state, event, view.state.dp_size, None))

    def acknowledge(self, rank: int, position: Position, *, commit: bool = True) -> None:
        self.execute(lambda view: progress.acknowledge(view.state, "policy", rank, position, 0, commit))
