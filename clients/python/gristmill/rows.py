"""Rows given as mappings, with the field names of the specification, to a table of steps.

Here, and only here, Python lists of ints become arrays. Types and shapes are refused with the trajectory's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.columns import Array, Ragged
from gristmill.errors import InvalidArgumentError
from gristmill.steps import FLOAT32_MAX, INT32_MAX, UNKNOWN, Steps, check, check_text

_REQUIRED = ("uid", "sample", "prompt_token_ids", "response_ids", "loss_mask")
_ARRAYS = ("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "advantage")


_SCALARS: dict[str, tuple[type, Any]] = {
    "uid": (str, ""),
    "round": (int, 0),
    "sample": (int, 0),
    "step": (int, 0),
    "attempt": (int, 0),
    "is_last_step": (bool, True),
    "stop_reason": (str, ""),
    "policy_version": (int, UNKNOWN),
}
_KIND_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
_FIELDS = frozenset((*_SCALARS, *_ARRAYS))


def from_rows(rows: Iterable[Mapping[str, Any]], *, step_wise: bool = True) -> Steps:
    """A checked table from rows with the field names of the specification (lists or arrays).

    Without `step_wise`, `step` and `is_last_step` may be absent (0, true). No `reward` (or None)
    makes it pending.
    Raises InvalidArgumentError naming the trajectory, the field, the value and the remedy. The rows are not modified.
    """
    builder = _Builder(step_wise)
    for position, row in enumerate(rows):
        builder.add(row, position)
    return check(builder.build())


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


class _Builder:
    """Collects rows given as mappings into columns, checking types as it goes."""

    def __init__(self, step_wise: bool) -> None:
        self._required = (*_REQUIRED, "step", "is_last_step") if step_wise else _REQUIRED
        self._scalars: dict[str, list[Any]] = {name: [] for name in (*_SCALARS, "prompt_length", "reward", "advantage")}
        self._arrays: dict[str, list[Array | None]] = {
            name: [] for name in ("tokens", "loss_mask", "rollout_logprobs", "reward", "advantage")
        }

    def add(self, row: Mapping[str, Any], position: int) -> None:
        if not isinstance(row, Mapping):
            raise InvalidArgumentError(f"row {position}: expected a mapping of fields, got {type(row).__name__}")
        where = _describe(row, position)
        for name in self._required:
            if row.get(name) is None:
                raise InvalidArgumentError(f"{where}: {name} is missing; every row needs it")
        unknown = row.keys() - _FIELDS
        if unknown:
            raise InvalidArgumentError(
                f"{where}: unknown field {sorted(unknown)[0]}; known are {', '.join(sorted(_FIELDS))}"
            )
        self._add_scalars(row, where)
        prompt = _tokens(row["prompt_token_ids"], "prompt_token_ids", where)
        response = _tokens(row["response_ids"], "response_ids", where)
        self._scalars["prompt_length"].append(len(prompt))
        self._arrays["tokens"].append(np.concatenate([prompt, response]))
        self._arrays["loss_mask"].append(_mask(row["loss_mask"], where))
        logprobs = row.get("rollout_logprobs")
        self._arrays["rollout_logprobs"].append(
            None if logprobs is None else _floats(logprobs, "rollout_logprobs", np.float32, where)
        )
        self._add_number_or_tokens(row, "reward", np.float64, where)
        self._add_number_or_tokens(row, "advantage", np.float32, where)

    def _add_scalars(self, row: Mapping[str, Any], where: str) -> None:
        for name, (kind, default) in _SCALARS.items():
            value = row.get(name)
            self._scalars[name].append(default if value is None else _scalar(value, name, kind, where))

    def _add_number_or_tokens(self, row: Mapping[str, Any], name: str, dtype: Any, where: str) -> None:
        value = row.get(name)
        if isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value) > 0:
            array = _floats(value, name, dtype, where)
            self._arrays[name].append(array)
            self._scalars[name].append(float(array.sum(dtype=np.float64)))
        else:
            self._arrays[name].append(None)
            self._scalars[name].append(None if value is None else float(_scalar(value, name, float, where)))

    def build(self) -> Steps:
        scalars, count = self._scalars, len(self._scalars["uid"])
        pending = np.fromiter((value is None for value in scalars["reward"]), np.bool_, count)
        table = Steps(
            uids=scalars["uid"],
            rounds=np.array(scalars["round"], np.int32),
            samples=np.array(scalars["sample"], np.int32),
            steps=np.array(scalars["step"], np.int32),
            attempts=np.array(scalars["attempt"], np.int32),
            is_last_steps=np.array(scalars["is_last_step"], np.bool_),
            stop_reasons=scalars["stop_reason"],
            policy_versions=np.array(scalars["policy_version"], np.int32),
            tokens=Ragged.from_arrays(self._arrays["tokens"], np.int32),  # type: ignore[arg-type]
            prompt_lengths=np.array(scalars["prompt_length"], np.int64),
            loss_mask=Ragged.from_arrays(self._arrays["loss_mask"], np.uint8),  # type: ignore[arg-type]
            logprobs=None,
            rewards=np.array([value or 0.0 for value in scalars["reward"]], np.float64),
            token_rewards=None,
            rewards_pending=pending,
        )
        return replace(
            table,
            logprobs=self._ragged("rollout_logprobs", table, np.float32),
            token_rewards=self._rewards(table),
            advantages=self._advantages(table),
            token_advantages=self._ragged("advantage", table, np.float32),
        )

    def _rewards(self, table: Steps) -> Ragged | None:
        arrays = self._arrays["reward"]
        if any(array is not None for array in arrays):
            # A pending row holds zeros until its rewards come.
            lengths, pending = table.loss_mask.lengths.tolist(), table.rewards_pending.tolist()
            self._arrays["reward"] = [
                np.zeros(length) if array is None and waits else array
                for array, length, waits in zip(arrays, lengths, pending, strict=True)
            ]
        return self._ragged("reward", table, np.float64)

    def _advantages(self, table: Steps) -> NDArray[np.float64] | None:
        values = self._scalars["advantage"]
        given = [value is not None for value in values]
        if not any(given) or any(array is not None for array in self._arrays["advantage"]):
            return None
        if not all(given):
            row = given.index(False)
            raise InvalidArgumentError(f"{table.name(row)}: advantage is missing; all rows have one, or none has")
        return np.array(values, np.float64)

    def _ragged(self, name: str, table: Steps, dtype: Any) -> Ragged | None:
        arrays = self._arrays[name]
        given = [array for array in arrays if array is not None]
        if not given:
            return None
        if len(given) < len(arrays):
            has = next(row for row, array in enumerate(arrays) if array is not None)
            lacks = next(row for row, array in enumerate(arrays) if array is None)
            raise InvalidArgumentError(
                f"{name}: {table.name(has)} has one value per response token and {table.name(lacks)} does not; "
                "all rows of a batch are alike in this"
            )
        return Ragged.from_arrays(given, dtype)


def _describe(row: Mapping[str, Any], position: int) -> str:
    if row.get("uid") is None:
        return f"row {position}"
    sample, step = row.get("sample"), row.get("step")
    return f"uid {row['uid']!r} sample {sample}" + (f" step {step}" if step is not None else "")


def _scalar(value: Any, name: str, kind: type, where: str) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        # Beyond float64 it is infinite, which is refused with the other values that are not finite.
        return float(value) if abs(value) <= FLOAT32_MAX else math.inf
    if kind is bool and value in (0, 1):
        return bool(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArgumentError(f"{where}: {name} is {value!r}; expected {_KIND_NAMES[kind]}")
    if isinstance(value, int) and not -INT32_MAX <= value <= INT32_MAX:
        raise InvalidArgumentError(f"{where}: {name} is {value}; it must fit a 32-bit integer")
    if isinstance(value, str):
        check_text(value, f"{where}: {name}")
    return value


def _vector(values: Any, name: str, where: str) -> Array:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim != 1:
        raise InvalidArgumentError(f"{where}: {name} is not a flat list of numbers")
    return array


def _tokens(values: Any, name: str, where: str) -> NDArray[np.int32]:
    array = _vector(values, name, where)
    if not array.size:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{where}: {name} holds {array.dtype} values; token ids are integers 0..{INT32_MAX}")
    if array.dtype != np.int32:
        outside = np.less(array, 0) | np.greater(array, INT32_MAX)
        if outside.any():
            bad = int(outside.argmax())
            raise InvalidArgumentError(f"{where}: {name}[{bad}] is {array[bad]}; token ids are 0..{INT32_MAX}")
    return array.astype(np.int32, copy=False)


def _mask(values: Any, where: str) -> NDArray[np.uint8]:
    array = _vector(values, "loss_mask", where)
    if array.size and array.dtype.kind not in "iubf":
        raise InvalidArgumentError(f"{where}: loss_mask holds {array.dtype} values; each is 0 or 1")
    good = (array == 0) | (array == 1)
    if not good.all():
        bad = int((~good).argmax())
        raise InvalidArgumentError(f"{where}: loss_mask[{bad}] is {array[bad]}; each is 0 or 1")
    return array.astype(np.uint8, copy=False)


def _floats(values: Any, name: str, dtype: Any, where: str) -> Array:
    array = _vector(values, name, where)
    if array.size and array.dtype.kind not in "iuf":
        raise InvalidArgumentError(f"{where}: {name} holds {array.dtype} values; expected numbers")
    if dtype == np.float64 and array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)
