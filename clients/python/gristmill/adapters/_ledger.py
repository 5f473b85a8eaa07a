"""Which state of a run belongs to which step of a trainer, where the trainer's checkpoints cannot carry it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill._wire.addresses import Position
from gristmill.errors import FailedPreconditionError, InvalidArgumentError


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
    """States of a run by the trainer's step: each is that after the step was trained.

    Steps are counted by the trainer and positions by the run: a batch may have any number of mini-batches, or fail.
    Kept in a file, from the last committed step on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._states: dict[int, dict[str, Any]] = {}
        if self.path.exists():
            try:
                steps = json.loads(self.path.read_bytes())["steps"]
                self._states = {int(step): dict(state) for step, state in steps.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgumentError(f"{self.path} cannot be read ({error}); {self._remedy}") from None

    @property
    def _remedy(self) -> str:
        return "remove it to go on after the trainer's checkpoint with the batches that the run has not committed"

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Says that the run is at `state` after `step`, whatever was before."""
        self._states = {}
        self.record(step, state)

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
                f"{self.path} begins after {_position(state)}, where run {state['run']!r} is; {self._remedy}"
            )
        return max(before)

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"steps": self._states}, indent=1).encode())


def _position(state: Mapping[str, Any]) -> Position:
    return Position(*(state[name] for name in Position._fields))
