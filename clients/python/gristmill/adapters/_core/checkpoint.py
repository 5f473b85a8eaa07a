"""Stores a run's position in each checkpoint of a trainer, or in one file if checkpoints cannot contain files."""

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
"""Opens a path in a mode, like `open`. A trainer's checkpoints may be in an object store."""


def write_states(folder: str | Path, states: States, open_file: OpenFile = open) -> None:
    """Write the states to a file in a checkpoint's folder, which must exist."""
    with open_file(os.path.join(folder, STATE_FILE), "w") as file:
        file.write(json.dumps(states) + "\n")


def read_states(folder: str | Path, open_file: OpenFile = open) -> States:
    """Read the states from a checkpoint's folder. Raises InvalidArgumentError if the file is missing or damaged."""
    path = os.path.join(folder, STATE_FILE)
    try:
        with open_file(path, "r") as file:
            states = json.loads(file.read())
        if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
            raise ValueError("the file does not contain a state for each model")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path}: cannot read the position in the run: {error}; resume from a complete checkpoint of this trainer, "
            "or start again with another run"
        ) from None
    return states


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: even after a crash of the machine, it is either complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Ledger:
    """A file with the run's state after each step since the last committed one, if checkpoints cannot contain files.

    It maps the trainer's steps to positions in the run, because a batch may have any number of mini-batches, or fail.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._states: dict[int, State] = {}
        if path.exists():
            try:
                steps = json.loads(path.read_bytes())["steps"]
                self._states = {int(step): dict(state) for step, state in steps.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgumentError(f"{path}: cannot read the file: {error}; {self._remedy}") from None

    @property
    def _remedy(self) -> str:
        return "remove the file to continue from the trainer's checkpoint with the run's uncommitted batches"

    def start(self, step: int, state: State) -> None:
        """Forget all recorded states, and record the state after a step."""
        self._states = {}
        self.record(step, state)

    def record(self, step: int, state: State) -> None:
        self._states[step] = dict(state)
        self._write()

    def forget_before(self, step: int) -> None:
        """Drop the states before a step, because checkpoints no longer need them."""
        self._states = {number: state for number, state in self._states.items() if number >= step}
        self._write()

    def state_after(self, step: int) -> State:
        """Return the state after a recorded step."""
        return self._states[step]

    def step_at(self, state: State) -> int | None:
        """Return the last step that was trained at a state; None if no step is recorded.

        Raises FailedPreconditionError if the state is of another run, or before all recorded states.
        """
        if not self._states:
            return None
        recorded = next(iter(self._states.values()))
        if any(recorded[name] != state[name] for name in ("run", "run_id")):
            raise FailedPreconditionError(
                f"{self.path} is of run {recorded['run']!r} ({recorded['run_id']}), but the service's run is "
                f"{state['run']!r} ({state['run_id']}); {self._remedy}"
            )
        before = [step for step, known in self._states.items() if _position(known) <= _position(state)]
        if not before:
            raise FailedPreconditionError(
                f"{self.path} begins after {_position(state)}, the position of run {state['run']!r}; {self._remedy}"
            )
        return max(before)

    def _write(self) -> None:
        write_atomically(self.path, json.dumps({"steps": self._states}, indent=1).encode())


def _position(state: State) -> Position:
    return Position(*(state[name] for name in Position._fields))
