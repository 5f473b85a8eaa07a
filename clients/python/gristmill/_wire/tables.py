"""Columns of Python values, one list a field, to tables of steps: types and shapes are checked, and values converted.

What is wrong is refused with the trajectory's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Int64s, Ragged, exact_sum, least
from gristmill._wire.lists import ConvertedTokens, check_no_null, from_list, from_lists
from gristmill._wire.reused_memory import REUSED
from gristmill._wire.steps import FLOAT32_MAX, INT32_MAX, UNKNOWN, Extra, Steps, check, check_text, oldest_versions
from gristmill._wire.unlike_numbers import unlike_numbers
from gristmill.errors import InvalidArgumentError

SCALARS: dict[str, tuple[type, Any]] = {
    "uid": (str, ""),
    "round": (int, 0),
    "sample": (int, 0),
    "step": (int, 0),
    "attempt": (int, 0),
    "is_last_step": (bool, True),
    "stop_reason": (str, ""),
    "policy_version": (int, UNKNOWN),
    "tag": (str, ""),
}
"""Fields with one value a row: of which type, and what an absent one is."""

ARRAYS = ("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "advantage", "policy_versions")
"""Fields with a value a token, or one a row."""

Read = Callable[[Any, str, str], Array]
"""Converts the value of a field of a row, or refuses it by name."""

_KIND_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class ValueColumns:
    """The rows' fields, a list each; an absent one is None, and so is a whole column's.

    Types are checked for all rows before anything is copied. What is as it should be costs little a row; whatever is
    not is looked at again, value by value, and refused by name or converted.
    """

    def __init__(
        self,
        columns: Mapping[str, list[Any]],
        count: int,
        declared: Sequence[ColumnSpec] = (),
        converted: ConvertedTokens | None = None,
    ) -> None:
        """declared: the run's own columns. converted: tokens of earlier steps, to which those of these rows are added.

        Raises InvalidArgumentError naming the trajectory, the field and the value. The lists are not modified.
        """
        self._columns, self._count = columns, count
        self._scalars = {name: self._scalar_column(name, *found) for name, found in SCALARS.items()}
        for name in ("prompt_token_ids", "response_ids", "loss_mask"):
            self._check_complete(name)
        self._responses = self._array_column("response_ids", np.int32, _tokens)
        self._prompts = self._prompt_column(converted or ConvertedTokens(are_kept=False))
        self._masks = self._array_column("loss_mask", np.uint8, _mask)
        self._logprobs = self._array_column("rollout_logprobs", np.float32, _float32s)
        self._versions = self._array_column("policy_versions", np.int32, _version_array)
        self._rewards, self._token_rewards = self._number_column("reward", np.float64)
        self._advantages, self._token_advantages = self._number_column("advantage", np.float32)
        self._extras = {column: self._extra_column(column) for column in declared if column.name in columns}

    def _where(self, row: int) -> str:
        return describe({name: values[row] for name, values in self._columns.items()}, row)

    def _scalar_column(self, name: str, kind: type, default: Any) -> list[Any]:
        values = self._columns.get(name)
        if values is None:
            return [default] * self._count
        if set(map(type, values)) <= {kind} and _fit(values, kind):
            return values
        return [
            default if value is None else _scalar(value, name, kind, self._where(row))
            for row, value in enumerate(values)
        ]

    def _check_complete(self, name: str) -> None:
        for row, value in enumerate(self._columns.get(name, ())):
            if value is None:
                raise InvalidArgumentError(f"{self._where(row)}: {name} is missing; every row needs it")

    def _array_column(self, name: str, dtype: Any, read: Read) -> list[Array | None]:
        """Each row's array, None where it has none."""
        dtype, values = np.dtype(dtype), self._columns.get(name)
        if values is None:
            return [None] * self._count
        if (arrays := from_lists(values, dtype)) is not None:
            return [*arrays]
        return [
            value if value is None or _is_converted(value, dtype) else self._array(row, value, name, dtype, read)
            for row, value in enumerate(values)
        ]

    def _array(self, row: int, value: Any, name: str, dtype: np.dtype[Any], read: Read) -> Array:
        if type(value) is list and (array := from_list(value, dtype)) is not None:
            return array
        return read(value, name, self._where(row))

    def _prompt_column(self, converted: ConvertedTokens) -> list[Array]:
        dtype = np.dtype(np.int32)
        prompts: list[Array] = []
        for row, value in enumerate(self._columns.get("prompt_token_ids", ())):
            uid, sample = self._scalars["uid"][row], self._scalars["sample"][row]
            prompt = value if _is_converted(value, dtype) else None
            if type(value) is list:
                prompt = converted.prompt(uid, sample, value)
            if prompt is None:
                prompt = _tokens(value, "prompt_token_ids", self._where(row))
            prompts.append(prompt)
            response = self._responses[row]
            if type(value) is list and response is not None and not self._scalars["is_last_step"][row]:
                converted.keep(uid, sample, value, self._columns["response_ids"][row], (prompt, response))
        return prompts

    def _number_column(self, name: str, dtype: Any) -> tuple[list[float | None], list[Array | None]]:
        """One number a row, or the sum of one per token; and those."""
        values = self._columns.get(name) or [None] * self._count
        nothing: list[Array | None] = [None] * len(values)
        if set(map(type, values)) <= {float, type(None)}:
            return values, nothing
        numbers: list[float | None] = []
        for row, value in enumerate(values):
            where = self._where(row)
            if is_vector(value):
                array = nothing[row] = self._array(row, value, name, np.dtype(dtype), partial(_floats, dtype=dtype))
                numbers.append(exact_sum(array))
            else:
                numbers.append(None if value is None else float(_scalar(value, name, float, where)))
        return numbers, nothing

    def _extra_column(self, column: ColumnSpec) -> list[Array | None]:
        values = self._columns[column.name]
        return [None if value is None else column.array(value, self._where(row)) for row, value in enumerate(values)]

    def tables(self, most_rows: int, most_bytes: int) -> Iterator[Steps]:
        """The rows as tables of at most so much, unless one row has more; no table is made before it is asked for."""
        begin, room = 0, most_bytes
        sizes = self._sizes().tolist() if self._count > 1 else []
        for row, size in enumerate(sizes):
            if row > begin and (size > room or row - begin == most_rows):
                yield self.table(begin, row)
                begin, room = row, most_bytes
            room -= size
        yield self.table(begin, self._count)

    def _sizes(self) -> Int64s:
        """Bytes of each row's arrays, about; int64 (rows,)."""
        columns: tuple[Sequence[Array | None], ...] = (
            self._prompts,
            self._responses,
            self._masks,
            self._logprobs,
            self._token_rewards,
            *self._extras.values(),
        )
        sizes = np.zeros(self._count, np.int64)
        for column in columns:
            sizes += np.fromiter((0 if array is None else array.nbytes for array in column), np.int64, len(sizes))
        return sizes

    def table(self, begin: int, end: int) -> Steps:
        """A checked table of these rows; their arrays are copied. Raises InvalidArgumentError as `check` does."""
        scalars = {name: values[begin:end] for name, values in self._scalars.items()}
        prompts, responses = self._prompts[begin:end], self._responses[begin:end]
        rewards = self._rewards[begin:end]
        versions, token_versions = _versions(scalars["policy_version"], self._versions[begin:end], responses)
        table = Steps(
            uids=scalars["uid"],
            rounds=np.array(scalars["round"], np.int32),
            samples=np.array(scalars["sample"], np.int32),
            steps=np.array(scalars["step"], np.int32),
            attempts=np.array(scalars["attempt"], np.int32),
            is_last_steps=np.array(scalars["is_last_step"], np.bool_),
            stop_reasons=scalars["stop_reason"],
            policy_versions=versions,
            tokens=_tokens_of(prompts, responses),
            prompt_lengths=np.fromiter(map(len, prompts), np.int64, len(prompts)),
            loss_mask=REUSED.ragged(self._masks[begin:end], np.uint8),  # type: ignore[arg-type]
            logprobs=None,
            rewards=np.array([value or 0.0 for value in rewards], np.float64),
            token_rewards=None,
            rewards_pending=np.fromiter((value is None for value in rewards), np.bool_, len(rewards)),
            extras={
                column.name: _extra(column, arrays[begin:end])
                for column, arrays in self._extras.items()
                if any(array is not None for array in arrays[begin:end])
            },
            token_versions=token_versions,
            tags=scalars["tag"] if any(scalars["tag"]) else None,
        )
        return check(
            replace(
                table,
                logprobs=_ragged("rollout_logprobs", self._logprobs[begin:end], table, np.float32),
                token_rewards=_token_rewards(self._token_rewards[begin:end], table),
                advantages=self._row_advantages(begin, end, table),
                token_advantages=_ragged("advantage", self._token_advantages[begin:end], table, np.float32),
            )
        )

    def _row_advantages(self, begin: int, end: int, table: Steps) -> NDArray[np.float64] | None:
        values = self._advantages[begin:end]
        given = [value is not None for value in values]
        if not any(given) or any(array is not None for array in self._token_advantages[begin:end]):
            return None
        if not all(given):
            row = given.index(False)
            raise InvalidArgumentError(f"{table.name(row)}: advantage is missing; all rows have one, or none has")
        return np.array(values, np.float64)


def describe(row: Mapping[str, Any], position: int) -> str:
    """The row, for a message."""
    if row.get("uid") is None:
        return f"row {position}"
    sample, step = row.get("sample"), row.get("step")
    return f"uid {row['uid']!r} sample {sample}" + (f" step {step}" if step is not None else "")


def _is_converted(value: Any, dtype: np.dtype[Any]) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1


def _fit(values: list[Any], kind: type) -> bool:
    """Whether values of the right type are within its limits."""
    if kind is int:
        return all(-INT32_MAX <= value <= INT32_MAX for value in (min(values, default=0), max(values, default=0)))
    return kind is not str or "".join(values).isascii()


def _tokens_of(prompts: Sequence[Any], responses: Sequence[Any]) -> Ragged:
    """Each row's prompt and response, one after the other."""
    lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
    lengths += np.fromiter(map(len, responses), np.int64, len(responses))
    arrays = [array for pair in zip(prompts, responses, strict=True) for array in pair]
    return Ragged.from_lengths(REUSED.joined(arrays, np.int32), lengths)


def _extra(column: ColumnSpec, arrays: Sequence[Array | None]) -> Extra:
    given = np.fromiter((array is not None for array in arrays), np.bool_, len(arrays))
    values = [column.empty() if array is None else array for array in arrays]
    return Extra(REUSED.ragged(values, column.storage), given)


def extras_of_row(row: Mapping[str, Any], columns: Sequence[ColumnSpec]) -> dict[str, Extra]:
    """The declared columns that the row has, each as a column of one row."""
    where = describe(row, 0)
    return {
        column.name: _extra(column, [column.array(row[column.name], where)])
        for column in columns
        if row.get(column.name) is not None
    }


def _versions(
    given: Sequence[int], arrays: Sequence[Array | None], responses: Sequence[Any]
) -> tuple[NDArray[np.int32], Ragged | None]:
    """Each row's policy version, the oldest of its tokens' unless it was given, and theirs where any row gives them."""
    versions = np.array(given, np.int32)
    if all(array is None for array in arrays):
        return versions, None
    filled = [
        np.full(len(response), version, np.int32) if array is None else array
        for array, version, response in zip(arrays, given, responses, strict=True)
    ]
    tokens = REUSED.ragged(filled, np.int32)
    return np.where(versions == UNKNOWN, oldest_versions(tokens), versions), tokens


def _token_rewards(arrays: Sequence[Array | None], table: Steps) -> Ragged | None:
    if any(array is not None for array in arrays):
        # A pending row holds zeros until its rewards come.
        lengths, pending = table.loss_mask.lengths.tolist(), table.rewards_pending.tolist()
        arrays = [
            np.zeros(length) if array is None and waits else array
            for array, length, waits in zip(arrays, lengths, pending, strict=True)
        ]
    return _ragged("reward", arrays, table, np.float64)


def _ragged(name: str, arrays: Sequence[Array | None], table: Steps, dtype: Any) -> Ragged | None:
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
    return REUSED.ragged(given, dtype)


def is_vector(value: Any) -> bool:
    """Whether it is given as one value a token, however wrong those are."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _scalar(value: Any, name: str, kind: type, where: str) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        # Beyond float64 it is infinite, which is refused with the other values that are not finite.
        return float(value) if abs(value) <= FLOAT32_MAX else math.inf
    if kind is bool and isinstance(value, (int, float)) and value in (0, 1):
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
        array = np.empty((0, 0), object)
    if array.dtype == object:
        check_no_null(values, name, where)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iufb"):
        raise unlike_numbers(values, name, where)
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


def token_ids(values: Any, name: str, where: str) -> NDArray[np.int32]:
    """Token ids as an array. Raises InvalidArgumentError that names the field and the value."""
    array = from_list(values, np.dtype(np.int32)) if type(values) is list else None
    found = _tokens(values, name, where) if array is None else array
    if found.size and least(found) < 0:
        bad = int((found < 0).argmax())
        raise InvalidArgumentError(f"{where}: {name}[{bad}] is {found[bad]}; token ids are 0..{INT32_MAX}")
    return found


def _version_array(values: Any, name: str, where: str) -> NDArray[np.int32]:
    array = _vector(values, name, where)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{where}: {name} holds {array.dtype} values; policy versions are integers")
    outside = np.less(array, UNKNOWN) | np.greater(array, INT32_MAX)
    if outside.any():
        bad = int(outside.argmax())
        raise InvalidArgumentError(f"{where}: {name}[{bad}] is {array[bad]}; each is at least -1, unknown, in 32 bits")
    return array.astype(np.int32, copy=False)


def _mask(values: Any, name: str, where: str) -> NDArray[np.uint8]:
    array = _vector(values, name, where)
    good = (array == 0) | (array == 1)
    if not good.all():
        bad = int((~good).argmax())
        raise InvalidArgumentError(f"{where}: {name}[{bad}] is {array[bad]}; each is 0 or 1")
    return array.astype(np.uint8, copy=False)


def _float32s(values: Any, name: str, where: str) -> Array:
    return _floats(values, name, where, np.float32)


def _floats(values: Any, name: str, where: str, dtype: Any) -> Array:
    array = _vector(values, name, where)
    if array.size and array.dtype.kind not in "iuf":
        raise InvalidArgumentError(f"{where}: {name} holds {array.dtype} values; expected numbers")
    if dtype == np.float64 and array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)
