"""The stages' names, and how a caller measures them: the pipeline itself has no clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

Stage = Literal["validate", "merge", "advantage", "schedule", "layout", "plan"]
StageTimer = Callable[[Stage], AbstractContextManager[object]]
"""Given a stage's name, what the stage is run within."""


def no_timer(_: Stage) -> AbstractContextManager[object]:
    return nullcontext()
