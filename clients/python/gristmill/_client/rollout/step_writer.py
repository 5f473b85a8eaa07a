"""The rows of one trajectory: steps are numbered, rewards given their form, and what is new of a prompt converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Ragged
from gristmill._wire.extras import check_extras
from gristmill._wire.lists import ConvertedTokens, size_of
from gristmill._wire.rows import extras_of, from_rows
from gristmill._wire.steps import UNKNOWN, Extra, Steps, TrajectoryKey
from gristmill._wire.values import is_vector, token_ids
from gristmill.errors import FailedPreconditionError, InvalidArgumentError


class StepWriter:
    """Makes the rows of one trajectory, in step order. Pure."""

    def __init__(self, key: TrajectoryKey, attempt: int, policy_version: int, token_rewards: bool) -> None:
        self.key = key
        self.attempt = attempt
        self.policy_version = policy_version
        self.next_step = 0
        self.is_ended = False
        self._token_rewards = token_rewards
        self._before: Steps | None = None
        self._made: Steps | None = None
        self._converted = ConvertedTokens()

    def table(
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
    ) -> Steps:
        """The next step as a table of one row. The number moves on by `written`, once the row is handed over.

        columns: values of the columns that the run declares. shared: those of which the step before has the values of
        the tokens that both begin with. fields: the others, by their names in a rollouts file.
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
        table = from_rows([row], converted=self._converted)
        if columns:
            table = self._with_columns(table, {**row, **columns}, declared, shared)
        else:
            check_extras(table, declared)
        self._made = table
        if self._token_rewards and table.token_rewards is None:
            # Pending: the zeros do not count, they say that the run's rewards are one per token.
            zeros = Ragged.from_lengths(np.zeros(length), table.response_lengths)
            return replace(table, token_rewards=zeros)
        return table

    def extended(self, observation_ids: Any) -> Array:
        """The prompt of a step that begins with all tokens so far, and then has those of the observation; int32."""
        self._check_goes_on()
        if self._before is None:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory has no step yet that could be extended; begin with "
                "step(prompt_token_ids, response_ids)"
            )
        where = f"{self.key} step {self.next_step}"
        observation = token_ids(plain(observation_ids, "observation_ids", where), "observation_ids", where)
        return np.concatenate((self._before.tokens[0], observation))

    def _check_goes_on(self) -> None:
        if self.is_ended:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory has ended with step {self.next_step - 1}; sample it again as another "
                "attempt, or start another trajectory"
            )

    def _with_columns(
        self, table: Steps, row: Mapping[str, Any], declared: Sequence[ColumnSpec], shared: frozenset[str]
    ) -> Steps:
        """The row with its declared columns. What the step before has of a shared one is not copied again: such columns
        may be hundreds of times the size of their tokens."""
        kept = self._kept(table, row, shared)
        count = 0 if self._before is None or not kept else self._before.tokens.total
        new = extras_of({**row, **{name: row[name][count:] for name in kept}}, declared)
        pieces = {name: (*one.before, one.values[0]) for name, one in kept.items()}
        extras = {name: replace(extra, before=pieces[name]) if name in pieces else extra for name, extra in new.items()}
        return check_extras(replace(table, extras=extras), declared, np.array([count]))

    def _kept(self, table: Steps, row: Mapping[str, Any], shared: frozenset[str]) -> dict[str, Extra]:
        """The shared columns of the step before, where this step begins with all of its tokens and has the columns."""
        before, tokens = self._before, table.tokens[0]
        if before is None:
            return {}
        prompt = tokens[: table.prompt_lengths[0]]
        if not np.array_equal(before.tokens[0], prompt[: before.tokens.total]):
            return {}
        return {
            name: before.extras[name]
            for name in shared & before.extras.keys() & row.keys()
            if _has_values(row[name], len(tokens))
        }

    def written(self, is_last_step: bool) -> None:
        self.next_step += 1
        self.is_ended = is_last_step
        self._before = None if is_last_step else self._made

    def _version(self, given: int | None, of_tokens: Any) -> int:
        """Of tokens that have their own it is the oldest, which is found where they are read."""
        if given is None:
            return self.policy_version if of_tokens is None else UNKNOWN
        return given

    def _reward(self, reward: Any, length: int, is_last_step: bool, where: str) -> Any:
        """None, which is pending, only for a last step: before it, no reward is a reward of 0."""
        if reward is None:
            return None if is_last_step else (np.zeros(length) if self._token_rewards else 0.0)
        if is_vector(reward) != self._token_rewards:
            has, needs = ("one per token", "one number") if is_vector(reward) else ("one number", "one per token")
            raise InvalidArgumentError(
                f"{where}: reward is {has} and the client was made for {needs} "
                f"(token_rewards={self._token_rewards}); all rows of a run use the one or the other"
            )
        return reward


def _has_values(given: Any, count: int) -> bool:
    """Whether it is so many values, of which those of a few tokens can be taken. What is not is refused where all of
    it is read."""
    try:
        return len(given) == count and len(given[:0]) == 0
    except (TypeError, KeyError, RuntimeError):
        return False


def plain(values: Any, name: str, where: str) -> Any:
    """Anything that speaks NumPy's array protocol (tensors, for instance) as an array, all else as it is.

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
