"""Gives targets changed inputs, and keeps what is found."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.tools.fuzz.targets import TOO_LONG_S, Target

CORPUS = Path(__file__).parent / "corpus"


@dataclass
class Outcome:
    """findings: what went wrong, by the place in the code where it did, with the first input that did it."""

    target: str
    inputs: int = 0
    taken: int = 0
    longest_s: float = 0.0
    findings: dict[str, bytes] = field(default_factory=dict)


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """Changed inputs without end, the same for the same seed. Some are changed again."""
    random, seeds = Random(f"{target.name} {seed}"), target.seeds()
    while True:
        changed = target.change(random, random.choice(seeds))
        if random.random() < 0.2:
            try:
                changed = target.change(random, changed)
            except Exception:  # noqa: BLE001 - what is broken already may have no structure to change
                continue
        yield changed


def run(target: Target, seed: int, *, count: int | None = None, seconds: float | None = None) -> Outcome:
    """Until that many inputs were given, or that many seconds are over."""
    outcome, end = Outcome(target.name), None if seconds is None else time.monotonic() + seconds
    for data in inputs(target, seed):
        if (count is not None and outcome.inputs >= count) or (end is not None and time.monotonic() >= end):
            return outcome
        outcome.inputs += 1
        # Not by the clock on the wall: the machine may be busy with something else.
        begin = time.process_time()
        try:
            outcome.taken += target.takes(data)
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            outcome.findings.setdefault(_place(error), data)
        spent = time.process_time() - begin
        outcome.longest_s = max(outcome.longest_s, spent)
        if spent > TOO_LONG_S:
            outcome.findings.setdefault(f"took {spent:.1f} s", data)
    raise AssertionError("inputs have no end")


def known(target: Target) -> list[Path]:
    """What was found once."""
    return sorted((CORPUS / target.name).glob("*.bin"))


def keep(outcome: Outcome) -> None:
    """Writes what was found to the corpus, which the tests go through."""
    for data in outcome.findings.values():
        directory = CORPUS / outcome.target
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{hashlib.sha256(data).hexdigest()[:12]}.bin").write_bytes(data)


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
