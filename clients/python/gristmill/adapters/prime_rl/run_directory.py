"""prime-rl's run directory: what its trainer writes there, and the bridge's note of which step is which position."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill._wire.addresses import Position
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

BROADCAST_MARK = "STABLE"
"""In `broadcasts/step_N`: the weights that step N made are complete."""
CHECKPOINT_MARK = "trainer/.metadata"
"""In `checkpoints/step_N`: torch.distributed.checkpoint writes it last."""
LEDGER = "gristmill.json"


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
        """Those that are there now, of steps behind `after`, count no more until they are made again."""
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
    """Those that there are, of the steps after one."""
    return [path for step, path in _in_steps(output_dir / "rollouts", "rank_*.bin") if step > after]


def _in_steps(directory: Path, name: str) -> Iterator[tuple[int, Path]]:
    """The files of a name in the directories `step_N`, each with its step."""
    for path in directory.glob(f"step_*/{name}"):
        step = path.relative_to(directory).parts[0].removeprefix("step_")
        if step.isdigit():
            yield int(step), path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, also after a crash of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Ledger:
    """Which state of the run belongs to which step of prime-rl: that after the step was trained.

    Steps are counted by prime-rl and positions by the run; a batch may have any number of mini-batches, and may fail.
    Kept in a file of the run directory, from the last committed step on.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / LEDGER
        self._states: dict[int, dict[str, Any]] = {}
        if self.path.exists():
            try:
                steps = json.loads(self.path.read_bytes())["steps"]
                self._states = {int(step): dict(state) for step, state in steps.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgumentError(f"{self.path} cannot be read ({error}); {self._remedy}") from None

    @property
    def _remedy(self) -> str:
        return "remove it to train on, with what the run has not committed, after prime-rl's newest checkpoint"

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Says that the run is at `state` after `step`, whatever was before."""
        self._states = {step: dict(state)}
        self._write()

    def record(self, step: int, state: Mapping[str, Any]) -> None:
        self._states[step] = dict(state)
        self._write()

    def forget_before(self, step: int) -> None:
        """Drops what no checkpoint can ask for any more."""
        self._states = {number: state for number, state in self._states.items() if number >= step}
        self._write()

    def of(self, step: int) -> dict[str, Any]:
        """The state after a step that is recorded."""
        return self._states[step]

    def step_at(self, state: Mapping[str, Any]) -> int | None:
        """The last step that the run had trained at a state; None where nothing is recorded.

        Raises FailedPreconditionError for a state of another run, or of before all that is recorded.
        """
        if not self._states:
            return None
        recorded = next(iter(self._states.values()))
        for name in ("run", "run_id"):
            if recorded[name] != state[name]:
                raise FailedPreconditionError(
                    f"{self.path} is of run {recorded['run']!r} ({recorded['run_id']}) and the service's is "
                    f"{state['run']!r} ({state['run_id']}); {self._remedy}"
                )
        before = [step for step, known in self._states.items() if _position(known) <= _position(state)]
        if not before:
            raise FailedPreconditionError(
                f"{self.path} begins behind {_position(state)}, where run {state['run']!r} is; {self._remedy}"
            )
        return max(before)

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"steps": self._states}, indent=1).encode())


def _position(state: Mapping[str, Any]) -> Position:
    return Position(*(state[name] for name in Position._fields))
