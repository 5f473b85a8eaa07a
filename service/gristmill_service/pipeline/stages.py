"""The stages of building a batch, and how their times are measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

Stage = Literal["validate", "merge", "advantage", "schedule", "layout", "plan"]
StageTimer = Callable[[Stage], AbstractContextManager[object]]
"""A function of a stage's name. Returns the context in which to run the stage."""


def no_timer(_: Stage) -> AbstractContextManager[object]:
    return nullcontext()
