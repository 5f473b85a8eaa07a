"""What the benchmarks measure: each figure beside its bound from the same run, and what it is to reach."""

from __future__ import annotations

import json
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

OUTPUT = Path("build/bench.json")


@dataclass(frozen=True)
class Figure:
    """`value` in `unit`; `bound` in `bound_unit` is what the machine allows, measured in the same run, where there is
    one; `ok` when the value reaches `reach` (at most, or at least). Without a reach it is told for planning only."""

    name: str
    value: float
    unit: str
    reach: float | None
    bound: float | None = None
    bound_unit: str = ""
    at_most: bool = True

    @property
    def ok(self) -> bool:
        return self.reach is None or (operator.le if self.at_most else operator.ge)(self.value, self.reach)


def write(figures: list[Figure]) -> None:
    OUTPUT.parent.mkdir(exist_ok=True)
    document = {}
    for figure in figures:
        entry = {key: value for key, value in asdict(figure).items() if key not in ("name", "at_most")}
        document[figure.name] = {**entry, "ok": figure.ok}
    OUTPUT.write_text(json.dumps({"figures": document}, indent=2) + "\n")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(ours: Callable[[], object], bound: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median ratio ours / bound over interleaved rounds, so that the machine's drift cancels, and the median bound in
    seconds. One round warms up and is not counted."""
    ours()
    bound()
    pairs = [(seconds(ours), seconds(bound)) for _ in range(rounds)]
    return statistics.median(mine / limit for mine, limit in pairs), statistics.median(limit for _, limit in pairs)
