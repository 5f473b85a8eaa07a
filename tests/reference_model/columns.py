"""Declared columns of training rows (specification, section 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.reference_model.merging import Merged

Column = dict[str, Any]

_LIMITS = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}


def filled(column: Column) -> Any:
    """One value's worth of `fill`; none where a token has any number of values."""
    if column.get("shape") == [None]:
        return []
    value: Any = column.get("fill", 0)
    for size in reversed(column.get("shape", [])):
        value = [value] * size
    return value


def is_given(row: Merged, column: Column) -> bool:
    return any(column["name"] in row.trajectory.steps[number] for number in row.path)


def at(step: dict[str, Any], column: Column, index: int) -> Any:
    """The value that a step gives one of its tokens; None for none. A partial column begins at `NAME_start`."""
    values, index = step.get(column["name"], []), index - step.get(f"{column['name']}_start", 0)
    return values[index] if 0 <= index < len(values) else None


def _of_token(row: Merged, column: Column, place: int) -> Any:
    """Of the steps that have the token, the first or the last gives its value, or of a partial column, the first or the
    last that gave one; where none did, the first or the last earlier step of the trajectory that did and has the same
    tokens up to there. None where no step gave one."""
    holding, steps = row.path[row.path.index(row.holders[place]) :], row.trajectory.steps
    others = [number for number in range(row.path[-1]) if number not in row.path and _has(steps[number], row, place)]
    order = 1 if column.get("merge", "first") == "first" else -1
    tried = [*holding[::order], *others[::order]] if column.get("partial") else holding[::order][:1]
    given = (at(steps[number], column, place) for number in tried)
    return next((value for value in given if value is not None), None)


def _has(step: dict[str, Any], row: Merged, place: int) -> bool:
    whole = step["prompt_token_ids"] + step["response_ids"]
    return len(whole) > place and whole[: place + 1] == row.tokens[: place + 1]


def of_tokens(row: Merged, column: Column) -> list[Any]:
    """The values of a column of scope `response` or `token`; None for a token without one."""
    if column["scope"] == "token":
        return [_of_token(row, column, place) for place in range(len(row.tokens))]
    steps = row.trajectory.steps
    return [None if source is None else at(steps[source[0]], column, source[1]) for source in row.sources]


def value(row: Merged, column: Column) -> Any:
    """A row's value: one of scope `row`, one a response token, one a token, or a list of items."""
    steps, name, fill = row.trajectory.steps, column["name"], filled(column)
    given = [number for number in row.path if name in steps[number]]
    match column["scope"]:
        case "response" | "token":
            return [fill if one is None else one for one in of_tokens(row, column)]
        case "items" if column.get("merge", "last") == "concat":
            return [item for number in given for item in steps[number][name]]
        case "items":
            return steps[given[-1]][name] if given else []
    if not given:
        return fill
    if column.get("merge", "last") == "sum":
        # What an earlier row counts already is nothing here.
        counted = [steps[number][name] if number in row.own else filled(column | {"fill": 0}) for number in given]
        return _sum(counted, column["dtype"])
    return steps[given[0 if column.get("merge", "last") == "first" else -1]][name]


def _sum(values: list[Any], dtype: str) -> Any:
    """The sum, or the nearest number that the type has."""
    if isinstance(values[0], list):
        return [_sum(list(parts), dtype) for parts in zip(*values, strict=True)]
    total = sum(values)
    low, high = _LIMITS.get(dtype, (total, total))
    return min(max(total, low), high)
