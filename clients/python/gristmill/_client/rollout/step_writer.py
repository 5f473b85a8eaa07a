"""Builds the rows of one trajectory: numbers the steps, checks the rewards, and omits values that the last step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gristmill._client.rollout.delivery import Prefix
from gristmill._client.rollout.policy_versions import PendingVersion
from gristmill._client.rollout.prefix_dedup import LastStep, follow, partition_of
from gristmill._wire.column_spec import ColumnSpec, start_of
from gristmill._wire.columns import Array, Ragged
from gristmill._wire.extras import check_extras
from gristmill._wire.lists import size_of
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.rows import extras_of, from_rows
from gristmill._wire.steps import Extra, Steps, TrajectoryKey
from gristmill._wire.values import is_vector, token_ids
from gristmill.errors import FailedPreconditionError, InvalidArgumentError


class Step(NamedTuple):
    """A step of a trajectory: a table of one row, and the prefix that need not be sent. last: the step as the new last
    step. covered: for each partial column, how many first tokens have values in this or an earlier step."""

    table: Steps
    prefix: Prefix
    last: LastStep | None
    covered: Mapping[str, int]


class StepWriter:
    """Builds the rows of one trajectory, in step order. Makes no calls. Stores the trajectory's last step."""

    def __init__(
        self,
        key: TrajectoryKey,
        attempt: int,
        policy_version: int | PendingVersion,
        token_rewards: bool,
        agent: str = "",
        episode: str = "",
    ) -> None:
        self.key = key
        self.attempt = attempt
        self._policy_version = policy_version
        self.next_step = 0
        self.is_ended = False
        self._token_rewards, self._agent, self._episode = token_rewards, agent, episode
        self._last: LastStep | None = None
        self._last_extras: Mapping[str, Extra] = {}
        self._covered: Mapping[str, int] = {}

    def step(
        self,
        response_ids: Any,
        *,
        loss_mask: Any,
        reward: Any,
        is_last_step: bool,
        policy_version: int | None,
        policy_versions: Any,
        columns: Mapping[str, Any],
        declared: Sequence[ColumnSpec],
        shared: frozenset[str],
        covered: frozenset[str],
        **fields: Any,
    ) -> Step:
        """Returns the next step. Call `written` after the step was queued.

        columns: values of declared columns by name. shared, covered: as in `Declared`; their values are omitted for
        tokens that have them from earlier steps. fields: other fields by their names in a rollouts file.
        """
        self.check_goes_on()
        where = f"{self.key} step {self.next_step}"
        response = plain(response_ids, "response_ids", where)
        length = size_of(response)
        row = {
            **self.key._asdict(),
            "step": self.next_step,
            "attempt": self.attempt,
            "agent": self._agent,
            "episode": self._episode,
            "is_last_step": is_last_step,
            "response_ids": response,
            "loss_mask": np.ones(length, np.uint8) if loss_mask is None else plain(loss_mask, "loss_mask", where),
            "reward": self._reward(plain(reward, "reward", where), length, is_last_step, where),
            "policy_version": self._version(policy_version, policy_versions),
            "policy_versions": plain(policy_versions, "policy_versions", where),
            **{name: plain(values, name, where) for name, values in fields.items()},
        }
        if clash := sorted(columns.keys() & row.keys()):
            raise InvalidArgumentError(
                f"{where}: columns has {clash[0]}, which is a field of the step; pass it as the argument {clash[0]}"
            )
        table, ends = from_rows([row]), dict[str, int]()
        if columns:
            goes_on = self._extends_last(table)
            ends |= self._covered if goes_on else {}
            row |= {**columns, **_only_new(columns, covered, ends)}
            table = self._with_columns(table, row, declared, shared if goes_on else frozenset())
            _cover(ends, table, covered)
        else:
            check_extras(table, declared)
        if self._token_rewards and table.token_rewards is None:
            # The reward is pending. The zeros are placeholders; they show that the run has one reward per token.
            table = replace(table, token_rewards=Ragged.from_lengths(np.zeros(length), table.response_lengths))
        return Step(table, *follow(self._last, table, 0, shared), ends)

    def extended(self, observation_ids: Any) -> Array:
        """Returns all tokens so far, followed by the tokens of the observation; int32."""
        self.check_goes_on()
        if self._last is None:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory has no step to extend; add its first step with "
                "step(prompt_token_ids, response_ids)"
            )
        where = f"{self.key} step {self.next_step}"
        observation = token_ids(plain(observation_ids, "observation_ids", where), "observation_ids", where)
        return np.concatenate((self._last.tokens, observation))

    def check_goes_on(self) -> None:
        """Raises FailedPreconditionError if the trajectory has ended."""
        if self.is_ended:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory ended with step {self.next_step - 1}; sample it again as another attempt, "
                "or start another trajectory"
            )

    def _with_columns(
        self, table: Steps, row: Mapping[str, Any], declared: Sequence[ColumnSpec], shared: frozenset[str]
    ) -> Steps:
        """Returns the table with the row's declared columns. Shared values that the last step has are not copied,
        because a column may be hundreds of times as large as its tokens."""
        kept = self._kept(table, row, shared) if self._last is not None else {}
        count = 0 if self._last is None or not kept else len(self._last.tokens)
        new = extras_of({**row, **{name: row[name][count:] for name in kept}}, declared)
        pieces = {name: (*one.before, one.values[0]) for name, one in kept.items()}
        extras = {name: replace(extra, before=pieces[name]) if name in pieces else extra for name, extra in new.items()}
        return check_extras(replace(table, extras=extras), declared, np.array([count]))

    def _kept(self, table: Steps, row: Mapping[str, Any], shared: frozenset[str]) -> dict[str, Extra]:
        """Returns the last step's shared columns that this row also has."""
        return {
            name: self._last_extras[name]
            for name in shared & self._last_extras.keys() & row.keys()
            if _has_values(row[name], len(table.tokens[0]))
        }

    def _extends_last(self, table: Steps) -> bool:
        """Returns whether the row's prompt begins with all tokens of the last step, which has the same partition."""
        if self._last is None or self._last.partition != partition_of(table, 0):
            return False
        prompt = table.tokens[0][: table.prompt_lengths[0]]
        return np.array_equal(self._last.tokens, prompt[: len(self._last.tokens)])

    def written(self, step: Step) -> None:
        """Records the step as the last one. The next step follows it."""
        self.next_step += 1
        self.is_ended, self._last, self._last_extras = step.last is None, step.last, step.table.extras
        self._covered = step.covered

    async def find_version(self) -> None:
        """Waits until the version of the trajectory is known. Call it before a step without a version of its own."""
        if isinstance(self._policy_version, PendingVersion):
            self._policy_version = await self._policy_version.value()

    def _version(self, version: int | None, of_tokens: Any) -> int:
        """Returns the row's policy version. If tokens have their own versions, the row reader uses the oldest."""
        if version is not None:
            return version
        if of_tokens is not None:
            return UNKNOWN
        assert not isinstance(self._policy_version, PendingVersion), "find_version was not called"
        return self._policy_version

    def _reward(self, reward: Any, length: int, is_last_step: bool, where: str) -> Any:
        """Returns the row's reward. None means pending for the last step, and 0 for earlier steps."""
        if reward is None:
            return None if is_last_step else (np.zeros(length) if self._token_rewards else 0.0)
        if is_vector(reward) != self._token_rewards:
            has, needs = ("one per token", "one number") if is_vector(reward) else ("one number", "one per token")
            raise InvalidArgumentError(
                f"{where}: reward is {has}, and the client expects {needs} (token_rewards={self._token_rewards}); pass "
                f"{needs}, or change token_rewards for all rows of the run"
            )
        return reward


def _only_new(columns: Mapping[str, Any], covered: frozenset[str], ends: Mapping[str, int]) -> dict[str, Any]:
    """Returns the covered columns that repeat values of earlier steps, without the repeated values."""
    new: dict[str, Any] = {}
    for name in covered & columns.keys():
        values, start = columns[name], columns.get(start_of(name), 0)
        count = ends.get(name, 0) - start if type(start) is int else 0
        if count > 0 and hasattr(values, "__len__"):
            new |= {name: values[count:], start_of(name): start + min(count, len(values))}
    return new


def _cover(ends: dict[str, int], table: Steps, covered: frozenset[str]) -> None:
    """Updates `ends`: for each column, how many first tokens have values in this row or an earlier step."""
    for name in covered & table.extras.keys():
        start = table.extras.get(start_of(name))
        first = int(start.values.values[0]) if start is not None else 0
        if first <= ends.get(name, 0):
            ends[name] = max(ends.get(name, 0), first + len(table.extras[name].values.values))


def _has_values(values: Any, count: int) -> bool:
    """Whether there are `count` values that can be sliced. Other values are refused later, when they are read."""
    try:
        return len(values) == count and len(values[:0]) == 0
    except (TypeError, KeyError, RuntimeError):
        return False


def plain(values: Any, name: str, where: str) -> Any:
    """Converts objects with NumPy's array protocol, such as tensors, to arrays. Returns other values unchanged.

    Raises InvalidArgumentError for tensors that NumPy cannot read: of bfloat16, on a device, or part of a graph.
    """
    if isinstance(values, np.ndarray) or not hasattr(values, "__array__"):
        return values
    read: Callable[[Any], Any] = np.asarray
    try:
        return read(values)
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgumentError(
            f"{where}: {name} cannot be read as an array ({reason}); pass .detach().cpu().float() or .tolist()"
        ) from None
