"""Make the rows of one trajectory: number the steps, check the rewards' form, and leave out what the last step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gristmill._client.rollout.delivery import Prefix
from gristmill._client.rollout.prefix_dedup import LastStep, follow
from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Ragged
from gristmill._wire.extras import check_extras
from gristmill._wire.lists import size_of
from gristmill._wire.rows import extras_of, from_rows
from gristmill._wire.steps import UNKNOWN, Extra, Steps, TrajectoryKey
from gristmill._wire.values import is_vector, token_ids
from gristmill.errors import FailedPreconditionError, InvalidArgumentError


class Step(NamedTuple):
    """A step of a trajectory: a table of one row, and what need not be sent of it. last: the step as the last one."""

    table: Steps
    prefix: Prefix
    last: LastStep | None


class StepWriter:
    """Makes the rows of one trajectory, in step order. Pure. Owns the trajectory's last step."""

    def __init__(self, key: TrajectoryKey, attempt: int, policy_version: int, token_rewards: bool) -> None:
        self.key = key
        self.attempt = attempt
        self.policy_version = policy_version
        self.next_step = 0
        self.is_ended = False
        self._token_rewards = token_rewards
        self._last: LastStep | None = None
        self._last_extras: Mapping[str, Extra] = {}

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
        **fields: Any,
    ) -> Step:
        """Returns the next step. Call `written` when it is handed over.

        columns: values of declared columns by name. shared: names of columns whose values are left out with tokens that
        the last step has. fields: other fields by their names in a rollouts file.
        """
        self._check_goes_on()
        where = f"{self.key} step {self.next_step}"
        response = plain(response_ids, "response_ids", where)
        length = size_of(response)
        row = {
            **self.key._asdict(),
            "step": self.next_step,
            "attempt": self.attempt,
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
                f"{where}: columns has {clash[0]}, which is a field of the step; give it as the argument {clash[0]}"
            )
        table = from_rows([row])
        if columns:
            table = self._with_columns(table, {**row, **columns}, declared, shared)
        else:
            check_extras(table, declared)
        if self._token_rewards and table.token_rewards is None:
            # The reward is pending. The zeros do not count; they declare that the run's rewards are one per token.
            table = replace(table, token_rewards=Ragged.from_lengths(np.zeros(length), table.response_lengths))
        return Step(table, *follow(self._last, table, 0, shared))

    def extended(self, observation_ids: Any) -> Array:
        """Returns all tokens so far, followed by the observation's; int32."""
        self._check_goes_on()
        if self._last is None:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory has no step yet that could be extended; begin with "
                "step(prompt_token_ids, response_ids)"
            )
        where = f"{self.key} step {self.next_step}"
        observation = token_ids(plain(observation_ids, "observation_ids", where), "observation_ids", where)
        return np.concatenate((self._last.tokens, observation))

    def _check_goes_on(self) -> None:
        if self.is_ended:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory has ended with step {self.next_step - 1}; sample it again as another "
                "attempt, or start another trajectory"
            )

    def _with_columns(
        self, table: Steps, row: Mapping[str, Any], declared: Sequence[ColumnSpec], shared: frozenset[str]
    ) -> Steps:
        """Returns the table with the row's declared columns. Shared values that the last step has are not copied: such
        columns may be hundreds of times as large as their tokens."""
        kept = self._kept(table, row, shared)
        count = 0 if self._last is None or not kept else len(self._last.tokens)
        new = extras_of({**row, **{name: row[name][count:] for name in kept}}, declared)
        pieces = {name: (*one.before, one.values[0]) for name, one in kept.items()}
        extras = {name: replace(extra, before=pieces[name]) if name in pieces else extra for name, extra in new.items()}
        return check_extras(replace(table, extras=extras), declared, np.array([count]))

    def _kept(self, table: Steps, row: Mapping[str, Any], shared: frozenset[str]) -> dict[str, Extra]:
        """Returns the last step's shared columns that this row has too, if its prompt begins with all of that step."""
        last, tokens = self._last, table.tokens[0]
        if last is None:
            return {}
        prompt = tokens[: table.prompt_lengths[0]]
        if not np.array_equal(last.tokens, prompt[: len(last.tokens)]):
            return {}
        return {
            name: self._last_extras[name]
            for name in shared & self._last_extras.keys() & row.keys()
            if _has_values(row[name], len(tokens))
        }

    def written(self, step: Step) -> None:
        """Makes the step the last one: the next one follows it."""
        self.next_step += 1
        self.is_ended, self._last, self._last_extras = step.last is None, step.last, step.table.extras

    def _version(self, version: int | None, of_tokens: Any) -> int:
        """Returns the row's policy version. If tokens have their own versions, the reader takes the oldest."""
        if version is None:
            return self.policy_version if of_tokens is None else UNKNOWN
        return version

    def _reward(self, reward: Any, length: int, is_last_step: bool, where: str) -> Any:
        """Returns the row's reward. None is pending for the last step, and 0 for earlier ones."""
        if reward is None:
            return None if is_last_step else (np.zeros(length) if self._token_rewards else 0.0)
        if is_vector(reward) != self._token_rewards:
            has, needs = ("one per token", "one number") if is_vector(reward) else ("one number", "one per token")
            raise InvalidArgumentError(
                f"{where}: reward is {has} and the client was made for {needs} "
                f"(token_rewards={self._token_rewards}); all rows of a run use the one or the other"
            )
        return reward


def _has_values(values: Any, count: int) -> bool:
    """Whether there are this many values, which can be sliced. Others are refused when all of them are read."""
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
            f"{where}: {name} cannot be read as an array: {reason} Give .detach().cpu().float() or .tolist()"
        ) from None
