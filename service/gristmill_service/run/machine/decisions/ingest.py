"""What becomes of submitted rows: reads the state, returns outcomes and events, changes nothing.

A request is taken whole or refused whole, so rows are judged against the state and the request's own earlier rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from gristmill._wire.steps import Steps, TrajectoryKey
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
from gristmill_service.run.machine.decisions.group_sizes import check_first_sample, check_sample
from gristmill_service.run.machine.decisions.tags import NamedTags
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
from gristmill_service.run.machine.row_digests import reward_digests
from gristmill_service.run.machine.state import State

ROW_OVERHEAD_BYTES = 768
"""What a row takes beside the values of its tokens, as it is held: its keys, digest, lengths and places."""


def describe_rows(
    steps: Steps, table: int, digests: Sequence[bytes], checks: Sequence[bytes], parents: Sequence[RowName | None]
) -> list[StoredRow]:
    """The rows of a request as the state knows them, should they be stored as this table.

    digests, checks, parents: of each row, as `StoredRow` has them.
    """
    rewards_given = reward_digests(steps)
    itemsize = sum(
        column.values.itemsize
        for column in (
            steps.loss_mask,
            steps.logprobs,
            steps.token_rewards,
            steps.token_advantages,
            steps.token_versions,
        )
        if column is not None
    )
    responses = steps.response_lengths
    sizes = ROW_OVERHEAD_BYTES + 4 * steps.tokens.lengths + itemsize * responses
    for extra in steps.extras.values():
        sizes += extra.row_bytes
    nbytes, lengths = sizes.tolist(), steps.sequence_lengths.tolist()
    pending, rewards = steps.rewards_pending.tolist(), steps.rewards.tolist()
    advantages = [None] * len(steps) if steps.advantages is None else steps.advantages.tolist()
    columns = zip(
        steps.rounds.tolist(),
        steps.uids,
        steps.samples.tolist(),
        steps.steps.tolist(),
        steps.attempts.tolist(),
        steps.is_last_steps.tolist(),
        responses.tolist(),
        steps.policy_versions.tolist(),
        strict=True,
    )
    return [
        StoredRow(
            trajectory=TrajectoryKey(round_, uid, sample),
            step=step,
            attempt=attempt,
            is_last=last,
            ref=RowRef(table, row),
            digest=digests[row],
            nbytes=nbytes[row],
            response_length=response,
            version=version,
            reward=None if pending[row] else rewards[row],
            reward_digest=rewards_given[row],
            advantage=advantages[row],
            tokens=lengths[row],
            parent=parents[row],
            check=checks[row],
        )
        for row, (round_, uid, sample, step, attempt, last, response, version) in enumerate(columns)
    ]


@dataclass(slots=True)
class _View:
    """A trajectory as the state has it, and with the request's own rows added."""

    attempt: int = -1
    before: dict[int, StoredRow] = field(default_factory=dict)
    added: dict[int, StoredRow] = field(default_factory=dict)
    last: int | None = None
    highest: int = -1

    @classmethod
    def of(cls, trajectory: Trajectory | None) -> _View:
        if trajectory is None:
            return cls()
        return cls(trajectory.attempt, trajectory.rows, {}, trajectory.last, trajectory.highest)

    def take(self, row: StoredRow) -> Outcome:
        if row.attempt < self.attempt:
            return Outcome.SUPERSEDED
        if row.attempt > self.attempt:
            self.attempt, self.before, self.added, self.last, self.highest = row.attempt, {}, {}, None, -1
        known = self.added.get(row.step) or self.before.get(row.step)
        if known is not None:
            if known.digest != row.digest:
                raise AlreadyExistsError(
                    f"{row}: other content was accepted for this step of attempt {row.attempt}; send the same row, or "
                    "sample the trajectory anew with a higher attempt"
                )
            return Outcome.DUPLICATE
        self._check_order(row)
        self.added[row.step] = row
        self.highest = max(self.highest, row.step)
        if row.is_last:
            self.last = row.step
        return Outcome.ACCEPTED

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
        other = next(iter(self.added.values()), None) or next(iter(self.before.values()), None)
        if other is not None and other.advantage != row.advantage:
            raise InvalidArgumentError(
                f"{row}: advantage is {row.advantage} and {other.advantage} on step "
                f"{other.step}; give the same on every step of a trajectory, or one per response token"
            )


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
    views: dict[TrajectoryKey, _View] = {}
    outcomes: list[Outcome] = []
    stored: list[StoredRow] = []
    admitted: dict[GroupKey, NewGroup] = {}
    for row, tag in zip(rows, repeat("") if tags is None else tags, strict=False):
        key = row.group
        closed = state.closed.get(key)
        if closed is not None:
            outcomes.append(_closed_outcome(state, row, closed))
            continue
        group = state.open.get(key)
        _check_row(row, group, config)
        if tag:
            named.name(key, tag, str(row))
        if group is None:
            admitted[key] = NewGroup(key, config.n_samples_per_prompt)
        elif row.trajectory.sample in group.aborted:
            outcomes.append(Outcome.DROPPED)
            continue
        view = views.get(row.trajectory)
        if view is None:
            trajectory = None if group is None else group.trajectories.get(row.trajectory.sample)
            view = views[row.trajectory] = _View.of(trajectory)
        outcome = view.take(row)
        outcomes.append(outcome)
        if outcome is Outcome.ACCEPTED:
            _check_parent(row, group, views)
            stored.append(row)
    if state.finished and (admitted or stored):
        raise finished()
    events: list[Event] = []
    if admitted:
        admitted = {key: new._replace(tag=named.of(key)) for key, new in admitted.items()}
        _check_room(admitted, room(), config)
        events.append(GroupsAdmitted(tuple(admitted.values()), now()))
    events += named.events(admitted.values())
    if stored:
        check_held(stored)
        if schema != state.schema:
            events.append(SchemaFixed(schema))
        events.append(RowsStored(tuple(stored)))
    return outcomes, events


def _check_parent(row: StoredRow, group: Group | None, views: dict[TrajectoryKey, _View]) -> None:
    """Refuses a row whose parent the group has no more, or never had."""
    trajectory = row.begins_as
    if row.parent is None or trajectory is None:
        return
    sample, attempt, step = row.parent
    view = views.get(trajectory)
    if view is None:
        view = _View.of(None if group is None else group.trajectories.get(sample))
    if view.attempt != attempt or (step not in view.added and step not in view.before):
        raise PrefixUnknownError(
            f"{row}: its first tokens were left out because sample {sample} step {step} has them, and the run does not "
            "have that step any more; send all tokens of the row"
        )


def _closed_outcome(state: State, row: StoredRow, closed: int | str) -> Outcome:
    """A row whose group is sealed was taken before, as far as the batch is still held to compare it with."""
    if isinstance(closed, str) or state.is_dropped(closed):
        return Outcome.DROPPED
    batch = state.batches.get(closed)
    group = next((group for group in batch.groups if group.key == row.group), None) if batch else None
    trajectory = group.trajectories.get(row.trajectory.sample) if group else None
    known = trajectory.rows.get(row.step) if trajectory and trajectory.attempt == row.attempt else None
    return Outcome.DUPLICATE if known is not None and known.digest == row.digest else Outcome.SEALED


def _check_row(row: StoredRow, group: Group | None, config: RunConfig) -> None:
    if group is None:
        check_first_sample(row, row.trajectory.sample, config)
    else:
        check_sample(row, row.trajectory.sample, group, config)
    if not config.step_wise and (row.step or not row.is_last):
        raise InvalidArgumentError(
            f"{row}: with step_wise: false a trajectory has one step, which is number 0 and the last; set step_wise: "
            "true for trajectories of several turns"
        )


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


def _check_room(admitted: dict[GroupKey, NewGroup], found: Room, config: RunConfig) -> None:
    left = found
    for refused in admitted.values():
        if not left.groups_of(refused.tag):
            break
        left = left.less(refused.tag)
    else:
        return
    most = config.max_buffered_batches * config.train_batch_size
    if len(admitted) > most:
        raise InvalidArgumentError(
            f"{next(iter(admitted))}: the request begins {len(admitted)} prompt groups at once, and "
            f"max_buffered_batches allows {most}; begin fewer in one request"
        )
    raise ResourceExhaustedError(
        f"{next(iter(admitted))}: no room for {len(admitted)} more prompt groups, {found.groups_of(refused.tag)} may "
        f"be admitted: {found.reason_for(refused.tag)}",
        RETRY_AFTER_S,
    )
