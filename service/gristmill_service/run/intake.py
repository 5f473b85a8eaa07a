"""What becomes of submitted rows and rewards: reads the state, returns outcomes and events, changes nothing.

A request is taken whole or refused whole, so rows are judged against the state and the request's own earlier rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from gristmill.steps import Steps, TrajectoryKey
from gristmill_service.config import RunConfig
from gristmill_service.run.admission import RETRY_AFTER_S, Room
from gristmill_service.run.buffer import values_digest
from gristmill_service.run.events import (
    Event,
    FormFixed,
    GroupKey,
    GroupsAdmitted,
    RewardsSet,
    RowForm,
    RowRef,
    RowsStored,
    SetReward,
    StoredRow,
)
from gristmill_service.run.groups import Trajectory
from gristmill_service.run.state import State
from gristmill_service.run.views import Outcome, RewardUpdate


def describe_rows(steps: Steps, digests: Sequence[bytes], chunk: int) -> list[StoredRow]:
    """The rows of a request as the state knows them, should they be stored as this chunk."""
    itemsize = sum(
        column.values.itemsize
        for column in (steps.loss_mask, steps.logprobs, steps.token_rewards, steps.token_advantages)
        if column is not None
    )
    responses = steps.response_lengths
    nbytes = (4 * steps.tokens.lengths + itemsize * responses).tolist()
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
            ref=RowRef(chunk, row),
            digest=digests[row],
            nbytes=nbytes[row],
            response_length=response,
            version=version,
            reward=None if pending[row] else rewards[row],
            advantage=advantages[row],
        )
        for row, (round_, uid, sample, step, attempt, last, response, version) in enumerate(columns)
    ]


def check_form(steps: Steps, form: RowForm, config: RunConfig) -> RowForm:
    """The run's row form with what these rows fix of it. Raises InvalidArgumentError where they disagree with it."""
    given = steps.advantages is not None or steps.token_advantages is not None
    if given != (config.advantage_estimator == "none"):
        remedy = "leave it out, or set advantage_estimator: none" if given else "send one with each row"
        raise InvalidArgumentError(
            f"{steps.name(0)}: advantage is {'given' if given else 'missing'} with advantage_estimator: "
            f"{config.advantage_estimator}; {remedy}"
        )
    # Rows that wait for their reward do not say yet of which kind it will be.
    waits = steps.token_rewards is None and bool(steps.rewards_pending.all())
    found = {
        "logprobs": steps.logprobs is not None,
        "token_rewards": None if waits else steps.token_rewards is not None,
        "token_advantages": steps.token_advantages is not None if given else None,
    }
    for name, value in found.items():
        before = getattr(form, name)
        if value is not None and before is not None and value != before:
            raise InvalidArgumentError(
                f"{steps.name(0)}: has {_FORMS[name][value]}, and the rows before it in this run have "
                f"{_FORMS[name][before]}; all rows of a run are alike in this"
            )
    return replace(form, **{name: value for name, value in found.items() if value is not None})


_FORMS = {
    "logprobs": {True: "rollout_logprobs", False: "no rollout_logprobs"},
    "token_rewards": {True: "one reward per response token", False: "one reward a step"},
    "token_advantages": {True: "one advantage per response token", False: "one advantage a trajectory"},
}


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
                    f"{row.trajectory} step {row.step}: another content was accepted for this step under attempt "
                    f"{row.attempt}; send the same again, or restart the trajectory with a higher attempt"
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
                f"{row.trajectory} step {row.step}: {problem}, and step {self.last} is the last of the trajectory "
                "already; exactly one step is the last"
            )
        if row.is_last and row.step < self.highest:
            raise InvalidArgumentError(
                f"{row.trajectory} step {row.step}: is_last_step is true, and step {self.highest} was accepted "
                "already; the last step has the highest number"
            )
        other = next(iter(self.added.values()), None) or next(iter(self.before.values()), None)
        if other is not None and other.advantage != row.advantage:
            raise InvalidArgumentError(
                f"{row.trajectory} step {row.step}: advantage is {row.advantage} and {other.advantage} on step "
                f"{other.step}; give the same on every step of a trajectory, or one per response token"
            )


def take_rows(
    state: State, config: RunConfig, rows: Sequence[StoredRow], form: RowForm, room: Callable[[], Room], now: float
) -> tuple[list[Outcome], list[Event]]:
    """Outcome of each row, and what happened. Raises with nothing decided when any row is refused."""
    views: dict[TrajectoryKey, _View] = {}
    outcomes: list[Outcome] = []
    stored: list[StoredRow] = []
    admitted: dict[GroupKey, None] = {}
    for row in rows:
        key = row.group
        closed = state.closed.get(key)
        if closed is not None:
            outcomes.append(Outcome.SEALED if isinstance(closed, int) else Outcome.DROPPED)
            continue
        _check_row(row, config)
        group = state.open.get(key)
        if group is None:
            admitted[key] = None
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
            stored.append(row)
    events: list[Event] = []
    if admitted:
        _check_room(admitted, room())
        events.append(GroupsAdmitted(tuple(admitted), now))
    if stored:
        if form != state.form:
            events.append(FormFixed(form))
        events.append(RowsStored(tuple(stored)))
    return outcomes, events


def _check_row(row: StoredRow, config: RunConfig) -> None:
    if row.trajectory.sample >= config.n_samples_per_prompt:
        raise InvalidArgumentError(
            f"{row.trajectory} step {row.step}: sample is {row.trajectory.sample}, and n_samples_per_prompt: "
            f"{config.n_samples_per_prompt} allows 0..{config.n_samples_per_prompt - 1}"
        )
    if not config.step_wise and (row.step or not row.is_last):
        raise InvalidArgumentError(
            f"{row.trajectory} step {row.step}: step_wise: false allows one step a trajectory, number 0 and the last; "
            "set step_wise: true for multi-turn trajectories"
        )


def _check_room(admitted: dict[GroupKey, None], found: Room) -> None:
    if len(admitted) > found.groups:
        raise ResourceExhaustedError(
            f"{next(iter(admitted))}: no room for {len(admitted)} more prompt groups, {found.groups} may be admitted: "
            f"{found.reason}",
            RETRY_AFTER_S,
        )


def take_rewards(
    state: State, updates: Sequence[RewardUpdate]
) -> tuple[list[SetReward], list[tuple[RowRef, RewardUpdate]], list[Event]]:
    """The rewards that change something, where their values per token belong, and what happened."""
    changed: list[SetReward] = []
    values: list[tuple[RowRef, RewardUpdate]] = []
    token_rewards = state.form.token_rewards
    seen: dict[tuple[TrajectoryKey, int], SetReward] = {}
    for update in updates:
        row = _row_of(state, update)
        if row is None:
            continue
        per_token = update.token_values is not None
        if token_rewards is not None and token_rewards != per_token:
            raise InvalidArgumentError(
                f"{update.trajectory} step {row.step}: has {_FORMS['token_rewards'][per_token]}, and rows of this run "
                f"have {_FORMS['token_rewards'][token_rewards]}; give that"
            )
        token_rewards = per_token
        reward = _set_reward(row, update)
        known = seen.get((row.trajectory, row.step)) or (
            None if row.reward is None else SetReward(row.trajectory, row.step, row.reward, row.reward_digest)
        )
        if known is None:
            seen[row.trajectory, row.step] = reward
            changed.append(reward)
            values.append((row.ref, update))
        elif (known.value, known.digest) != (reward.value, reward.digest):
            raise AlreadyExistsError(
                f"{row.trajectory} step {row.step}: reward is {known.value} already, and now {reward.value}; a reward "
                "is given once"
            )
    events: list[Event] = []
    if changed:
        if state.form.token_rewards is None:
            events.append(FormFixed(replace(state.form, token_rewards=token_rewards)))
        events.append(RewardsSet(tuple(changed)))
    return changed, values, events


def _row_of(state: State, update: RewardUpdate) -> StoredRow | None:
    """The row that the reward is for; None where its group or trajectory is closed, so that it no longer matters."""
    key = GroupKey(update.trajectory.round, update.trajectory.uid)
    if key in state.closed:
        return None
    group = state.open.get(key)
    if group is not None and update.trajectory.sample in group.aborted:
        return None
    trajectory = None if group is None else group.trajectories.get(update.trajectory.sample)
    step = update.step if update.step is not None else (None if trajectory is None else trajectory.last)
    row = None if trajectory is None or step is None else trajectory.rows.get(step)
    if row is None:
        which = "the last step" if update.step is None else f"step {update.step}"
        raise NotFoundError(f"{update.trajectory}: {which} was not submitted; submit the row before its reward")
    return row


def _set_reward(row: StoredRow, update: RewardUpdate) -> SetReward:
    if update.token_values is None:
        if update.value is None:
            raise InvalidArgumentError(f"{update.trajectory} step {row.step}: reward has no value; give one")
        return SetReward(row.trajectory, row.step, update.value)
    if len(update.token_values) != row.response_length:
        raise InvalidArgumentError(
            f"{update.trajectory} step {row.step}: reward has {len(update.token_values)} values and response_ids has "
            f"{row.response_length}; they need one each"
        )
    total = float(update.token_values.sum(dtype="float64"))
    return SetReward(row.trajectory, row.step, total, values_digest(update.token_values))
