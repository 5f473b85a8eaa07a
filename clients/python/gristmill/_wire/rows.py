"""Converts rows, which are mappings with the field names of the specification, to tables of steps, and back.

This module checks the names of fields; `gristmill._wire.tables` checks their values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from gristmill._wire import components
from gristmill._wire.column_spec import BFLOAT16, ColumnSpec, from_bfloat16, row_columns
from gristmill._wire.columns import lengths_of
from gristmill._wire.foreign_names import renamings
from gristmill._wire.row_fields import ROW_FIELDS, TEXT_FIELDS, TOKEN_FIELDS
from gristmill._wire.steps import Extra, Steps
from gristmill._wire.tables import ARRAYS, SCALARS, ValueColumns, describe, extras_of_row
from gristmill.errors import InvalidArgumentError

_REQUIRED = ("uid", "sample", "prompt_token_ids", "response_ids", "loss_mask")
_FIELDS = frozenset((*SCALARS, *ARRAYS, components.FIELD))
_ABORTED = "aborted"


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    step_wise: bool = True,
    columns: Sequence[ColumnSpec] = (),
) -> Steps:
    """Converts rows, with lists or arrays as values, to a checked table.

    columns: the run's declared columns, which are fields of the rows. If `step_wise` is False, `step` and
        `is_last_step` may be absent (0, true). A `reward` that is absent or None is pending. Raises an
        InvalidArgumentError that names the row, the field, the value and the remedy. The rows are not modified.
    """
    rows = list(rows)
    return columns_of(rows, step_wise=step_wise, columns=columns).table(0, len(rows))


def columns_of(
    rows: Sequence[Mapping[str, Any]],
    *,
    step_wise: bool,
    columns: Sequence[ColumnSpec] = (),
) -> ValueColumns:
    """Returns the rows' columns, with checked types. Raises InvalidArgumentError like `from_rows`."""
    rows, columns = _flattened(rows, columns), row_columns(columns)
    known = _FIELDS.union(column.name for column in columns)
    names = _names(rows, (*_REQUIRED, "step", "is_last_step") if step_wise else _REQUIRED, known)
    return ValueColumns({name: [row.get(name) for row in rows] for name in names}, len(rows), columns)


def aborted(row: Any) -> str | None:
    """Returns why a row's trajectory was aborted, which then has no other fields than its name; None for other rows."""
    return row.get(_ABORTED) if isinstance(row, Mapping) else None


def extras_of(row: Mapping[str, Any], columns: Sequence[ColumnSpec]) -> dict[str, Extra]:
    """Returns the declared columns of one row, by name. Values are copied. Raises InvalidArgumentError like
    `from_rows`."""
    (row,), columns = _flattened([row], columns), row_columns(columns)
    _names([row], (), _FIELDS.union(column.name for column in columns))
    return extras_of_row(row, columns)


def extra_names(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Returns the names of the rows' fields that are not built in. The run must declare them."""
    names: set[str] = set()
    for row in rows:
        if isinstance(row, Mapping):
            names |= row.keys() - _FIELDS
    return names


def to_rows(table: Steps, columns: Sequence[ColumnSpec] = ()) -> Iterator[dict[str, Any]]:
    """Yields the table's rows in the form of `from_rows`, with lists and numbers, like the lines of a rollouts file.

    columns: the run's declared columns.
    """
    singles = {column.name for column in row_columns(columns) if column.scope == "row"}
    ragged = [column for column in columns if column.is_ragged]
    of_tokens = [(one.key, column) for one in TOKEN_FIELDS if (column := getattr(table, one.name)) is not None]
    of_rows = [(one.key, texts) for one in TEXT_FIELDS if (texts := getattr(table, one.name)) is not None]
    numbers = [(one.key, getattr(table, one.name).tolist()) for one in ROW_FIELDS]
    for index in range(len(table)):
        tokens, split = table.tokens[index], int(table.prompt_lengths[index])
        row: dict[str, Any] = {
            "uid": table.uids[index],
            **{name: values[index] for name, values in numbers},
            "stop_reason": table.stop_reasons[index],
            "prompt_token_ids": tokens[:split].tolist(),
            "response_ids": tokens[split:].tolist(),
            "reward": None if table.rewards_pending[index] else float(table.rewards[index]),
        }
        if table.advantages is not None:
            row["advantage"] = float(table.advantages[index])
        row |= {key: text for key, texts in of_rows if (text := texts[index])}
        if table.reward_components is not None and (text := table.reward_components[index]):
            row[components.FIELD] = components.from_text(text)
        row |= {name: column[index].tolist() for name, column in of_tokens}
        row |= {
            name: _plain(extra, index, name in singles) for name, extra in table.extras.items() if extra.given[index]
        }
        for column in ragged:
            if (offsets := row.pop(column.offsets_column.name, None)) is not None:
                row[column.name] = [row[column.name][begin:end] for begin, end in pairwise(offsets)]
        yield row


def _flattened(rows: Sequence[Mapping[str, Any]], columns: Sequence[ColumnSpec]) -> Sequence[Mapping[str, Any]]:
    """Converts ragged columns that are one list per token to values and offsets."""
    ragged = [column for column in columns if column.is_ragged]
    if not ragged:
        return rows
    return [
        {**row, **_of_tokens(row, ragged, position)} if isinstance(row, Mapping) else row
        for position, row in enumerate(rows)
    ]


def _of_tokens(row: Mapping[str, Any], ragged: Sequence[ColumnSpec], position: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for column in ragged:
        values, name = row.get(column.name), column.offsets_column.name
        if values is None or row.get(name) is not None:
            continue
        try:
            lists = [one.tolist() if hasattr(one, "tolist") else one for one in values]
            made |= {column.name: [*chain.from_iterable(lists)], name: np.append(0, np.cumsum(lengths_of(lists)))}
        except TypeError:
            raise InvalidArgumentError(
                f"{describe(row, position)}: {column.name} is not a list of lists; pass one list per token, or all "
                f"values in one list and {name}: the index where each token's values start, then the total"
            ) from None
    return made


def _plain(extra: Extra, row: int, is_single: bool) -> Any:
    values = extra.values[row]
    listed: list[Any] = (from_bfloat16(values) if values.dtype == BFLOAT16 else values).tolist()
    return listed[0] if is_single else listed


def _names(rows: Sequence[Mapping[str, Any]], required: Sequence[str], known: Collection[str]) -> set[str]:
    """Returns the names of the rows' fields. Fast if a row has the same fields as the previous row."""
    names, seen = set[str](), None
    for position, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidArgumentError(f"row {position} is a {type(row).__name__}; pass a list of dicts, one per row")
        if row.keys() != seen:
            unknown = row.keys() - known
            if unknown:
                raise InvalidArgumentError(
                    f"{describe(row, position)}: unknown field {sorted(unknown)[0]}"
                    f"{renamings(unknown, row, known)}; expected {', '.join(sorted(known))}; declare other fields as "
                    "columns of the run"
                )
            names |= row.keys()
            seen = row.keys()
        missing = [name for name in required if row.get(name) is None]
        if missing:
            are = "is missing; every row needs it" if len(missing) == 1 else "are missing; every row needs them"
            raise InvalidArgumentError(f"{describe(row, position)}: {' and '.join(missing)} {are}")
    return names
