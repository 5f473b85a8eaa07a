"""Functions for the rows of all frameworks: numbers samples and steps, adds tags, and finds the response's start."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gristmill._converters.keys import Row
from gristmill._converters.values import aligned
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError


def samples_as_they_come(uids: Iterable[str]) -> list[int]:
    """Return each row's number among the rows of its prompt, in their order. Each row must be a trajectory."""
    seen = Counter[str]()
    samples = []
    for uid in uids:
        samples.append(seen[uid])
        seen[uid] += 1
    return samples


def tagged(tags: Sequence[str | None] | None, count: int, what: str) -> list[Row]:
    """Return the `tag` field of each row; an empty mapping for a row without a tag."""
    if tags is None:
        return [{} for _ in range(count)]
    if isinstance(tags, str):
        raise InvalidArgumentError(f"{what}: tags is the string {tags!r}; pass a list with one tag per entry")
    fields: list[Row] = []
    for index, tag in enumerate(aligned("tags", tags, count, what)):
        if tag is not None and not isinstance(tag, (str, np.str_)):
            raise InvalidArgumentError(f"{what}: tags[{index}] is {tag!r}; expected the name of an environment or task")
        fields.append({"tag": str(tag)} if tag else {})
    return fields


def as_steps(rows: list[Row]) -> list[Row]:
    """Number the rows of each trajectory as its steps, in their order. Changes the rows in place.

    Each row must have the trajectory's reward. Only the last row keeps it, so that it counts once. Raises
    InvalidArgumentError if the rewards of a trajectory's rows differ.
    """
    trajectories: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        trajectories[row["uid"], row["sample"]].append(row)
    for (uid, sample), steps in trajectories.items():
        if len(steps) > 1 and len(rewards := {_total(row["reward"]) for row in steps}) > 1:
            raise InvalidArgumentError(
                f"uid {uid!r} sample {sample}: its {len(steps)} rows have the rewards {', '.join(map(str, rewards))}; "
                "set the trajectory's reward in each row"
            )
        for step, row in enumerate(steps):
            row |= {"step": step, "is_last_step": step == len(steps) - 1}
        for row in steps[:-1]:
            row["reward"] = np.zeros_like(row["reward"]) if np.ndim(row["reward"]) else 0.0
    return rows


def _total(reward: Any) -> float | None:
    return None if reward is None else float(np.sum(reward))


def response_start(mask: Array, where: str) -> int:
    """Return the index of a row's first trained token. The prompt is everything before it."""
    if not mask.any():
        raise InvalidArgumentError(f"{where}: the mask trains no token; omit the row")
    start = int(mask.argmax())
    if not start:
        raise InvalidArgumentError(f"{where}: the mask trains the first token, so there is no prompt; add a prompt")
    return start
