"""The plan of a batch, as trainers are given it."""

from __future__ import annotations

from typing import Any


class Plan(dict[str, Any]):
    """The mapping that `gristmill plan` prints, which shows itself in one line."""

    def __repr__(self) -> str:
        sizes = f"{_some(self['prompts'], 'prompt')}, {_some(self['rows'], 'row')}"
        steps = f"{_some(self['optimizer_steps'], 'optimizer step')} on {_some(self['dp_size'], 'rank')}"
        padding = self["metrics"].get("padding_share", 0.0)
        return f"<Plan of batch {self['batch']}: {sizes}, {steps}, {padding:.1%} padding; keys {', '.join(self)}>"


def _some(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
