"""Declared columns of training rows (specification, section 8)."""

from __future__ import annotations

from typing import Any

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
    """One value's worth of `fill`."""
    value: Any = column.get("fill", 0)
    for size in reversed(column.get("shape", [])):
        value = [value] * size
    return value


def is_given(row: Merged, column: Column) -> bool:
    return any(column["name"] in row.trajectory.steps[number] for number in row.path)


def value(row: Merged, column: Column) -> Any:
    """A row's value: one of scope `row`, one a response token, one a token, or a list of items."""
    steps, name, fill = row.trajectory.steps, column["name"], filled(column)
    given = [number for number in row.path if name in steps[number]]
    match column["scope"]:
        case "response":
            values = [step.get(name, [fill] * len(step["response_ids"])) for step in steps]
            return row.of_tokens(values, fill)
        case "token" if column.get("merge", "first") == "first":
            return [
                steps[holder][name][place] if name in steps[holder] else fill
                for place, holder in enumerate(row.holders)
            ]
        case "token":
            return steps[row.path[-1]].get(name, [fill] * len(row.tokens))
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
