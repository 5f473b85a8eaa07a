"""The commands of rollout workers: groups, rows, rewards, aborts, seals, and the end of the rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import FailedPreconditionError
from gristmill_service.run.machine.answers import Admission, Admissions, Outcome, RewardUpdate, Sealed
from gristmill_service.run.machine.commands.command import Command, FindQuota, View
from gristmill_service.run.machine.decisions import aborts, admission, ingest, quotas, row_rules, sealing
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.decisions.rewards import take_rewards
from gristmill_service.run.machine.decisions.row_rules import NamedTags, check_schema
from gristmill_service.run.machine.events import (
    Event,
    GroupDropped,
    GroupKey,
    GroupsAdmitted,
    NewGroup,
    RunFinished,
    StoredRow,
)
from gristmill_service.run.machine.state import State


class BeginGroups(Command[Admissions]):
    """groups: with a size of their own, or 0 for the run's, and their tags. quota: the caller's, where it has one."""

    def __init__(self, groups: Sequence[NewGroup], quota: FindQuota | None = None) -> None:
        self._groups, self._quota = groups, quota
        self._found: list[Admission] = []
        self._full_reason, self._waits = "", True

    def decide(self, view: View) -> Sequence[Event]:
        row_rules.check_sizes(view.state, self._groups, view.config)
        tags = NamedTags(view.state)
        for key, _, tag in self._groups:
            if key not in view.state.closed:
                tags.name(key, tag, str(key))
        is_finished = view.state.finished
        room = Room(len(self._groups), "") if is_finished else _room(view, self._quota)
        self._waits = room.waits
        self._found, admitted = admission.begin(view.state, self._groups, view.config, room, tags)
        if admitted and is_finished:
            raise ingest.finished()
        self._full_reason = self._reason(room, tags)
        begun = [GroupsAdmitted(tuple(admitted.values()), view.now())] if admitted else []
        return [*begun, *tags.events(admitted.values())]

    def _reason(self, room: Room, tags: NamedTags) -> str:
        """Why there is no room for the first group that has none."""
        if Admission.NO_ROOM not in self._found:
            return ""
        return room.reason_for(tags.of(self._groups[self._found.index(Admission.NO_ROOM)].key))

    def answer(self, state: State) -> Admissions:
        if Admission.NO_ROOM in self._found:
            return Admissions(self._found, admission.RETRY_AFTER_S, self._full_reason, self._waits)
        return Admissions(self._found)


def _room(view: View, quota: FindQuota | None) -> Room:
    room = view.room()
    return room if quota is None else room.within(quotas.room(quota()))


class TakeRows(Command[list[Outcome]]):
    """rows: as the state would know them; steps: the same with their tokens. quota: the caller's, where it has one."""

    def __init__(self, steps: Steps, rows: Sequence[StoredRow], quota: FindQuota | None = None) -> None:
        self._steps, self._rows, self._quota = steps, rows, quota
        self._outcomes: list[Outcome] = []

    def decide(self, view: View) -> Sequence[Event]:
        schema = check_schema(self._steps, view.state.schema, view.config)
        self._outcomes, events = ingest.take_rows(
            view.state,
            view.config,
            self._rows,
            self._steps.tags,
            schema,
            lambda: _room(view, self._quota),
            lambda rows: self._check_held(view, rows),
            view.now,
        )
        return events

    def _check_held(self, view: View, rows: Sequence[StoredRow]) -> None:
        """Raises ResourceExhaustedError where there is no room for these rows."""
        ingest.check_bytes(rows, view.bytes_left())
        for quota in (view.quota(), self._quota and self._quota()):
            if quota is not None:
                quotas.check(quota, rows)

    def answer(self, state: State) -> list[Outcome]:
        return self._outcomes


class SetRewards(Command[int]):
    """digests: of each update's values per token, empty where it has none."""

    def __init__(self, updates: Sequence[RewardUpdate], digests: Sequence[bytes]) -> None:
        self._updates, self._digests, self._changed = updates, digests, 0

    def decide(self, view: View) -> Sequence[Event]:
        self._changed, events = take_rewards(view.state, self._updates, self._digests)
        return events

    def answer(self, state: State) -> int:
        return self._changed


class AbortTrajectories(Command[int]):
    def __init__(self, trajectories: Sequence[TrajectoryKey], reason: str) -> None:
        self._trajectories, self._reason, self._count = trajectories, reason, 0

    def decide(self, view: View) -> Sequence[Event]:
        aborted, dropped = aborts.abort_trajectories(view.state, view.config, self._trajectories, self._reason)
        self._count = len(aborted)
        return [*aborted, *dropped]

    def answer(self, state: State) -> int:
        return self._count


class AbortGroups(Command[int]):
    def __init__(self, groups: Sequence[GroupKey], reason: str) -> None:
        self._groups, self._reason, self._count = groups, reason, 0

    def decide(self, view: View) -> Sequence[Event]:
        dropped = aborts.abort_groups(view.state, self._groups, self._reason)
        self._count = len(dropped)
        return [*dropped]

    def answer(self, state: State) -> int:
        return self._count


class CloseStragglers(Command[None]):
    """Closes or drops the groups whose time is over, and lets a batch go on that waited for `tag_shares`."""

    def decide(self, view: View) -> Sequence[Event]:
        late = aborts.timeouts(view.state, view.config, view.now())
        return late or sealing.tag_timeout(view.state, view.config, view.room(), view.now())

    def answer(self, state: State) -> None:
        pass


class SealBatch(Command[Sealed]):
    """batch: the number that it is to get, so that the call may be repeated; None: the next."""

    def __init__(self, batch: int | None) -> None:
        self._batch, self._number = batch, -1

    def decide(self, view: View) -> Sequence[Event]:
        state, asked = view.state, self._batch
        self._number = state.batches_sealed if asked is None else asked
        if 0 <= self._number < state.batches_sealed:
            return []
        if self._number != state.batches_sealed:
            raise FailedPreconditionError(
                f"batch {asked} cannot be sealed, the next is {state.batches_sealed}; seal that"
            )
        return [sealing.seal_now(state, view.config)]

    def answer(self, state: State) -> Sealed:
        return Sealed(self._number, state.prompts[self._number])


class FinishRun(Command[int]):
    """Answers how many batches the run has in all."""

    def __init__(self) -> None:
        self._train_batch_size = 1

    def decide(self, view: View) -> Sequence[Event]:
        state = view.state
        self._train_batch_size = view.config.train_batch_size
        if state.finished:
            return []
        incomplete = [key for key in state.open if key not in state.complete]
        return [RunFinished(), *(GroupDropped(key, "finished") for key in incomplete)]

    def answer(self, state: State) -> int:
        return state.batches_sealed + sealing.remaining_batches(state, self._train_batch_size)
