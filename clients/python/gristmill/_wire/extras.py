"""Checks values of declared columns, and adds values that a row omits because the previous step has them.

A row may omit values of a shared `token` column (`ColumnSpec.is_shared`) for the first tokens that its step has in
common with the previous step. These values are stored only with the previous step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gristmill._wire.column_spec import BFLOAT16, ColumnSpec, by_name, is_finite, row_columns, start_of
from gristmill._wire.columns import Array, Int64s, Ragged
from gristmill._wire.steps import Extra, Steps, no_extra
from gristmill.errors import InvalidArgumentError


def check_extras(table: Steps, columns: Sequence[ColumnSpec], prefix_lengths: Int64s | None = None) -> Steps:
    """Returns the table if the columns of its rows are as declared.

    prefix_lengths: (rows,) how many first tokens of each row were not sent.
    Raises InvalidArgumentError that names the first invalid row, the column, both sizes or types, and the remedy.
    """
    ragged, columns = [column for column in columns if column.is_ragged], row_columns(columns)
    declared = by_name(columns)
    for name, extra in table.extras.items():
        if name not in declared and len(table):
            known = ", ".join(declared) or "none"
            raise InvalidArgumentError(
                f"{table.name(_first(extra.given))}: column {name!r:.80} is not declared by the run, which declares "
                f"{known}; declare it in columns, or omit it"
            )
    for column in columns:
        if column.source == "trainer":
            _check_absent(table, column)
        elif (present := table.extras.get(column.name)) is not None:
            _check_extra(table, column, present, prefix_lengths)
        elif column.required and len(table):
            raise _missing(table, 0, column)
    for column in ragged:
        _check_ragged(table, column)
    return table


def left_out(table: Steps, column: ColumnSpec) -> Int64s:
    """Returns for how many first tokens each row omits its values; int64 (rows,)."""
    return left_out_of(column, table.extras[column.name], table)


def left_out_of(column: ColumnSpec, extra: Extra, table: Steps) -> Int64s:
    if not column.is_shared:
        return np.zeros(len(table), np.int64)
    return np.where(extra.given, table.sequence_lengths - extra.values.lengths, 0)


def starts_of(column: ColumnSpec, table: Steps) -> Int64s:
    """Returns the index of each row's first value of a partial column; int64 (rows,)."""
    starts = np.zeros(len(table), np.int64)
    if (extra := table.extras.get(start_of(column.name))) is not None:
        starts[extra.given] = extra.values.values[extra.values.starts[extra.given]]
    return starts


def made_whole(table: Steps, columns: Iterable[ColumnSpec]) -> Steps:
    """Adds the omitted values. The table must contain whole trajectories, each in step order."""
    changed = {}
    for column in columns:
        if column.name in table.extras and (missing := left_out(table, column)).any():
            extra, whole = table.extras[column.name], list[Array]()
            for values, count in zip(extra.values.arrays(), missing.tolist(), strict=True):
                whole.append(np.concatenate([whole[-1][:count], values]) if count else values)
            changed[column.name] = Extra(Ragged.from_arrays(whole, column.storage), extra.given)
    return replace(table, extras={**table.extras, **changed}) if changed else table


def _check_absent(table: Steps, column: ColumnSpec) -> None:
    extra = table.extras.get(column.name)
    if extra is not None and extra.given.any():
        raise InvalidArgumentError(
            f"{table.name(_first(extra.given))}: {column.name} was sent, but the trainer writes it (source: trainer); "
            "omit it, or declare source: rollout"
        )


def _check_extra(table: Steps, column: ColumnSpec, extra: Extra, prefix_lengths: Int64s | None) -> None:
    values = extra.values.values
    if values.dtype != column.storage or values.shape[1:] != column.value_shape:
        dtype = "bfloat16" if values.dtype == BFLOAT16 else values.dtype.name
        raise InvalidArgumentError(
            f"{table.name(0)}: {column.name} has {dtype} values of shape {list(values.shape[1:])}, but the column "
            f"declares {column.dtype} of shape {list(column.shape)}; send values as declared"
        )
    if column.required and not extra.given.all():
        raise _missing(table, _first(~extra.given), column)
    _check_counts(table, column, extra, prefix_lengths)
    if not column.allow_nonfinite and not is_finite(values):
        row = next(row for row, one in enumerate(extra.values.arrays()) if not is_finite(one))
        at = next(at for at, one in enumerate(extra.values[row]) if not is_finite(np.atleast_1d(one)))
        raise InvalidArgumentError(
            f"{table.name(row)}: {column.name}[{at}] is not finite as {column.dtype}; send a finite value within "
            "its range, or declare allow_nonfinite: true"
        )


def _check_counts(table: Steps, column: ColumnSpec, extra: Extra, prefix_lengths: Int64s | None) -> None:
    if column.scope == "items":
        return
    expected = _needed(table, column)
    if column.partial:
        _check_starts(table, column, extra.given, extra.values.lengths, expected)
        return
    wrong = extra.given & (extra.values.lengths != expected)
    if column.is_shared and prefix_lengths is not None:
        wrong &= extra.values.lengths != expected - prefix_lengths
    if wrong.any():
        row = _first(wrong)
        count_of = {"row": "row", "response": "response token", "token": "prompt and response token"}
        raise InvalidArgumentError(
            f"{table.name(row)}: {column.name} has {extra.values.lengths[row]} values; send {expected[row]}, "
            f"one per {count_of[column.scope]}" + ("" if column.scope == "row" else ", or declare partial: true")
        )


def _needed(table: Steps, column: ColumnSpec) -> Int64s:
    """Returns how many values each row's step needs; int64 (rows,)."""
    if column.scope == "row":
        return np.ones(len(table), np.int64)
    return table.response_lengths if column.scope == "response" else table.sequence_lengths


def _check_ragged(table: Steps, column: ColumnSpec) -> None:
    """Refuses offsets of a ragged column that do not assign its values to the row's tokens."""
    nothing = no_extra(len(table), column.empty())
    values, offsets = (table.extras.get(one.name, nothing) for one in (column.values_column, column.offsets_column))
    if (values.given != offsets.given).any():
        row, names = _first(values.given != offsets.given), (column.name, column.offsets_column.name)
        has, lacks = names if values.given[row] else names[::-1]
        raise InvalidArgumentError(
            f"{table.name(row)}: {has} was sent without {lacks}; send both, or {column.name} as one list per token"
        )
    given, counts, tokens = values.given, offsets.values.lengths - 1, _needed(table, column)
    totals = values.values.lengths.tolist()
    for row in np.flatnonzero(given).tolist():
        of_row = offsets.values[row]
        if not len(of_row) or of_row[0] or of_row[-1] != totals[row] or (of_row[1:] < of_row[:-1]).any():
            raise InvalidArgumentError(
                f"{table.name(row)}: {column.offsets_column.name} does not split the {totals[row]} values of "
                f"{column.name} by token; send the index where each token's values start, then the total"
            )
    if column.partial:
        _check_starts(table, column, given, counts, tokens)
    elif (wrong := given & (counts != tokens)).any():
        row = _first(wrong)
        raise InvalidArgumentError(
            f"{table.name(row)}: {column.name} has values of {counts[row]} tokens, but the step has {tokens[row]} "
            f"{_TOKENS_OF[column.scope]}; send one list per token, or declare partial: true"
        )


def _check_starts(table: Steps, column: ColumnSpec, given: Array, counts: Int64s, tokens: Int64s) -> None:
    """Refuses values of a partial column outside the row's tokens.

    given: bool (rows,). counts, tokens: int64 (rows,), each row's number of tokens with values, and of all tokens.
    """
    starts = starts_of(column, table)
    wrong = given & ((starts < 0) | (starts > tokens - counts))
    if wrong.any():
        row = _first(wrong)
        raise InvalidArgumentError(
            f"{table.name(row)}: {column.name} has {counts[row]} values from index {starts[row]} "
            f"({start_of(column.name)}), but the step has {tokens[row]} {_TOKENS_OF[column.scope]}; send at most one "
            "value per token, and the index of the first token with a value"
        )


_TOKENS_OF = {"response": "response tokens", "token": "prompt and response tokens"}


def _missing(table: Steps, row: int, column: ColumnSpec) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{table.name(row)}: column {column.name!r} is missing; every row needs it (required: true)"
    )


def _first(flags: Array) -> int:
    return int(flags.argmax())
