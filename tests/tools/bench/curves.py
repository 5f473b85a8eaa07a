"""Measures how time grows: that of the pipeline, arrays in to shards in shared memory, over rows, over tokens of a row,
over ranks; and that of submission, arrays to the last answer, over rows and over producers.

Each curve of the pipeline is a list of (x, seconds), the least of a few passes; linear in rows and tokens, flat in
ranks but for what a shard costs. `python -m tests.tools.bench.curves` prints and draws them (build/curves.{json,svg}).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gristmill._wire.steps import check
from gristmill_service.pipeline import build_batch
from gristmill_service.storage.shard_files import write_shards
from tests.tools.bench import formats, plot, producers
from tests.tools.bench.figures import seconds
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.producers import Curve
from tests.tools.bench.workloads import DP_SIZE, Workload, uniform

MEASURED, OUTPUT = Path("build/curves.json"), Path("build/curves.svg")
ROWS = tuple(1024 << step for step in range(7))
LENGTHS = tuple(64 << step for step in range(11))
RANKS = tuple(1 << step for step in range(7))
SHORT = 256
_ROUNDS = 5


def over_rows(merge: str = "none") -> Curve:
    """1k to 64k rows of 256 tokens."""
    return [(rows, _least(uniform(rows, SHORT), merge)) for rows in ROWS]


def over_tokens(merge: str = "none") -> Curve:
    """128 rows of 64 to 64k tokens; x is the tokens of a row."""
    return [(length, _least(uniform(128, length), merge)) for length in LENGTHS]


def over_ranks(merge: str = "none") -> Curve:
    """The same 4k rows of 256 tokens for 1 to 64 data-parallel ranks, so that there are 4 to 256 shards."""
    work = uniform(4096, SHORT)
    return [(dp_size, _least(work, merge, dp_size)) for dp_size in RANKS]


def _least(work: Workload, merge: str, dp_size: int = DP_SIZE) -> float:
    """Seconds of one pass, removal of what it wrote not included."""
    config = work.config(merge, dp_size)
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        target = Path(directory) / "batch"

        def once() -> None:
            batch = build_batch(check(work.steps), config, run="bench", batch=0)
            target.mkdir()
            write_shards(target, batch.shards)

        def timed() -> float:
            try:
                return seconds(once)
            finally:
                shutil.rmtree(target, ignore_errors=True)

        return min(timed() for _ in range(_ROUNDS))


@dataclass(frozen=True)
class Cost:
    """Milliseconds over x, with the straight line that fits best."""

    title: str
    over: str
    one: str
    curve: Callable[[], Curve]


COSTS = {
    "pipeline.rows": Cost("Pipeline over rows of 256 tokens", "rows", "row", over_rows),
    "pipeline.tokens": Cost("Pipeline over the length of 128 rows", "tokens of each row", "token of each", over_tokens),
    "pipeline.ranks": Cost("Pipeline over ranks, 4 shards each", "data-parallel ranks", "rank", over_ranks),
    "submit.rows": Cost("Submission over rows of 256 tokens", "rows", "row", producers.over_rows),
}
RATES = {f"submit.producers.{kind}": kind for kind in producers.KINDS}


def main() -> None:
    """Measures and draws; with the argument `draw` it draws what was measured before."""
    if sys.argv[1:] != ["draw"]:
        curves = {name: cost.curve() for name, cost in COSTS.items()}
        curves |= {name: producers.over_producers(kind) for name, kind in RATES.items()}
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(json.dumps(curves, indent=2) + "\n")
    draw(json.loads(MEASURED.read_text()))
    print(f"written to {MEASURED} and {OUTPUT}")


def draw(curves: dict[str, Curve]) -> None:
    with rc_context(plot.STYLE):
        picture = Picture(figsize=(10, 5.6), layout="constrained")
        places = picture.subplots(2, 3)
        for axes, (name, cost) in zip(places.flat, COSTS.items(), strict=False):
            _draw_cost(axes, cost, curves[name])
        _draw_rates(places[1, 1], places[1, 2], curves)
    plot.save(picture, OUTPUT)


def fitted(curve: Curve) -> tuple[float, float]:
    """Milliseconds for nothing, and more for each x. The relative errors are least, so that small x count too."""
    x, milliseconds = _arrays(curve)
    slope, start = np.polyfit(x, milliseconds, 1, w=1 / milliseconds)
    return float(start), float(slope)


def _arrays(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    return np.array([at for at, _ in curve]), np.array([1e3 * value for _, value in curve])


def _draw_cost(axes: Axes, cost: Cost, curve: Curve) -> None:
    x, milliseconds = _arrays(curve)
    start, slope = fitted(curve)
    label = f"{formats.number(start)} ms + {formats.number(1e3 * slope)} µs a {cost.one}"
    axes.plot(x, start + slope * x, color="grey", linestyle="--", linewidth=1, label=label)
    axes.plot(x, milliseconds, color=plot.OK, marker="o", markersize=4, linestyle="none")
    axes.set_ylabel("ms")
    _frame(axes, cost.title, cost.over)
    for at, value in zip(x.tolist(), milliseconds.tolist(), strict=True):
        print(f"{cost.title:40} {at:8,} {value:10.2f} ms")
    print(f"{cost.title:40} {label}")


def _draw_rates(rate: Axes, volume: Axes, curves: dict[str, Curve]) -> None:
    """Rows per second of all producers, and their MB per second."""
    for name, kind in RATES.items():
        size = producers.row_bytes(kind) / 1e6
        _draw_rate(rate, kind, curves[name])
        _draw_rate(volume, kind, [(count, rows_s * size) for count, rows_s in curves[name]])
        for count, rows_s in curves[name]:
            told_of = f"{rows_s:10,.0f} rows/s {rows_s * size:8.0f} MB/s"
            print(f"{'Submission over producers, ' + kind:40} {count:8} {told_of}")
    for axes, unit in ((rate, "rows/s"), (volume, "MB/s of tokens and logprobs")):
        axes.set_ylabel(unit)
        axes.set_xscale("log", base=2)
        _frame(axes, "Submission over producers, all together", "client processes")


def _draw_rate(axes: Axes, kind: str, curve: Curve) -> None:
    rows, (least, most) = producers.KINDS[kind]
    label = f"{rows:,} rows each of {least:,} to {most:,} tokens"
    marker, color = ("o", plot.OK) if kind == "long" else ("s", plot.MISSED)
    axes.plot(*zip(*curve, strict=True), color=color, marker=marker, markersize=4, linewidth=1, label=label)


def _frame(axes: Axes, title: str, over: str) -> None:
    """Both axes from nothing, with room for the legend above what was drawn."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(over)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(4))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=7, loc="upper left", framealpha=0.8)


if __name__ == "__main__":
    main()
