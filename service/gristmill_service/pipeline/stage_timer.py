"""A stage timer measures the pipeline's stages for its caller: the pipeline itself has no clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

Stage = Literal["validate", "merge", "advantage", "schedule", "layout", "plan"]
StageTimer = Callable[[Stage], AbstractContextManager[object]]
"""Given a stage's name, returns the context that the stage runs within."""


def no_timer(_: Stage) -> AbstractContextManager[object]:
    return nullcontext()
