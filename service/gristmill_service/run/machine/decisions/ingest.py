"""Take submitted rows: reads the state, returns outcomes and events, changes nothing.

A request is taken or refused as a whole: each row is checked against the state and the earlier rows of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from gristmill._wire.steps import Steps
from gristmill.errors import AlreadyExistsError, InvalidArgumentError, PrefixUnknownError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.validate import check_advantage_schema
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.decisions.admission import (
    FindQuota,
    NamedTags,
    View,
    check_bytes,
    check_room,
    finished,
    no_sample,
    samples_of,
)
from gristmill_service.run.machine.events import (
    ROW_KINDS,
    Event,
    GroupKey,
    GroupsAdmitted,
    NewGroup,
    RowSchema,
    RowsStored,
    SchemaFixed,
    StoredRow,
)
from gristmill_service.run.machine.groups import Group, Trajectory, by_group
from gristmill_service.run.machine.state import Decision, State

# Looking up a member of an enum calls a Python function.
_ACCEPTED = Outcome.ACCEPTED
_NOTHING: Mapping[int, StoredRow] = MappingProxyType({})


def take_rows(
    view: View, steps: Steps, rows: Sequence[StoredRow], find_quota: FindQuota | None = None
) -> Decision[list[Outcome]]:
    """Stores the rows that are new. Refuses all if any is refused.

    rows: as the state will have them. steps: the same rows with their tokens. find_quota: the caller's quota, if it has
    one.
    """
    state, config = view.state, view.config
    schema = _checked_schema(steps, state.schema, config)
    named = NamedTags(state)
    views: dict[GroupKey, _GroupView] = {}
    outcomes: list[Outcome] = []
    stored: list[StoredRow] = []
    begun: list[GroupKey] = []
    for key, group_rows in by_group(rows):
        closed = state.closed.get(key)
        if closed is not None:
            outcomes += [_closed_outcome(state, row, closed) for row in group_rows]
            continue
        if (group := views.get(key)) is None:
            group = views[key] = _GroupView(state.open.get(key), config)
            if group.group is None:
                begun.append(key)
        for row in group_rows:
            if steps.tags is not None and (tag := steps.tags[len(outcomes)]):
                named.name(key, tag, str(row))
            outcome = group.take(row)
            outcomes.append(outcome)
            if outcome is _ACCEPTED:
                stored.append(row)
    if state.finished and (begun or stored):
        raise finished()
    events: list[Event] = []
    admitted = tuple([NewGroup(key, config.n_samples_per_prompt, named.names.get(key, "")) for key in begun])
    if admitted:
        check_room(view, admitted, find_quota)
        events.append(GroupsAdmitted(admitted, view.now()))
    if named.names:
        events += named.events(admitted)
    if stored:
        check_bytes(view, stored, find_quota)
        if schema != state.schema:
            events.append(SchemaFixed(schema))
        events.append(RowsStored(tuple(stored)))
    return events, lambda _: outcomes


def _checked_schema(steps: Steps, schema: RowSchema, config: RunConfig) -> RowSchema:
    """Returns the run's row schema, completed by these rows. Raises InvalidArgumentError if they disagree."""
    check_advantage_schema(steps, config)
    if steps.advantages is not None and steps.token_advantages is not None:
        raise InvalidArgumentError(
            f"{steps.name(0)}: advantage is given twice, as one number and per response token; send one of them"
        )
    has_advantages = steps.advantages is not None or steps.token_advantages is not None
    # Rows with pending rewards may get rewards of either kind.
    waits = steps.token_rewards is None and bool(steps.rewards_pending.all())
    kinds = {
        "logprobs": steps.logprobs is not None,
        "token_rewards": None if waits else steps.token_rewards is not None,
        "token_advantages": None if not has_advantages else steps.token_advantages is not None,
    }
    for name, value in kinds.items():
        before = getattr(schema, name)
        if value is not None and before is not None and value != before:
            raise InvalidArgumentError(
                f"{steps.name(0)}: has {ROW_KINDS[name][value]}, and the rows before it in this run have "
                f"{ROW_KINDS[name][before]}; all rows of a run are alike in this"
            )
    fixed = {name: value for name, value in kinds.items() if value is not None and value != getattr(schema, name)}
    return replace(schema, **fixed) if fixed else schema


def _closed_outcome(state: State, row: StoredRow, closed: int | str) -> Outcome:
    """Returns the outcome of a row of a closed group. Rows of a sealed batch are compared while they are stored."""
    if isinstance(closed, str) or state.is_dropped(closed):
        return Outcome.DROPPED
    batch = state.batches.get(closed)
    group = next((group for group in batch.groups if group.key == row.group), None) if batch else None
    trajectory = group.trajectories.get(row.trajectory.sample) if group else None
    known = trajectory.rows.get(row.step) if trajectory and trajectory.attempt == row.attempt else None
    return Outcome.DUPLICATE if known is not None and known.digest == row.digest else Outcome.SEALED


class _TrajectoryView:
    """A trajectory in the state, with the rows of the request that were accepted so far."""

    __slots__ = ("added", "attempt", "before", "highest", "last")

    def __init__(self, trajectory: Trajectory | None) -> None:
        self.attempt, self.before, self.last, self.highest = -1, _NOTHING, None, -1
        self.added: dict[int, StoredRow] = {}
        if trajectory is not None:
            self.attempt, self.before = trajectory.attempt, trajectory.rows
            self.last, self.highest = trajectory.last, trajectory.highest

    def take(self, row: StoredRow) -> Outcome:
        if not self.added and not self.before:
            self.attempt = row.attempt
        elif (outcome := self._compared(row)) is not _ACCEPTED:
            return outcome
        step = row.step
        if row.parent is not None and step - 1 not in self.added and step - 1 not in self.before:
            raise PrefixUnknownError(
                f"{row}: the run does not have the step before any more; send all tokens of the row"
            )
        self.added[step] = row
        if step > self.highest:
            self.highest = step
        if row.is_last:
            self.last = step
        return _ACCEPTED

    def _compared(self, row: StoredRow) -> Outcome:
        """Returns the outcome of a row whose trajectory has other rows."""
        if row.attempt < self.attempt:
            return Outcome.SUPERSEDED
        if row.attempt > self.attempt:
            self.attempt, self.before, self.added, self.last, self.highest = row.attempt, _NOTHING, {}, None, -1
            return _ACCEPTED
        known = self.added.get(row.step) or self.before.get(row.step)
        if known is None:
            self._check_order(row)
            return _ACCEPTED
        if known.digest != row.digest:
            raise AlreadyExistsError(
                f"{row}: other content was accepted for this step of attempt {row.attempt}; send the same row, or "
                "sample the trajectory again with a higher attempt"
            )
        return Outcome.DUPLICATE

    def _check_order(self, row: StoredRow) -> None:
        if self.last is not None and (row.is_last or row.step > self.last):
            problem = "is_last_step is true" if row.is_last else f"step {row.step} comes after the last step"
            raise InvalidArgumentError(
                f"{row}: {problem}, and step {self.last} is the last of the trajectory "
                "already; exactly one step is the last"
            )
        if row.is_last and row.step < self.highest:
            raise InvalidArgumentError(
                f"{row}: is_last_step is true, and step {self.highest} was accepted "
                "already; the last step has the highest number"
            )
        other = next(chain(self.added.values(), self.before.values()))
        if other.advantage != row.advantage:
            raise InvalidArgumentError(
                f"{row}: advantage is {row.advantage} and {other.advantage} on step "
                f"{other.step}; give the same on every step of a trajectory, or one per response token"
            )


class _GroupView:
    """An open group with the rows of the request that were accepted so far. group: None for a group that begins with
    them."""

    __slots__ = ("_before", "_config", "_is_step_wise", "_samples", "_views", "group")

    def __init__(self, group: Group | None, config: RunConfig) -> None:
        self.group, self._config = group, config
        self._samples, self._is_step_wise = samples_of(group, config), config.step_wise
        self._before: Mapping[int, Trajectory] = {} if group is None else group.trajectories
        self._views: dict[int, _TrajectoryView] = {}

    def take(self, row: StoredRow) -> Outcome:
        """Returns the row's outcome. Raises InvalidArgumentError if it does not fit the group's size, the run's
        settings or the trajectory."""
        sample = row.trajectory.sample
        if not 0 <= sample < self._samples:
            raise no_sample(row, self.group, self._config)
        if not self._is_step_wise and (row.step or not row.is_last):
            raise InvalidArgumentError(
                f"{row}: with step_wise: false a trajectory has one step, which is number 0 and the last; set "
                "step_wise: true for trajectories of several turns"
            )
        if self.group is not None and not self.group.takes(sample, row.attempt):
            return Outcome.DROPPED
        view = self._views.get(sample)
        if view is None:
            view = self._views[sample] = _TrajectoryView(self._before.get(sample))
        return view.take(row)
