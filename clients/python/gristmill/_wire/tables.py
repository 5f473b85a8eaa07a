"""Converts columns of Python values, one list per field, to tables of steps.

Checks types and shapes. An error for an invalid value names the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire import components
from gristmill._wire.codecs.row_codec import ones
from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Int64s, Ragged, exact_sum, lengths_of
from gristmill._wire.lists import ConvertedTokens, Pieces, from_list, joined
from gristmill._wire.row_fields import PLAIN_FIELDS, ROW_FIELDS, TEXT_FIELDS, TOKEN_FIELDS, UNKNOWN, TokenField
from gristmill._wire.steps import INT32_MAX, Extra, Steps, TrajectoryKey, check, oldest_versions
from gristmill._wire.values import Read, float32s, floats, is_vector, mask, scalar, tokens, version_array
from gristmill.errors import InvalidArgumentError

SCALARS: dict[str, tuple[type, Any]] = {
    "uid": (str, ""),
    **{one.key: (type(one.default), one.default) for one in ROW_FIELDS},
    "stop_reason": (str, ""),
    **{one.key: (str, "") for one in TEXT_FIELDS},
}
"""Fields with one value per row: their type, and the default value."""

ARRAYS = ("prompt_token_ids", "response_ids", *(one.key for one in TOKEN_FIELDS))
"""Fields with one value per token, or per token or row."""

Column = Ragged | list[Array | None] | None
"""The values of a field with one value per token: one array for all rows, or an array or None for each row. None if no
row has the field."""

_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


class _Tokens(NamedTuple):
    """The tokens of rows.

    pieces: arrays to concatenate: for each row, the pieces of its prompt, then its response. edges: row i has
    `pieces[edges[i]:edges[i + 1]]`. prompts, responses: int64 (rows,), the numbers of tokens.
    """

    pieces: Pieces
    edges: Sequence[int]
    prompts: Int64s
    responses: Int64s


class ValueColumns:
    """The fields of rows, one list per field. Absent values and fields are None.

    The types of all rows are checked before values are copied. Columns of other than the usual types convert slower.
    """

    def __init__(
        self,
        columns: Mapping[str, list[Any]],
        count: int,
        declared: Sequence[ColumnSpec] = (),
    ) -> None:
        """Checks the types. declared: the run's declared columns.

        An absent loss mask is all ones. Raises InvalidArgumentError that names the row, the field and the value. The
        lists are not modified.
        """
        self._columns, self._count = columns, count
        self._kinds = {name: set(map(type, values)) for name, values in columns.items()}
        self._scalars = {name: self._scalar_column(name, *properties) for name, properties in SCALARS.items()}
        for name in ("prompt_token_ids", "response_ids", "loss_mask"):
            self._check_complete(name)
        self._tokens = self._token_column()
        self._masks = self._array_column("loss_mask", np.uint8, mask)
        self._plain = {one: self._array_column(one.key, one.dtype, _reader(one)) for one in PLAIN_FIELDS}
        self._versions = self._array_column("policy_versions", np.int32, version_array)
        self._rewards, self._token_rewards = self._number_column("reward", np.float64)
        self._advantages, self._token_advantages = self._number_column("advantage", np.float32)
        self._components = self._component_column()
        self._extras = {column: self._extra_column(column) for column in declared if column.name in columns}

    def _where(self, row: int) -> str:
        return describe({name: values[row] for name, values in self._columns.items()}, row)

    def _scalar_column(self, name: str, kind: type, default: Any) -> list[Any]:
        values = self._columns.get(name)
        if values is None:
            return [default] * self._count
        if self._kinds[name] <= {kind} and _fit(values, kind):
            return values
        return [
            default if value is None else scalar(value, name, kind, self._where(row))
            for row, value in enumerate(values)
        ]

    def _check_complete(self, name: str) -> None:
        if type(None) in self._kinds.get(name, ()):
            row = next(row for row, value in enumerate(self._columns[name]) if value is None)
            raise InvalidArgumentError(f"{self._where(row)}: {name} is missing; every row needs it")

    def _token_column(self) -> _Tokens:
        responses = _arrays_of(self._array_column("response_ids", np.int32, tokens))
        prompts = self._columns.get("prompt_token_ids", [])
        if self._kinds.get("prompt_token_ids", set()) <= {np.ndarray}:
            prompts = _arrays_of(self._array_column("prompt_token_ids", np.int32, tokens))
            pieces = [*chain.from_iterable(zip(prompts, responses, strict=True))]
            return _Tokens(pieces, range(0, len(pieces) + 1, 2), lengths_of(prompts), lengths_of(responses))
        keys = zip(self._scalars["uid"], self._scalars["sample"], strict=True)
        rows = zip(keys, self._scalars["is_last_step"], prompts, responses, strict=True)
        converted, pieces, edges, lengths = ConvertedTokens(), Pieces(), [0], list[int]()
        for row, (key, is_last, prompt, response) in enumerate(rows):
            is_list = type(prompt) is list
            prompt_pieces = converted.prompt(key, prompt) if is_list else None
            if prompt_pieces is None:
                prompt_pieces = [tokens(prompt, "prompt_token_ids", self._where(row))]
            lengths.append(len(prompt))
            pieces += prompt_pieces
            pieces.append(response)
            edges.append(len(pieces))
            if is_list and not is_last:
                converted.keep(key, prompt, self._columns["response_ids"][row], [*prompt_pieces, response])
        return _Tokens(pieces, edges, np.array(lengths, np.int64), lengths_of(responses))

    def _array_column(self, name: str, dtype: Any, read: Read) -> Column:
        dtype, values, kinds = np.dtype(dtype), self._columns.get(name), self._kinds.get(name)
        if values is None or (kinds == {np.ndarray} and _are_converted(values, dtype)):
            return values
        if kinds == {list} and (array := joined(values, dtype)) is not None:
            return Ragged.from_lengths(array, lengths_of(values))
        return [
            value if value is None or _is_converted(value, dtype) else self._array(row, value, name, dtype, read)
            for row, value in enumerate(values)
        ]

    def _array(self, row: int, value: Any, name: str, dtype: np.dtype[Any], read: Read) -> Array:
        if type(value) is list and (array := from_list(value, dtype)) is not None:
            return array
        return read(value, name, self._where(row))

    def _number_column(self, name: str, dtype: Any) -> tuple[list[float | None], Column]:
        """Returns one number per row (the sum if the row has one number per token), and the numbers per token."""
        values = self._columns.get(name)
        if values is None:
            return [None] * self._count, None
        if self._kinds[name] <= {float, type(None)}:
            return values, None
        if self._kinds[name] == {list}:
            column = self._array_column(name, dtype, partial(floats, dtype=dtype))
            return [exact_sum(array) for array in _arrays_of(column)], column
        numbers: list[float | None] = []
        arrays: list[Array | None] = [None] * self._count
        for row, value in enumerate(values):
            if is_vector(value):
                array = arrays[row] = self._array(row, value, name, np.dtype(dtype), partial(floats, dtype=dtype))
                numbers.append(exact_sum(array))
            elif value is None or type(value) is float:
                numbers.append(value)
            else:
                numbers.append(float(scalar(value, name, float, self._where(row))))
        return numbers, arrays

    def _component_column(self) -> list[str] | None:
        values = self._columns.get(components.FIELD)
        return values and [components.to_text(value, self._where(row)) for row, value in enumerate(values)]

    def _extra_column(self, column: ColumnSpec) -> list[Array | None]:
        values = self._columns[column.name]
        return [None if value is None else column.array(value, self._where(row)) for row, value in enumerate(values)]

    def tables(self, most_rows: int, most_bytes: int) -> Iterator[Steps]:
        """Yields the rows as tables within both limits. A single row may exceed them. Each table is built when it is
        requested."""
        ends, begin, end = np.cumsum(self._sizes()), 0, -1
        while end < self._count:
            most = most_bytes + (int(ends[begin - 1]) if begin else 0)
            fitting = max(int(np.searchsorted(ends, most, "right")), begin + 1)
            end = min(fitting, begin + most_rows, self._count)
            yield self.table(begin, end)
            begin = end

    def _sizes(self) -> Int64s:
        """Returns the approximate bytes of each row's arrays; int64 (rows,)."""
        sizes = (self._tokens.prompts + self._tokens.responses) * 4
        if self._masks is None:
            sizes += self._tokens.responses
        for column in (self._masks, *self._plain.values(), self._token_rewards, *self._extras.values()):
            if isinstance(column, Ragged):
                sizes += column.lengths * column.values.itemsize
            elif column is not None:
                sizes += np.array([0 if array is None else array.nbytes for array in column], np.int64)
        return sizes

    def table(self, begin: int, end: int) -> Steps:
        """Returns a checked table of the rows. Arrays are copied. Raises InvalidArgumentError like `check`."""
        part = slice(begin, end)
        scalars = {name: values[part] for name, values in self._scalars.items()}
        rewards = self._rewards[part]
        pending = [reward is None for reward in rewards]
        prompts, responses = self._tokens.prompts[part], self._tokens.responses[part]
        pieces = self._tokens.pieces[self._tokens.edges[begin] : self._tokens.edges[end]]
        versions, token_versions = _versions(scalars["policy_version"], _cut(self._versions, part), responses)
        numbers: dict[str, Any] = {one.name: np.array(scalars[one.key], one.dtype) for one in ROW_FIELDS}
        numbers["policy_versions"] = versions
        plain: dict[str, Any] = {one.name: self._plain_column(one, part, responses) for one in PLAIN_FIELDS}
        texts: dict[str, Any] = {one.name: scalars[one.key] for one in TEXT_FIELDS if any(scalars[one.key])}
        masks = _cut(self._masks, part)
        loss_mask = ones(responses) if masks is None else _ragged(masks, np.uint8)
        return check(
            Steps(
                uids=scalars["uid"],
                stop_reasons=scalars["stop_reason"],
                tokens=Ragged.from_lengths(Ragged.from_arrays(pieces, np.int32).values, prompts + responses),
                prompt_lengths=prompts,
                loss_mask=loss_mask,
                rewards=np.array([reward or 0.0 for reward in rewards], np.float64),
                token_rewards=self._token_rewards_of(part, loss_mask.lengths, pending),
                rewards_pending=np.array(pending, np.bool_),
                advantages=self._row_advantages(part),
                token_advantages=self._optional("advantage", _cut(self._token_advantages, part), begin, np.float32),
                extras={
                    column.name: _extra(column, arrays[part])
                    for column, arrays in self._extras.items()
                    if any(array is not None for array in arrays[part])
                },
                token_versions=token_versions,
                reward_components=self._components and self._components[part],
                **numbers,
                **plain,
                **texts,
            )
        )

    def _plain_column(self, field: TokenField, part: slice, lengths: Int64s) -> Ragged | None:
        column = _cut(self._plain[field], part)
        if field.fill is not None and isinstance(column, list) and any(array is not None for array in column):
            column = [
                np.full(length, field.fill, field.dtype) if array is None else array
                for array, length in zip(column, lengths.tolist(), strict=True)
            ]
        return self._optional(field.key, column, part.start, field.dtype)

    def _token_rewards_of(self, part: slice, lengths: Int64s, pending: Sequence[bool]) -> Ragged | None:
        column = _cut(self._token_rewards, part)
        if isinstance(column, list) and any(array is not None for array in column):
            # A row with a pending reward has zeros until the reward is set.
            column = [
                np.zeros(length) if array is None and waits else array
                for array, length, waits in zip(column, lengths.tolist(), pending, strict=True)
            ]
        return self._optional("reward", column, part.start, np.float64)

    def _optional(self, name: str, column: Column, begin: int, dtype: Any) -> Ragged | None:
        """Returns a column that all rows or no rows must have."""
        if isinstance(column, list):
            has_values = [array is not None for array in column]
            if not any(has_values):
                return None
            if not all(has_values):
                raise InvalidArgumentError(
                    f"{name}: {self._name(begin + has_values.index(True))} has one value per response token, but "
                    f"{self._name(begin + has_values.index(False))} does not; set it in all rows, or in none"
                )
        return None if column is None else _ragged(column, dtype)

    def _row_advantages(self, part: slice) -> NDArray[np.float64] | None:
        values, of_tokens = self._advantages[part], _cut(self._token_advantages, part)
        has_values = [value is not None for value in values]
        if not any(has_values) or (of_tokens is not None and any(array is not None for array in _arrays_of(of_tokens))):
            return None
        if not all(has_values):
            row = part.start + has_values.index(False)
            raise InvalidArgumentError(f"{self._name(row)}: advantage is missing; set it in all rows, or in none")
        return np.array(values, np.float64)

    def _name(self, row: int) -> str:
        """Returns a description of the row, like `Steps.name`."""
        round_, uid, sample, step = (self._scalars[name][row] for name in ("round", "uid", "sample", "step"))
        return f"{TrajectoryKey(round_, uid, sample)} step {step}"


def _reader(field: TokenField) -> Read:
    return version_array if np.dtype(field.dtype).kind == "i" else float32s


def describe(row: Mapping[str, Any], position: int) -> str:
    """Returns a description of the row for messages."""
    if row.get("uid") is None:
        return f"row {position}"
    sample, step = row.get("sample"), row.get("step")
    return f"uid {row['uid']!r} sample {sample}" + (f" step {step}" if step is not None else "")


def _is_converted(value: Any, dtype: np.dtype[Any]) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1


def _are_converted(values: list[Any], dtype: np.dtype[Any]) -> bool:
    """Returns whether `_is_converted` is true for all arrays, but faster."""
    return [*map(_DTYPE, values)].count(dtype) == len(values) and {*map(_NDIM, values)} <= {1}


def _fit(values: list[Any], kind: type) -> bool:
    """Returns whether values of the right type are within its limits."""
    if kind is int:
        return all(-INT32_MAX <= value <= INT32_MAX for value in (min(values, default=0), max(values, default=0)))
    return kind is not str or "".join(values).isascii()


def _cut(column: Column, part: slice) -> Column:
    if isinstance(column, Ragged):
        return column if part.stop - part.start == len(column) else column.part(part)
    return None if column is None else column[part]


def _ragged(column: Ragged | list[Array | None], dtype: Any) -> Ragged:
    """Returns a column that all rows have as one ragged column."""
    return column if isinstance(column, Ragged) else Ragged.from_arrays(column, dtype)  # type: ignore[arg-type]


def _arrays_of(column: Column) -> list[Any]:
    """Returns the array, or None, of each row."""
    return column.arrays() if isinstance(column, Ragged) else column or []


def _extra(column: ColumnSpec, arrays: Sequence[Array | None]) -> Extra:
    given = np.fromiter((array is not None for array in arrays), np.bool_, len(arrays))
    values = [column.empty() if array is None else array for array in arrays]
    return Extra(Ragged.from_arrays(values, column.storage), given)


def extras_of_row(row: Mapping[str, Any], columns: Sequence[ColumnSpec]) -> dict[str, Extra]:
    """Returns the declared columns of the row, each as a column with one row."""
    where = describe(row, 0)
    return {
        column.name: _extra(column, [column.array(row[column.name], where)])
        for column in columns
        if row.get(column.name) is not None
    }


def _versions(of_rows: Sequence[int], column: Column, lengths: Int64s) -> tuple[NDArray[np.int32], Ragged | None]:
    """Returns each row's policy version, by default the oldest of its tokens. Also returns the versions of tokens if a
    row has them.

    lengths: (rows,) the lengths of the responses.
    """
    versions = np.array(of_rows, np.int32)
    arrays = _arrays_of(column)
    if all(array is None for array in arrays):
        return versions, None
    filled = [
        np.full(length, version, np.int32) if array is None else array
        for array, version, length in zip(arrays, of_rows, lengths.tolist(), strict=True)
    ]
    tokens = Ragged.from_arrays(filled, np.int32)
    return np.where(versions == UNKNOWN, oldest_versions(tokens), versions), tokens
