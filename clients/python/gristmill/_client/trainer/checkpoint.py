"""A trainer's place in its run, as it is saved in the trainer's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gristmill._wire.addresses import Position
from gristmill.errors import InvalidArgumentError

_VERSION = 2
_KNOWN_VERSIONS = (1, 2)
"""Version 1 does not name the run's identity, which is then not checked."""


class Checkpoint(NamedTuple):
    """run_id, generation: which run the position is of, as `RunStatus` has them; empty and 0 where it is not known."""

    position: Position
    run_id: str = ""
    generation: int = 0

    def state(self, run: str, model: str) -> dict[str, Any]:
        """As plain values."""
        identity = {"run_id": self.run_id, "generation": self.generation}
        return {"version": _VERSION, "run": run, "model": model, **self.position._asdict(), **identity}


def checkpoint_of(state: Mapping[str, Any], run: str, model: str) -> Checkpoint:
    """Raises InvalidArgumentError for a state of another run's name, model or version, or one that is damaged."""
    if state.get("version") not in _KNOWN_VERSIONS:
        known = ", ".join(map(str, _KNOWN_VERSIONS))
        raise InvalidArgumentError(f"state: version is {state.get('version')!r} and this gristmill reads {known}")
    for name, value in {"run": run, "model": model}.items():
        if state.get(name) != value:
            raise InvalidArgumentError(
                f"state: {name} is {state.get(name)!r} and this trainer's is {value!r}; load the state that this "
                "trainer saved"
            )
    run_id, generation = state.get("run_id", ""), state.get("generation", 0)
    if not isinstance(run_id, str) or not isinstance(generation, int):
        raise InvalidArgumentError(
            f"state: run_id is {run_id!r} and generation {generation!r}; give what state_dict returned"
        )
    try:
        position = Position(*(int(state[name]) for name in Position._fields))
    except (KeyError, TypeError, ValueError):
        raise InvalidArgumentError(f"state: no position in {dict(state)!r}; give what state_dict returned") from None
    return Checkpoint(position, run_id, generation)
