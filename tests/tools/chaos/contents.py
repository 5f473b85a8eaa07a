"""Rows that workers send: a function of the campaign's seed and the row's name, so that restarts send the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tests.tools.chaos.kinds import COLUMNS, PLAIN

SAMPLES = 2
ABORT_REASON = "chaos gave it up"


@dataclass(frozen=True)
class Contents:
    """kind: of run, one of `KINDS`."""

    seed: int
    kind: str = PLAIN

    def _draw(self, *name: object) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def steps(self, uid: str, sample: int) -> int:
        return self._draw(uid, sample).choice((1, 2, 3, 4) if self.kind == COLUMNS else (1, 1, 2, 3))

    def is_aborted(self, uid: str, sample: int) -> bool:
        return self._draw("abort", uid, sample).random() < 0.02

    def is_rewarded_late(self, uid: str, sample: int) -> bool:
        return self._draw("late", uid, sample).random() < 0.2

    def reward(self, uid: str, sample: int, step: int) -> float:
        return round(self._draw("reward", uid, sample, step).random(), 3)

    def rows(self, uid: str, sample: int, attempt: int) -> list[dict[str, Any]]:
        """The rows of one attempt at a trajectory. Mostly each prompt extends what was before; not always."""
        draw, count = self._draw(uid, sample, attempt), self.steps(uid, sample)
        rows: list[dict[str, Any]] = []
        sequences: list[list[int]] = []
        # The samples of a prompt share it, whatever the attempt.
        context = self._tokens(self._draw("prompt", uid), 16, 24)
        for step in range(count):
            response = self._tokens(draw, 1, 12)
            late = step == count - 1 and self.is_rewarded_late(uid, sample)
            rows.append(
                {
                    "uid": uid,
                    "sample": sample,
                    "step": step,
                    "is_last_step": step == count - 1,
                    "attempt": attempt,
                    "prompt_token_ids": context,
                    "response_ids": response,
                    "loss_mask": [1] * len(response),
                    "reward": None if late else self.reward(uid, sample, step),
                    "policy_version": 0,
                }
            )
            if self.kind == COLUMNS:
                rows[-1] |= self._columns(rows[-1])
            sequences.append(context + response)
            before = sequences[-1] if draw.random() < 0.8 else self._tokens(draw, 3, 9)
            if self.kind == COLUMNS and draw.random() < 0.5:
                before = draw.choice(sequences)
            context = before + self._tokens(draw, 1, 4)
        return rows

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Each value encodes the attempt, the step and its own place in it."""
        step, attempt = row["step"], row["attempt"]
        tokens = [*row["prompt_token_ids"], *row["response_ids"]]
        images = [[step, attempt % 256, number] for number in range(step % 3)]
        return {
            "experts": [[attempt * 16 + step, token % 30_000] for token in tokens],
            "teacher": [-(attempt * 8 + step + index / 16) for index in range(len(row["response_ids"]))],
            "calls": 1 + 10 * step + attempt,
        } | ({"images": images} if images else {})

    def _tokens(self, draw: random.Random, least: int, most: int) -> list[int]:
        return [draw.randrange(1, 50_000) for _ in range(draw.randint(least, most))]


def digest(values: object) -> str:
    """Distinguishes plain values, such as the tokens of a row, from any others."""
    return sha256(repr(values).encode()).hexdigest()[:16]
