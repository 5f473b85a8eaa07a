"""What is fuzzed: for each reader valid inputs, how they are changed, and what must hold of what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gristmill.errors import GristmillError

TOO_LONG_S = 1.0


@dataclass(frozen=True)
class Target:
    """seeds: valid inputs. change: one of them, changed. read: takes an input, or refuses it by a GristmillError; any
    other error is a finding, also of what it checks of an input that it takes."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    change: Callable[[Random, bytes], bytes]
    read: Callable[[bytes], object]

    def takes(self, data: bytes) -> bool:
        """Whether the input is taken."""
        try:
            self.read(data)
        except GristmillError as error:
            if error.code == "INTERNAL":
                raise
            return False
        return True


def all_targets() -> dict[str, Target]:
    """By their names."""
    from tests.tools.fuzz import configurations, http_bodies, journals, shards, submissions

    targets = [
        submissions.SUBMISSIONS,
        submissions.DELTAS,
        shards.FRAMES,
        shards.TENSORS,
        shards.WRITES,
        journals.DATABASES,
        journals.EVENTS,
        journals.TABLES,
        configurations.CONFIGURATIONS,
        http_bodies.BODIES,
    ]
    return {target.name: target for target in targets}
