"""Reading frameworks' values: arrays of anything that speaks NumPy's array protocol, uids, and tokens' own shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill._client.rollout.step_writer import plain
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError


def array_of(values: Any, name: str, where: str) -> Array:
    """Raises InvalidArgumentError for what is no array of numbers."""
    try:
        array = np.asarray(plain(values, name, where))
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "iufb":
        raise InvalidArgumentError(f"{where}: {name} is no array of numbers; give a list, an array or a CPU tensor")
    return array


def entries_of(tensor: Any, name: str, where: str) -> list[Any]:
    """One entry a row: of a list, of an array, or of a nested tensor, whose rows have their own lengths."""
    if getattr(tensor, "is_nested", False):
        return [array_of(entry, name, f"{where}: row {row}") for row, entry in enumerate(tensor.unbind())]
    values = plain(tensor, name, where)
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise InvalidArgumentError(f"{where}: {name} is {values!r}; it needs one entry a row")
    return list(values)


def aligned(name: str, values: Sequence[Any], count: int, where: str) -> Sequence[Any]:
    """The values, of which there has to be one a row."""
    if len(values) != count:
        raise InvalidArgumentError(f"{where}: {name} has {len(values)} entries for {count} rows; they need one each")
    return values


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute of an object, or of the mapping that it was written as."""
    return thing.get(name, default) if isinstance(thing, Mapping) else getattr(thing, name, default)


def attributes(thing: Any) -> dict[str, Any]:
    """An object's attributes that hold data, by name."""
    if isinstance(thing, Mapping):
        return dict(thing)
    names = [*getattr(type(thing), "__struct_fields__", ()), *getattr(type(thing), "__dataclass_fields__", ())]
    return {name: getattr(thing, name) for name in names} | dict(getattr(thing, "__dict__", {}))


def uid_of(uid: Any, where: str) -> str:
    """Integers name groups by their digits."""
    if isinstance(uid, (str, np.str_)):
        return str(uid)
    if not isinstance(uid, (bool, np.bool_)) and hasattr(uid, "__index__") and not getattr(uid, "ndim", 0):
        return str(int(uid))
    raise InvalidArgumentError(f"{where}: its group is named {uid!r}; expected a string or an integer")


def version_of(value: Any) -> int:
    """A policy version as frameworks write it, -1 for what is no number."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else -1
    return -1 if value is None or not hasattr(value, "__index__") else int(value)


def routes(values: Any, name: str, tokens: int, where: str) -> Array:
    """Routed experts (tokens, layers, top_k), one entry a token of the row.

    An engine runs no further than what it samples last, and says nothing of the tokens behind that: those get the first
    top_k experts, as a replayed router wants distinct ones.
    """
    found = array_of(values, name, where)
    if found.ndim != 3 or len(found) > tokens:
        raise InvalidArgumentError(
            f"{where}: {name} has the shape {found.shape}; expected (tokens, layers, top_k) for {tokens} tokens at most"
        )
    tail = np.broadcast_to(np.arange(found.shape[2], dtype=found.dtype), (tokens - len(found), *found.shape[1:]))
    return np.concatenate([found, tail])


def unpacked(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values with what `name` holds, a mapping of tensors by their names, beside the others."""
    rest = {key: value for key, value in values.items() if key != name}
    return rest | dict(values.get(name) or {})
