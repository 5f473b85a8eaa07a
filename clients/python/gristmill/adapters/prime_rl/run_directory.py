"""prime-rl's run directory: what its trainer writes there, and where it looks for steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

BROADCAST_MARK = "STABLE"
"""In `broadcasts/step_N`: the weights that step N made are complete."""
CHECKPOINT_MARK = "trainer/.metadata"
"""In `checkpoints/step_N`: torch.distributed.checkpoint writes it last."""
LEDGER = "gristmill.json"
"""The bridge's own: which step is which position of the run."""


class Steps:
    """Directories `step_N` that are complete: those in which a file stands."""

    def __init__(self, directory: Path, mark: str) -> None:
        self._directory, self._mark = directory, mark
        self._forgotten: dict[int, int] = {}

    def newest(self, up_to: float = math.inf) -> int | None:
        """The last complete step, None where there is none."""
        found = self._found().items()
        return max((step for step, made in found if step <= up_to and self._forgotten.get(step) != made), default=None)

    def forget(self, after: int = -1) -> None:
        """Leaves out the files of steps behind `after` that are there now, until they are made again."""
        self._forgotten |= {step: made for step, made in self._found().items() if step > after}

    def _found(self) -> dict[int, int]:
        """When each complete step's file was written, in nanoseconds."""
        found = {}
        for step, path in _in_steps(self._directory, self._mark):
            try:
                found[step] = path.stat().st_mtime_ns
            except FileNotFoundError:
                # Removed since.
                continue
        return found


def rank_file(output_dir: Path, step: int, rank: int) -> Path:
    """Where prime-rl's filesystem transport looks for a rank's step."""
    return output_dir / "rollouts" / f"step_{step}" / f"rank_{rank}.bin"


def rank_files(output_dir: Path, after: int) -> list[Path]:
    """The files that there are of the steps after one."""
    return [path for step, path in _in_steps(output_dir / "rollouts", "rank_*.bin") if step > after]


def _in_steps(directory: Path, name: str) -> Iterator[tuple[int, Path]]:
    """The files of a name in the directories `step_N`, each with its step."""
    for path in directory.glob(f"step_*/{name}"):
        step = path.relative_to(directory).parts[0].removeprefix("step_")
        if step.isdigit():
            yield int(step), path
