"""Plans the batches of a run again, offline, for other trainers: more ranks, another layout, balanced loads.

    gristmill serve &
    python examples/agents_asyncio.py                     # a run whose batches wait for a trainer
    python examples/replan.py agents-example

It exports each batch that the service still stores, as `gristmill export` does, and plans it under other settings, as
`gristmill plan` does. Nothing of the run changes. A batch can be exported until it is freed; keep the files
(`--directory`) to plan it again when the run is finished, or to make its shards with `gristmill batch`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from gristmill import RolloutClient

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"dp_size": 4},
    {"dp_size": 4, "balance": "tokens"},
    {"merge": "none"},
    {"layout": "prefix_tree"},
)


def export(address: str, run: str, directory: Path) -> Path | None:
    """Write one file of the rows of all batches that are sealed and not freed, and run.yaml next to it."""
    with RolloutClient(address, run) as client:
        status = client.status()
    parts = []
    for batch in range(status.batches_freed, status.batches_sealed):
        parts.append(directory / f"batch-{batch}.jsonl.gz")
        command = ["gristmill", "export", run, str(batch), "--out", str(parts[-1]), "--address", address]
        subprocess.run([*command, "--config", str(directory / "run.yaml")], check=True)
    if not parts:
        return None
    whole = directory / "rollouts.jsonl.gz"
    # Concatenated gzip files are a gzip file.
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    return whole


def plans(file: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Plan each batch of the file under these settings."""
    config = file.with_name("changed.yaml")
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    done = subprocess.run(["gristmill", "plan", str(file), "--config", str(config)], capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode())
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(change: dict[str, Any], batches: list[dict[str, Any]]) -> None:
    """Print one line: the totals of the batches, and the slowest rank's load over the mean load, on average."""
    metrics = [plan["metrics"] for plan in batches]
    rows = sum(plan["rows"] for plan in batches)
    tokens = sum(figures.get("distinct_tokens", figures["tokens"]) for figures in metrics)
    steps = sum(part["micro_batches_per_rank"] for plan in batches for part in plan["mini_batches"])
    slowest = sum(figures["barrier_ratio"] for figures in metrics) / len(metrics)
    name = ", ".join(f"{key}: {value}" for key, value in change.items()) or "as it is"
    print(f"{name:28} {rows:7,} {tokens:9,} {steps:12,} {slowest:8.2f} x mean")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="the run's name")
    parser.add_argument("--address", default="127.0.0.1:50051", help="of gristmill serve (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where the exported files are kept (default: nowhere)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = given.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        file = export(given.address, given.run, directory)
        if file is None:
            sys.exit(f"run {given.run!r} has no sealed batch: all are trained and freed, or none is complete yet")
        settings = yaml.safe_load((directory / "run.yaml").read_text(encoding="utf-8"))
        print(f"{'':28} {'rows':>7} {'tokens':>9} {'micro-steps':>12} {'slowest rank':>16}")
        for change in CHANGES:
            report(change, plans(file, settings | change))


if __name__ == "__main__":
    main()
