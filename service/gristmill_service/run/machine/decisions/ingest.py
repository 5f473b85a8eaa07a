"""Accept submitted rows: reads the state, returns outcomes and events, changes nothing.

Each row is checked against the state and the rows accepted before it in the request, as if it had come alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from gristmill._wire.row_fields import MOST_OF_RUN
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import (
    AlreadyExistsError,
    GristmillError,
    InvalidArgumentError,
    PrefixUnknownError,
    ResourceExhaustedError,
)
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.validate import (
    check_advantage_schema,
    check_lengths,
    check_partitions,
    check_versions,
    checked_components,
)
from gristmill_service.run.machine.answers import Outcome, Taken
from gristmill_service.run.machine.closed_groups import ClosedOutcome
from gristmill_service.run.machine.decisions.admission import (
    Capacity,
    FindQuota,
    NamedTags,
    View,
    check_number_of_new,
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

# A global, because looking up an enum member calls a Python function.
_ACCEPTED = Outcome.ACCEPTED
_NOTHING: Mapping[int, StoredRow] = MappingProxyType({})


def take_rows(
    view: View, steps: Steps, rows: Sequence[StoredRow], find_quota: FindQuota | None = None, by_row: bool = False
) -> Decision[Taken]:
    """Stores the new rows of a request.

    rows: the rows as the state describes them. steps: the same rows with their tokens. find_quota: returns the caller's
    quota; None if it has none. by_row: if true, an invalid row is refused alone, with the later rows of its trajectory
    and attempt, which would leave a gap; if false, one invalid row refuses the whole request.
    """
    grouped = list(by_group(rows))
    closed = view.state.outcomes([key for key, _ in grouped])
    intake = _Intake(view, steps, rows, closed, find_quota, by_row)
    outcomes: list[Outcome] = []
    refused: dict[int, GristmillError] = {}
    lost: dict[tuple[TrajectoryKey, int], GristmillError] = {}
    for key, group_rows in grouped:
        group = intake.group(key)
        for row in group_rows:
            try:
                if lost and (error := lost.get((row.trajectory, row.attempt))):
                    raise error
                outcomes.append(intake.take(len(outcomes), row, key, group))
            except (InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError) as error:
                if not by_row and not isinstance(error, ResourceExhaustedError):
                    raise
                # The traceback would keep the request's rows alive in a reference cycle.
                refused[len(outcomes)] = lost[row.trajectory, row.attempt] = error.with_traceback(None)
                outcomes.append(Outcome.REFUSED)
    if refused and not by_row:
        check_number_of_new(view, rows)
        raise next(iter(refused.values()))
    return intake.events(), lambda _: Taken(outcomes, refused)


class _Intake:
    """Collects how a request's rows change the state. Refused rows change nothing."""

    def __init__(
        self,
        view: View,
        steps: Steps,
        rows: Sequence[StoredRow],
        closed: Mapping[GroupKey, ClosedOutcome],
        find_quota: FindQuota | None,
        by_row: bool,
    ) -> None:
        self._closed = closed
        self._view, self._state, self._steps, self._by_row = view, view.state, steps, by_row
        self._tags = steps.tags
        limited = ((name, getattr(steps, name), most) for name, most in MOST_OF_RUN.items())
        self._limited = [(name, texts, most) for name, texts, most in limited if texts is not None]
        self._schema = _checked_schema(steps, view.state.schema, view.config)
        # Scalar rewards are checked row by row, because their table may also contain rows with pending rewards.
        self._takes_no_scalars = steps.token_rewards is None and bool(self._schema.token_rewards)
        self._named, self._capacity = NamedTags(view.state), Capacity(view, find_quota)
        # Nearly always true; then rows of open groups need no counting.
        self._is_ample = self._capacity.is_ample(rows)
        self._groups: dict[GroupKey, _GroupView] = {}
        self._begun: list[GroupKey] = []
        self._stored: list[StoredRow] = []

    def group(self, key: GroupKey) -> _GroupView | None:
        """Returns the group; None if it is closed."""
        if key in self._closed:
            return None
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = _GroupView(self._state.open.get(key), self._view.config)
        return group

    def take(self, index: int, row: StoredRow, key: GroupKey, group: _GroupView | None) -> Outcome:
        """Returns the outcome of the request's row at this index, and collects its effects.

        group: None for a closed group. Raises PrefixUnknownError and FailedPreconditionError for the whole request,
        and other errors for the row alone.
        """
        if self._takes_no_scalars and row.reward is not None:
            raise _of_other_kind(row, "token_rewards", False)
        if group is None:
            return _closed_outcome(self._state, row, self._closed[key])
        trajectory, tag = group.trajectory(row), ""
        outcome = group.dropped(row, self._by_row) if trajectory is None else trajectory.judge(row)
        if self._tags is not None and (given := self._tags[index]) and self._named.is_new(key, given, str(row)):
            tag = given
        if trajectory is not None and outcome is _ACCEPTED:
            if self._state.finished:
                raise finished()
            schema = self._with_names(index, row) if self._limited else self._schema
            names = schema.components
            if row.is_last:
                names = checked_components(self._steps, index, names, self._view.config)
            begins = None if group.is_open else tag or self._named.names.get(key, "")
            if begins is not None or not self._is_ample:
                self._capacity.take(row, begins)
            if begins is not None:
                self._begun.append(key)
                group.is_open = True
            if names != schema.components:
                schema = replace(schema, components=names)
            self._schema = schema
            trajectory.add(row)
            self._stored.append(row)
        if tag:
            self._named.names[key] = tag
        return outcome

    def _with_names(self, index: int, row: StoredRow) -> RowSchema:
        """Returns the schema with the row's agent and partition. Raises InvalidArgumentError for one too many."""
        schema = self._schema
        for name, texts, most in self._limited:
            text, known = texts[index], getattr(schema, name)
            if text and text not in known:
                if len(known) == most:
                    raise InvalidArgumentError(
                        f"{row}: {name[:-1]} {text!r} would be one more than the {most} {name} that a run may have "
                        f"({', '.join(map(repr, known[:5]))}, ...); use fewer"
                    )
                change: dict[str, Any] = {name: (*known, text)}
                schema = replace(schema, **change)
        return schema

    def events(self) -> list[Event]:
        events: list[Event] = []
        names, samples = self._named.names, self._view.config.n_samples_per_prompt
        admitted = tuple([NewGroup(key, samples, names.get(key, "")) for key in self._begun])
        if admitted:
            events.append(GroupsAdmitted(admitted, self._view.now()))
        if names:
            events += self._named.events(admitted)
        if self._stored:
            schema = self._schema
            # A pending reward may become a scalar or a reward per token.
            if schema.token_rewards is None and any(row.reward is not None for row in self._stored):
                schema = replace(schema, token_rewards=False)
            if schema != self._state.schema:
                events.append(SchemaFixed(schema))
            events.append(RowsStored(tuple(self._stored)))
        return events


def _checked_schema(steps: Steps, schema: RowSchema, config: RunConfig) -> RowSchema:
    """Returns the run's row schema, completed by the kinds of values that these rows have. Raises InvalidArgumentError
    if the rows contradict the schema.

    Scalar rewards are not checked here, because rows with pending rewards may share their table.
    """
    check_advantage_schema(steps, config)
    check_lengths(steps, config)
    check_partitions(steps, config)
    check_versions(steps, config)
    if steps.advantages is not None and steps.token_advantages is not None:
        raise InvalidArgumentError(f"{steps.name(0)}: advantage is sent twice, as a number and per token; send one")
    has_advantages = steps.advantages is not None or steps.token_advantages is not None
    kinds = {
        "logprobs": steps.logprobs is not None,
        "token_rewards": True if steps.token_rewards is not None else None,
        "token_advantages": None if not has_advantages else steps.token_advantages is not None,
    }
    for name, value in kinds.items():
        before = getattr(schema, name)
        if value is not None and before is not None and value != before:
            raise _of_other_kind(steps.name(0), name, value)
    fixed: dict[str, Any] = {
        name: value for name, value in kinds.items() if value is not None and value != getattr(schema, name)
    }
    return replace(schema, **fixed) if fixed else schema


def _of_other_kind(row: object, name: str, value: bool) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{row}: has {ROW_KINDS[name][value]}, but earlier rows of this run have {ROW_KINDS[name][not value]}; send "
        "the same in all rows of a run"
    )


def _closed_outcome(state: State, row: StoredRow, closed: ClosedOutcome) -> Outcome:
    """Returns the outcome of a row of a closed group. A row of a sealed batch is compared with the stored row, if that
    is still stored."""
    if isinstance(closed, str) or state.is_dropped(closed):
        return Outcome.DROPPED
    batch = state.batches.get(closed)
    group = next((group for group in batch.groups if group.key == row.group), None) if batch else None
    trajectory = group.trajectories.get(row.trajectory.sample) if group else None
    known = trajectory.rows.get(row.step) if trajectory and trajectory.attempt == row.attempt else None
    return Outcome.DUPLICATE if known is not None and known.digest == row.digest else Outcome.SEALED


class _TrajectoryView:
    """A trajectory of the state, plus the rows of the request that were accepted so far."""

    __slots__ = ("added", "attempt", "before", "highest", "last")

    def __init__(self, trajectory: Trajectory | None) -> None:
        self.attempt, self.before, self.last, self.highest = -1, _NOTHING, None, -1
        self.added: dict[int, StoredRow] = {}
        if trajectory is not None and trajectory.rows:
            self.attempt, self.before = trajectory.attempt, trajectory.rows
            self.last, self.highest = trajectory.last, trajectory.highest

    def judge(self, row: StoredRow) -> Outcome:
        """Returns the row's outcome. Raises AlreadyExistsError or InvalidArgumentError if the row contradicts earlier
        rows, and PrefixUnknownError if it omits tokens of a step that is missing."""
        if row.attempt == self.attempt:
            known = self.added.get(row.step) or self.before.get(row.step)
            if known is not None:
                return _compared(row, known)
            self._check_order(row)
        elif row.attempt < self.attempt:
            return Outcome.SUPERSEDED
        if row.parent is not None and not (row.attempt == self.attempt and self._has(row.step - 1)):
            raise PrefixUnknownError(f"{row}: the run no longer has the previous step; send all tokens of the row")
        return _ACCEPTED

    def add(self, row: StoredRow) -> None:
        """Adds an accepted row."""
        if row.attempt != self.attempt:
            self.attempt, self.before, self.added, self.last, self.highest = row.attempt, _NOTHING, {}, None, -1
        self.added[row.step] = row
        if row.step > self.highest:
            self.highest = row.step
        if row.is_last:
            self.last = row.step

    def _has(self, step: int) -> bool:
        return step in self.added or step in self.before

    def _check_order(self, row: StoredRow) -> None:
        if self.last is not None and (row.is_last or row.step > self.last):
            problem = "is_last_step is true" if row.is_last else f"step {row.step} comes after the last step"
            raise InvalidArgumentError(
                f"{row}: {problem}, and step {self.last} is already the last of the "
                "trajectory; set is_last_step on exactly one step"
            )
        if row.is_last and row.step < self.highest:
            raise InvalidArgumentError(
                f"{row}: is_last_step is true, but step {self.highest} was already "
                "accepted; set it on the step with the highest number"
            )
        other = next(chain(self.added.values(), self.before.values()))
        for name in ("agent", "episode"):
            if (known := getattr(other, name)) != (given := getattr(row, name)):
                raise InvalidArgumentError(
                    f"{row}: {name} {given!r} differs from {known!r} on step {other.step}; send the same on every step "
                    "of a trajectory"
                )
        if other.advantage != row.advantage:
            raise InvalidArgumentError(
                f"{row}: advantage {row.advantage} differs from {other.advantage} on step "
                f"{other.step}; send the same on every step of a trajectory, or one per response token"
            )


def _compared(row: StoredRow, known: StoredRow) -> Outcome:
    """Returns the outcome of a row whose step was accepted before. Raises AlreadyExistsError for other content."""
    if known.digest != row.digest:
        raise AlreadyExistsError(
            f"{row}: different content was accepted for this step of attempt {row.attempt}; send the same row, or "
            "sample the trajectory again with a higher attempt"
        )
    return Outcome.DUPLICATE


class _GroupView:
    """A group of the state, plus the rows of the request that were accepted so far. is_open: false if the group would
    begin with its first row."""

    __slots__ = ("_before", "_config", "_group", "_is_step_wise", "_samples", "_views", "is_open")

    def __init__(self, group: Group | None, config: RunConfig) -> None:
        self._group, self._config, self.is_open = group, config, group is not None
        self._samples, self._is_step_wise = samples_of(group, config), config.step_wise
        self._before: Mapping[int, Trajectory] = {} if group is None else group.trajectories
        self._views: dict[int, _TrajectoryView] = {}

    def trajectory(self, row: StoredRow) -> _TrajectoryView | None:
        """Returns the row's trajectory; None if it was aborted. Raises InvalidArgumentError if the row does not fit the
        group's size or the run's settings."""
        sample = row.trajectory.sample
        if not 0 <= sample < self._samples:
            raise no_sample(row, self._group, self._config)
        if not self._is_step_wise and (row.step or not row.is_last):
            raise InvalidArgumentError(
                f"{row}: with step_wise: false a trajectory has only step 0, which is the last; set "
                "step_wise: true for trajectories of several turns"
            )
        if self._group is not None and not self._group.takes(sample, row.attempt):
            return None
        view = self._views.get(sample)
        if view is None:
            view = self._views[sample] = _TrajectoryView(self._before.get(sample))
        return view

    def dropped(self, row: StoredRow, by_row: bool) -> Outcome:
        """Returns the outcome of a row of an aborted trajectory.

        If rows are refused one by one, raises AlreadyExistsError for the first step of a trajectory that may be sampled
        again: the client began it without a higher attempt. Later steps get DROPPED, because their trajectory was
        already running when it was aborted."""
        group, sample = self._group, row.trajectory.sample
        if by_row and not row.step and group is not None and group.takes_again(sample):
            raise AlreadyExistsError(
                f"{row}: attempt {group.given_up[sample]} was aborted ({group.aborted[sample]}), and this is attempt "
                f"{row.attempt}; sample the trajectory again with a higher attempt"
            )
        return Outcome.DROPPED
