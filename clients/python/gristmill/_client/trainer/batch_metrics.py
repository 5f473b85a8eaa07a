"""A batch's figures as experiment trackers take them: numbers by name, in one flat dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "gristmill/"


def batch_metrics(plan: Mapping[str, Any], waited_s: float, prefix: str) -> dict[str, float]:
    """plan: of the batch. waited_s: for how many seconds the trainer waited for it."""
    whole = {name: plan[name] for name in ("batch", "prompts", "rows_received", "rows", "optimizer_steps")}
    counts = {f"counts/{name}": count for name, count in plan["counts"].items()}
    tags = {
        f"tags/{tag or 'none'}/{name}": figure
        for tag, figures in plan["tag_metrics"].items()
        for name, figure in figures.items()
    }
    found = {**whole, "waited_s": waited_s, **plan["metrics"], **counts, **tags}
    return {f"{prefix}{name}": value for name, value in found.items()}
