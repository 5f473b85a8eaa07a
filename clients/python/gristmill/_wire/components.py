"""Components of rewards: numbers by name, which a trajectory's last step has. In tables they are JSON text, with the
names in order, so that equal components have equal texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gristmill._wire.steps import FLOAT32_MAX, check_length, check_text
from gristmill._wire.values import scalar
from gristmill.errors import InvalidArgumentError

FIELD = "reward_components"
MOST_COMPONENTS = 64
LONGEST_NAME = 100


def to_text(components: Any, where: str) -> str:
    """Returns the text of a mapping of names to numbers; empty for None and for no names. Names whose value is None do
    not count, because Parquet has all names in every row. Raises InvalidArgumentError naming the component."""
    if components is None:
        return ""
    if not isinstance(components, Mapping):
        raise InvalidArgumentError(f"{where}: {FIELD} is {components!r:.80}; send a mapping of names to numbers")
    numbers: dict[str, float] = {}
    for name, value in components.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"{where}: {FIELD} has the name {name!r:.80}; name each component by a string")
        check_length(name, LONGEST_NAME, f"{where}: {FIELD}: the name {name[:20]!r}...", "shorten it")
        check_text(name, f"{where}: {FIELD}")
        if value is None:
            continue
        number = numbers[name] = scalar(value, f"{FIELD}.{name}", float, where)
        if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
            raise InvalidArgumentError(f"{where}: {FIELD}.{name} is {number}; it must be finite in float32")
    if len(numbers) > MOST_COMPONENTS:
        raise InvalidArgumentError(
            f"{where}: {FIELD} has {len(numbers)} names, and the limit is {MOST_COMPONENTS}; send fewer"
        )
    return json.dumps(numbers, sort_keys=True) if numbers else ""


def from_text(text: str) -> dict[str, float]:
    """Returns the components of a text, in the order of their names."""
    components: dict[str, float] = json.loads(text) if text else {}
    return components
