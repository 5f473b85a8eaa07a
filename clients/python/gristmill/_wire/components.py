"""Components of rewards: numbers by name, which a trajectory's last step has. In tables they are JSON text, with the
names in order, so that equal components have equal texts; `gristmill._wire.steps.check` checks names and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gristmill._wire.values import scalar
from gristmill.errors import InvalidArgumentError

FIELD = "reward_components"


def to_text(components: Any, where: str) -> str:
    """Returns the text of a mapping of names to numbers; empty for None and for no names. Omits names whose value is
    None, because Parquet has all names in every row. Raises InvalidArgumentError for other types."""
    if components is None:
        return ""
    if not isinstance(components, Mapping):
        raise InvalidArgumentError(f"{where}: {FIELD} is {components!r:.80}; send a mapping of names to numbers")
    numbers: dict[str, float] = {}
    for name, value in components.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"{where}: {FIELD} has the name {name!r:.80}; name each component by a string")
        if value is not None:
            numbers[name] = scalar(value, f"{FIELD}.{name}", float, where)
    return json.dumps(numbers, sort_keys=True) if numbers else ""


def from_text(text: str) -> dict[str, float]:
    """Returns the components of a text, in the order of their names."""
    components: dict[str, float] = json.loads(text) if text else {}
    return components
