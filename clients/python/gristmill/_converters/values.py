"""Reads values of frameworks: objects that support NumPy's array protocol, uids, versions, and routed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill._client.rollout.step_writer import plain
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError


def array_of(values: Any, name: str, where: str) -> Array:
    """Return the values as an array. Raises InvalidArgumentError if they are not an array of numbers."""
    try:
        array = np.asarray(plain(values, name, where))
        if array.dtype == object:
            # verl's arrays of entries may be of objects, also where all are numbers.
            array = np.asarray(array.tolist())
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "iufb":
        raise InvalidArgumentError(
            f"{where}: {name} is not an array of numbers; pass numbers, as a list, an array or a CPU tensor"
        )
    return array


def entries_of(tensor: Any, name: str, where: str) -> list[Any]:
    """Return a list, an array, or a nested tensor as a list with one entry per row."""
    if getattr(tensor, "is_nested", False):
        return [array_of(entry, name, f"{where}: row {row}") for row, entry in enumerate(tensor.unbind())]
    values = plain(tensor, name, where)
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise InvalidArgumentError(f"{where}: {name} is {values!r}; pass one entry per row")
    return list(values)


def aligned(name: str, values: Sequence[Any], count: int, where: str) -> Sequence[Any]:
    """Return the values. Raises InvalidArgumentError unless there is one per row."""
    if len(values) != count:
        raise InvalidArgumentError(f"{where}: {name} has {len(values)} entries for {count} rows; pass one per row")
    return values


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of an object, or an entry of a mapping."""
    return thing.get(name, default) if isinstance(thing, Mapping) else getattr(thing, name, default)


def attributes(thing: Any) -> dict[str, Any]:
    """Return an object's data attributes by name."""
    if isinstance(thing, Mapping):
        return dict(thing)
    names = [*getattr(type(thing), "__struct_fields__", ()), *getattr(type(thing), "__dataclass_fields__", ())]
    return {name: getattr(thing, name) for name in names} | dict(getattr(thing, "__dict__", {}))


def uid_of(uid: Any, where: str) -> str:
    """Return a group's uid as a string. Converts an integer to a string."""
    if isinstance(uid, (str, np.str_)):
        return str(uid)
    if not isinstance(uid, (bool, np.bool_)) and hasattr(uid, "__index__") and not getattr(uid, "ndim", 0):
        return str(int(uid))
    raise InvalidArgumentError(f"{where}: the group's uid is {uid!r}; expected a string or an integer")


def version_of(value: Any) -> int:
    """Return a policy version as a number; -1 if the framework's value is not a number."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else -1
    return -1 if value is None or not hasattr(value, "__index__") else int(value)


def routes(values: Any, name: str, tokens: int, where: str) -> Array:
    """Return the routed experts (tokens, layers, top_k) that the engine reports for the row's first tokens.

    The engine reports none for the last sampled token and later tokens, so declare the column as `partial`.
    """
    experts = array_of(values, name, where)
    if experts.ndim != 3 or len(experts) > tokens:
        raise InvalidArgumentError(
            f"{where}: {name} has shape {experts.shape}; expected (tokens, layers, top_k) for at most {tokens} tokens"
        )
    return experts


def unpacked(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Replace the entry `name`, a mapping of tensors, with the tensors."""
    rest = {key: value for key, value in values.items() if key != name}
    return rest | dict(values.get(name) or {})
