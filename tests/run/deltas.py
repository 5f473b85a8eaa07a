"""Rows as clients send them: without the tokens that they share with the step before."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.columns import Array, Ragged
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import PrefixUnknownError
from gristmill_service.pipeline.rows.joins import common_prefix
from gristmill_service.run.machine.answers import Outcome, Taken
from tests.on_loop import Run

StepName = tuple[TrajectoryKey, int, int]


class Sender:
    """Remembers every step that it sent. A row that the run refuses without its first tokens is sent whole."""

    least_tokens = 16
    """A shorter prefix is sent."""

    def __init__(self) -> None:
        self._sent: dict[StepName, Array] = {}

    def submit(self, run: Run, steps: Steps) -> list[Outcome]:
        try:
            taken: Taken = run.submit(*self.shortened(steps))
        except PrefixUnknownError:
            taken = run.submit(steps)
        return taken.outcomes

    def shortened(self, steps: Steps) -> tuple[Steps, Prefixes | None]:
        lengths = [self._shared(steps, row) for row in range(len(steps))]
        return shortened(steps, lengths) if any(lengths) else (steps, None)

    def _shared(self, steps: Steps, row: int) -> int:
        key, attempt, step = steps.key(row), int(steps.attempts[row]), int(steps.steps[row])
        before = self._sent.get((key, attempt, step - 1))
        self._sent[key, attempt, step] = tokens = steps.tokens[row]
        shared = 0 if before is None else common_prefix(before, tokens[: int(steps.prompt_lengths[row])])
        return shared if shared >= self.least_tokens else 0


def shortened(steps: Steps, lengths: list[int]) -> tuple[Steps, Prefixes]:
    """The rows without that many of their first tokens."""
    tokens = steps.tokens.arrays()
    checksums = [zlib.crc32(one[:length].tobytes()) for one, length in zip(tokens, lengths, strict=True)]
    prefixes = Prefixes(np.array(lengths, np.int64), np.array(checksums, np.uint32))
    rest = Ragged.from_arrays([one[length:] for one, length in zip(tokens, lengths, strict=True)], np.int32)
    return replace(steps, tokens=rest, prefix_lengths=prefixes.lengths), prefixes
