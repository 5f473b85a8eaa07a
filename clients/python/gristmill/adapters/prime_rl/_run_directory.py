"""Files in prime-rl's run directory that its trainer writes and reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

BROADCAST_MARK = "STABLE"
"""The file in `broadcasts/step_N` that marks the weights of step N as complete."""
CHECKPOINT_MARK = "trainer/.metadata"
"""The file in `checkpoints/step_N` that torch.distributed.checkpoint writes last."""
LEDGER = "gristmill.json"
"""The bridge's file with the run's position after each step."""


class Steps:
    """The directories `step_N` that are complete, because they contain the file `mark`."""

    def __init__(self, directory: Path, mark: str) -> None:
        self._directory, self._mark = directory, mark
        self._forgotten: dict[int, int] = {}

    def newest(self, up_to: float = math.inf) -> int | None:
        """Return the last complete step; None if there is none."""
        steps = self._written().items()
        return max((step for step, made in steps if step <= up_to and self._forgotten.get(step) != made), default=None)

    def forget(self, after: int = -1) -> None:
        """Ignore existing files of steps later than `after`, until they are written again."""
        self._forgotten |= {step: made for step, made in self._written().items() if step > after}

    def _written(self) -> dict[int, int]:
        """Return when each complete step's file was written, in nanoseconds."""
        written = {}
        for step, path in _in_steps(self._directory, self._mark):
            try:
                written[step] = path.stat().st_mtime_ns
            except FileNotFoundError:
                # The file was removed meanwhile.
                continue
        return written


def rank_file(batch_dir: Path, step: int, rank: int) -> Path:
    """Return the path from which prime-rl's filesystem transport reads a rank's step."""
    return batch_dir / f"step_{step}" / f"rank_{rank}.bin"


def rank_files(batch_dir: Path, after: int) -> list[Path]:
    """Return the existing files of steps later than `after`."""
    return [path for step, path in _in_steps(batch_dir, "rank_*.bin") if step > after]


def _in_steps(directory: Path, name: str) -> Iterator[tuple[int, Path]]:
    """Yield the files that match `name` in the directories `step_N`, each with its step."""
    for path in directory.glob(f"step_*/{name}"):
        step = path.relative_to(directory).parts[0].removeprefix("step_")
        if step.isdigit():
            yield int(step), path
