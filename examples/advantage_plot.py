"""A plot of the advantage of each trajectory of a run against its length: are long answers favored?

    gristmill serve &
    pip install matplotlib
    python examples/agents_asyncio.py
    python examples/advantage_plot.py agents-example      # writes advantages.png

`TrainerClient.table` has the numbers, for every batch that is published, and for freed ones while the service keeps
them. Nothing of the run changes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gristmill import RolloutClient, TrainerClient
from gristmill.errors import NotFoundError

Table = dict[str, Any]


def tables(address: str, run: str) -> dict[int, Table]:
    """Return the tables of all batches that the service has."""
    with RolloutClient(address, run) as client:
        sealed = client.status().batches_sealed
    present = {}
    with TrainerClient(address, run, rank=0) as trainer:
        for batch in range(sealed):
            try:
                present[batch] = trainer.table(batch)
            except NotFoundError as error:
                print(error, file=sys.stderr)
    return present


def plot(batches: dict[int, Table], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.subplots()
    for number, table in batches.items():
        # A trajectory may have several rows, and each has the trajectory's numbers.
        _, first = np.unique(table["trajectory"], return_index=True)
        lengths, advantages = table["response_tokens"][first], table["advantage"][first]
        axes.scatter(lengths, advantages, s=12, alpha=0.6, label=f"batch {number}")
        if np.ptp(lengths) and np.ptp(advantages):
            print(f"batch {number}: correlation {np.corrcoef(lengths, advantages)[0, 1]:+.2f}")
    axes.axhline(0, color="grey", linewidth=1)
    axes.set_xlabel("response tokens")
    axes.set_ylabel("advantage")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="the run's name")
    parser.add_argument("--address", default="127.0.0.1:50051", help="of gristmill serve (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("advantages.png"), help="(default: %(default)s)")
    given = parser.parse_args()
    batches = tables(given.address, given.run)
    if not batches:
        sys.exit(f"run {given.run!r} has no batch whose table the service has")
    plot(batches, given.out)
    trajectories = sum(len(np.unique(table["trajectory"])) for table in batches.values())
    print(f"{trajectories} trajectories of {len(batches)} batches in {given.out}")


if __name__ == "__main__":
    main()
