"""Components of a trajectory's reward: numbers by name, on its last step. Tables store them as JSON with sorted names,
so that equal components have equal texts. `gristmill._wire.steps.check` checks names and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gristmill._wire.values import scalar
from gristmill.errors import InvalidArgumentError

FIELD = "reward_components"


def to_text(components: Any, where: str) -> str:
    """Converts a mapping of names to numbers to text; empty text for None or no names. Ignores names with the value
    None, because Parquet stores all names in every row. Raises InvalidArgumentError for other types."""
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
    """Converts text to components, sorted by name."""
    components: dict[str, float] = json.loads(text) if text else {}
    return components
