"""What becomes of submitted rows: reads the state, returns outcomes and events, changes nothing.

A request is taken whole or refused whole, so rows are judged against the state and the request's own earlier rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import add
from types import MappingProxyType

from gristmill._wire.named_tuples import made_of
from gristmill._wire.steps import Steps
from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    PrefixUnknownError,
    ResourceExhaustedError,
)
from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.decisions.admission import RETRY_AFTER_S, BytesLeft, Room
from gristmill_service.run.machine.decisions.row_rules import NamedTags, no_sample, samples_of
from gristmill_service.run.machine.events import (
    Event,
    GroupKey,
    GroupsAdmitted,
    NewGroup,
    RowName,
    RowRef,
    RowSchema,
    RowsStored,
    SchemaFixed,
    StoredRow,
)
from gristmill_service.run.machine.groups import Group, Trajectory
from gristmill_service.run.machine.row_digests import RowDigests
from gristmill_service.run.machine.row_keys import RowKeys, by_group
from gristmill_service.run.machine.state import State

ROW_OVERHEAD_BYTES = 768
"""What a row takes beside the values of its tokens, as it is held: its keys, digest, lengths and places."""


def describe_rows(
    steps: Steps,
    keys: RowKeys,
    table: int,
    digests: RowDigests,
    tokens: Sequence[bytes],
    parents: Sequence[RowName | None],
) -> list[StoredRow]:
    """The rows of a request as the state knows them, should they be stored as this table.

    digests: of the table's rows. tokens: of each row the digest of all its tokens. parents: of each row, as `StoredRow`
    has it.
    """
    count, checks = len(steps), [b""] * len(steps)
    if steps.prefix_lengths is not None:
        own = digests.of_own()
        checks = [b"" if parent is None else own[row] for row, parent in enumerate(parents)]
    pending, rewards = steps.rewards_pending.tolist(), steps.rewards.tolist()
    responses = steps.response_lengths.tolist()
    return made_of(
        StoredRow,
        keys.trajectories,
        steps.steps.tolist(),
        steps.attempts.tolist(),
        steps.is_last_steps.tolist(),
        made_of(RowRef, [table] * count, range(count)),
        digests.of(tokens),
        _sizes(steps, responses),
        responses,
        steps.policy_versions.tolist(),
        [None if waits else reward for waits, reward in zip(pending, rewards, strict=True)],
        digests.rewards,
        [None] * count if steps.advantages is None else steps.advantages.tolist(),
        [b""] * count,
        steps.sequence_lengths.tolist(),
        parents,
        checks,
    )


def _sizes(steps: Steps, responses: Sequence[int]) -> list[int]:
    """The bytes that each row takes, as it is held."""
    item = sum(column.values.itemsize for column in steps.token_columns)
    own = zip(steps.tokens.lengths.tolist(), responses, strict=True)
    sizes = [ROW_OVERHEAD_BYTES + 4 * tokens + item * response for tokens, response in own]
    for extra in steps.extras.values():
        sizes = [*map(add, sizes, extra.row_bytes.tolist())]
    return sizes


# An enum is asked for a member by a function in Python.
_ACCEPTED = Outcome.ACCEPTED
_NOTHING: Mapping[int, StoredRow] = MappingProxyType({})


class _View:
    """A trajectory as the state has it, and with the request's own rows added."""

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
                f"{row}: the run does not have the step before it any more; send all tokens of the row"
            )
        self.added[step] = row
        if step > self.highest:
            self.highest = step
        if row.is_last:
            self.last = step
        return _ACCEPTED

    def _compared(self, row: StoredRow) -> Outcome:
        """With the rows that are there."""
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
                "sample the trajectory anew with a higher attempt"
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
    """An open group, and with the request's own rows added. group: None where it begins with them."""

    __slots__ = ("_aborted", "_before", "_config", "_is_step_wise", "_samples", "_views", "group")

    def __init__(self, group: Group | None, config: RunConfig) -> None:
        self.group, self._config = group, config
        self._samples, self._is_step_wise = samples_of(group, config), config.step_wise
        self._aborted: Collection[int] = () if group is None else group.aborted
        self._before: Mapping[int, Trajectory] = {} if group is None else group.trajectories
        self._views: dict[int, _View] = {}

    def check(self, row: StoredRow) -> None:
        """Refuses a row that no group of its size, or no run of these settings, has."""
        if not 0 <= row.trajectory.sample < self._samples:
            raise no_sample(row, self.group, self._config)
        if not self._is_step_wise and (row.step or not row.is_last):
            raise InvalidArgumentError(
                f"{row}: with step_wise: false a trajectory has one step, which is number 0 and the last; set "
                "step_wise: true for trajectories of several turns"
            )

    def take(self, row: StoredRow) -> Outcome:
        sample = row.trajectory.sample
        if sample in self._aborted:
            return Outcome.DROPPED
        view = self._views.get(sample)
        if view is None:
            view = self._views[sample] = _View(self._before.get(sample))
        return view.take(row)


def take_rows(
    state: State,
    config: RunConfig,
    rows: Sequence[StoredRow],
    tags: Sequence[str] | None,
    schema: RowSchema,
    room: Callable[[], Room],
    check_held: Callable[[Sequence[StoredRow]], None],
    now: Callable[[], float],
) -> tuple[list[Outcome], list[Event]]:
    """Outcome of each row, and what happened. Raises with nothing decided when any row is refused.

    tags: of each row, as it names its group's; None where none does. check_held: raises where there is no room for
    rows that would be stored.
    """
    named = NamedTags(state)
    views: dict[GroupKey, _GroupView] = {}
    outcomes: list[Outcome] = []
    stored: list[StoredRow] = []
    begun: list[GroupKey] = []
    for key, own in by_group(rows):
        closed = state.closed.get(key)
        if closed is not None:
            outcomes += [_closed_outcome(state, row, closed) for row in own]
            continue
        if (view := views.get(key)) is None:
            view = views[key] = _GroupView(state.open.get(key), config)
            if view.group is None:
                begun.append(key)
        for row in own:
            view.check(row)
            if tags is not None and (tag := tags[len(outcomes)]):
                named.name(key, tag, str(row))
            outcome = view.take(row)
            outcomes.append(outcome)
            if outcome is _ACCEPTED:
                stored.append(row)
    if state.finished and (begun or stored):
        raise finished()
    events: list[Event] = []
    admitted = tuple([NewGroup(key, config.n_samples_per_prompt, named.of(key)) for key in begun])
    if admitted:
        _check_room(admitted, room(), config)
        events.append(GroupsAdmitted(admitted, now()))
    events += named.events(admitted)
    if stored:
        check_held(stored)
        if schema != state.schema:
            events.append(SchemaFixed(schema))
        events.append(RowsStored(tuple(stored)))
    return outcomes, events


def _closed_outcome(state: State, row: StoredRow, closed: int | str) -> Outcome:
    """A row whose group is sealed was taken before, as far as the batch is still held to compare it with."""
    if isinstance(closed, str) or state.is_dropped(closed):
        return Outcome.DROPPED
    batch = state.batches.get(closed)
    group = next((group for group in batch.groups if group.key == row.group), None) if batch else None
    trajectory = group.trajectories.get(row.trajectory.sample) if group else None
    known = trajectory.rows.get(row.step) if trajectory and trajectory.attempt == row.attempt else None
    return Outcome.DUPLICATE if known is not None and known.digest == row.digest else Outcome.SEALED


def check_bytes(stored: Sequence[StoredRow], left: BytesLeft) -> None:
    """Raises ResourceExhaustedError where the rows take more than is left."""
    nbytes = sum(row.nbytes for row in stored)
    if nbytes > left.nbytes:
        raise ResourceExhaustedError(
            f"{stored[0]}: the run needs {nbytes} bytes to hold the request's rows, and {left.nbytes} are left: "
            f"{left.reason}",
            RETRY_AFTER_S,
        )


def finished() -> FailedPreconditionError:
    return FailedPreconditionError("the run is finished and takes no more rollouts; create another run")


def _check_room(admitted: Sequence[NewGroup], found: Room, config: RunConfig) -> None:
    left = found
    for refused in admitted:
        if not left.groups_of(refused.tag):
            break
        left = left.less(refused.tag)
    else:
        return
    most = config.max_buffered_batches * config.train_batch_size
    if len(admitted) > most:
        raise InvalidArgumentError(
            f"{admitted[0].key}: the request begins {len(admitted)} prompt groups at once, and "
            f"max_buffered_batches allows {most}; begin fewer in one request"
        )
    raise ResourceExhaustedError(
        f"{admitted[0].key}: no room for {len(admitted)} more prompt groups, {found.groups_of(refused.tag)} may "
        f"be admitted: {found.reason_for(refused.tag)}",
        RETRY_AFTER_S,
    )
