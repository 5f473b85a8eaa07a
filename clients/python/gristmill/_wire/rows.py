"""Rows given as mappings, with the field names of the specification, to tables of steps and back.

Fields are refused with the trajectory's name here, their values by `gristmill._wire.tables`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gristmill._wire.steps import Steps
from gristmill._wire.tables import ARRAYS, SCALARS, ValueColumns, describe
from gristmill.errors import InvalidArgumentError

_REQUIRED = ("uid", "sample", "prompt_token_ids", "response_ids", "loss_mask")
_FIELDS = frozenset((*SCALARS, *ARRAYS))


def from_rows(rows: Iterable[Mapping[str, Any]], *, step_wise: bool = True) -> Steps:
    """A checked table from rows with the field names of the specification (lists or arrays).

    Without `step_wise`, `step` and `is_last_step` may be absent (0, true). No `reward` (or None)
    makes it pending.
    Raises InvalidArgumentError naming the trajectory, the field, the value and the remedy. The rows are not modified.
    """
    rows = list(rows)
    return columns_of(rows, step_wise=step_wise).table(0, len(rows))


def columns_of(rows: Sequence[Mapping[str, Any]], *, step_wise: bool) -> ValueColumns:
    """The rows' columns, with checked types. Raises InvalidArgumentError as `from_rows` does."""
    names = _names(rows, (*_REQUIRED, "step", "is_last_step") if step_wise else _REQUIRED)
    return ValueColumns({name: [row.get(name) for row in rows] for name in names}, len(rows))


def to_rows(table: Steps) -> Iterator[dict[str, Any]]:
    """The table's rows as `from_rows` takes them, with plain lists and numbers: a rollout file's lines."""
    optional = (
        ("rollout_logprobs", table.logprobs),
        ("reward", table.token_rewards),
        ("advantage", table.token_advantages),
    )
    for index in range(len(table)):
        tokens, split = table.tokens[index], int(table.prompt_lengths[index])
        row: dict[str, Any] = {
            "uid": table.uids[index],
            "round": int(table.rounds[index]),
            "sample": int(table.samples[index]),
            "step": int(table.steps[index]),
            "attempt": int(table.attempts[index]),
            "is_last_step": bool(table.is_last_steps[index]),
            "stop_reason": table.stop_reasons[index],
            "policy_version": int(table.policy_versions[index]),
            "prompt_token_ids": tokens[:split].tolist(),
            "response_ids": tokens[split:].tolist(),
            "loss_mask": table.loss_mask[index].tolist(),
            "reward": None if table.rewards_pending[index] else float(table.rewards[index]),
        }
        if table.advantages is not None:
            row["advantage"] = float(table.advantages[index])
        row |= {name: column[index].tolist() for name, column in optional if column is not None}
        yield row


def _names(rows: Sequence[Mapping[str, Any]], required: Sequence[str]) -> set[str]:
    """The fields that rows have. Mostly they are the same as of the row before."""
    names, seen = set[str](), None
    for position, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidArgumentError(f"row {position}: expected a mapping of fields, got {type(row).__name__}")
        if row.keys() != seen:
            unknown = row.keys() - _FIELDS
            if unknown:
                raise InvalidArgumentError(
                    f"{describe(row, position)}: unknown field {sorted(unknown)[0]}; known are "
                    f"{', '.join(sorted(_FIELDS))}"
                )
            names |= row.keys()
            seen = row.keys()
        missing = [name for name in required if row.get(name) is None]
        if missing:
            are = "is missing; every row needs it" if len(missing) == 1 else "are missing; every row needs them"
            raise InvalidArgumentError(f"{describe(row, position)}: {' and '.join(missing)} {are}")
    return names
