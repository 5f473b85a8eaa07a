"""The figures that benchmarks measure: each next to its bound from the same run, and what it is to reach."""

from __future__ import annotations

import json
import operator
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

OUTPUT = Path("build/bench.json")
_SAME = {"calls/s": "turns/s"}
"""Units that count the same: a turn is a call."""


@dataclass(frozen=True)
class Figure:
    """`value` in `unit`; `bound` in `bound_unit` is what the machine allows, measured in the same run, where there is
    one; `ok` when the value reaches `reach` (at most, or at least). Without a reach it is for planning only."""

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

    @property
    def is_ratio(self) -> bool:
        """The value is a multiple already, as in `x bound`, not seconds or bytes."""
        return self.unit.split()[:1] == ["x"] or " / " in self.unit

    @property
    def ours(self) -> tuple[float, str]:
        """Our side's value and its unit: that of the bound, where the value is a ratio to it."""
        if self.is_ratio and self.bound is not None:
            return self.value * self.bound, _bare(self.bound_unit)
        return self.value, self.unit

    @property
    def ratio(self) -> float | None:
        """Ours over the bound; nothing where the figure next to the value is no bound but says what it was measured of,
        such as a shard's MiB."""
        if self.is_ratio:
            return self.value
        if not self.bound or _SAME.get(_bare(self.bound_unit), _bare(self.bound_unit)) != self.unit:
            return None
        return self.value / self.bound

    @property
    def within(self) -> float | None:
        """The value relative to its reach, 1 or less when it is reached, whichever way is better."""
        if self.reach is None:
            return None
        if self.reach == 0:
            return 1.0 + self.value
        return self.value / self.reach if self.at_most else self.reach / self.value

    def entry(self, source: str) -> dict[str, Any]:
        ours, ours_unit = self.ours
        more = {"ours": ours, "ours_unit": ours_unit, "ratio": self.ratio, "ok": self.ok, "source": source}
        return {**asdict(self), **more}


def read() -> dict[str, dict[str, Any]]:
    """The entries that were written, by name."""
    if not OUTPUT.exists():
        return {}
    figures: dict[str, dict[str, Any]] = json.loads(OUTPUT.read_text())["figures"]
    return figures


def parse(entries: dict[str, dict[str, Any]]) -> list[Figure]:
    fields = ("value", "unit", "reach", "bound", "bound_unit")
    return [
        Figure(name, **{field: entry[field] for field in fields}, at_most=entry.get("at_most", True))
        for name, entry in entries.items()
    ]


def merge(source: str, figures: list[Figure]) -> None:
    """Writes what a source measured in place of what it measured before; other sources' figures stay."""
    others = {name: entry for name, entry in read().items() if entry.get("source") != source}
    write(others | {figure.name: figure.entry(source) for figure in figures})


def write(entries: dict[str, dict[str, Any]]) -> None:
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps({"figures": entries}, indent=2) + "\n")


def _bare(unit: str) -> str:
    """The unit without what is said of it: `ms` of `ms, bare gRPC`."""
    return unit.replace(",", " ").split(" ")[0]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def p99(times: Iterable[float]) -> float:
    return float(np.quantile(list(times), 0.99))


def report(source: str, figures: Iterable[Figure]) -> int:
    """Measures, writes and prints the figures of a source that is run by itself, and gives the exit code."""
    measured = list(figures)
    merge(source, measured)
    for figure in measured:
        print(f"{figure.name}: {figure.value:.3f} {figure.unit} of {figure.bound:.2f}, to reach {figure.reach}")
    return 0 if all(figure.ok for figure in measured) else 1


def paired(ours: Callable[[], object], bound: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median ratio ours / bound over interleaved rounds, so that the machine's drift cancels, and the median bound in
    seconds. One round warms up and is not counted."""
    ours()
    bound()
    pairs = [(seconds(ours), seconds(bound)) for _ in range(rounds)]
    return statistics.median(mine / limit for mine, limit in pairs), statistics.median(limit for _, limit in pairs)
