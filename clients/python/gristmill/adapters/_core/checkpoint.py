"""A run's position in a trainer's checkpoints: a file in each, or one file of all where checkpoints take no file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from gristmill import Position
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

STATE_FILE = "gristmill.json"

State = Mapping[str, Any]
"""The result of `TrainerClient.state_dict`."""
States = Mapping[str, State]
"""A state for each model."""
OpenFile = Callable[[str, str], IO[Any]]
"""Opens a path in a mode, as `open` does: a trainer's checkpoints may be in an object store."""


def write_states(folder: str | Path, states: States, open_file: OpenFile = open) -> None:
    """Write the file into a checkpoint's folder, which exists."""
    with open_file(os.path.join(folder, STATE_FILE), "w") as file:
        file.write(json.dumps(states) + "\n")


def read_states(folder: str | Path, open_file: OpenFile = open) -> States:
    """Read a checkpoint's file. Raises InvalidArgumentError for one that is missing or damaged."""
    path = os.path.join(folder, STATE_FILE)
    try:
        with open_file(path, "r") as file:
            states = json.loads(file.read())
        if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
            raise ValueError("it does not have a state for each model")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path}: cannot read the position in the run: {error}; resume from a checkpoint that this trainer wrote "
            "completely, or start again with another run"
        ) from None
    return states


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that exists either completely or not at all, also after the machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Ledger:
    """The run's state after each step of a trainer whose checkpoints take no file, from the last committed step on.

    The trainer counts steps and the run counts positions: a batch may have any number of mini-batches, or fail.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._states: dict[int, State] = {}
        if path.exists():
            try:
                steps = json.loads(path.read_bytes())["steps"]
                self._states = {int(step): dict(state) for step, state in steps.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgumentError(f"{path}: cannot read it: {error}; {self._remedy}") from None

    @property
    def _remedy(self) -> str:
        return "remove it to continue from the trainer's checkpoint with the batches that the run has not committed"

    def start(self, step: int, state: State) -> None:
        """Forget everything before, and record the state after a step."""
        self._states = {}
        self.record(step, state)

    def record(self, step: int, state: State) -> None:
        self._states[step] = dict(state)
        self._write()

    def forget_before(self, step: int) -> None:
        """Drop the states that no checkpoint needs any more."""
        self._states = {number: state for number, state in self._states.items() if number >= step}
        self._write()

    def state_after(self, step: int) -> State:
        """Return the state after a recorded step."""
        return self._states[step]

    def step_at(self, state: State) -> int | None:
        """Return the last step that was trained at a state; None if nothing is recorded.

        Raises FailedPreconditionError for a state of another run, or one before all that is recorded.
        """
        if not self._states:
            return None
        recorded = next(iter(self._states.values()))
        if any(recorded[name] != state[name] for name in ("run", "run_id")):
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
        write_atomically(self.path, json.dumps({"steps": self._states}, indent=1).encode())


def _position(state: State) -> Position:
    return Position(*(state[name] for name in Position._fields))
