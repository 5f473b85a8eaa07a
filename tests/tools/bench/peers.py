"""`make bench-peers`: the rows of tests/tools/bench/submit.py handed to TransferQueue by its client, and to us by ours,
by turns in one run. Each waits for the answer that says the rows are stored.

TransferQueue runs in a Python of its own (tests/tools/bench/peers_side.py), so that neither sets the other's grpcio.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from gristmill import RolloutClient
from tests.tools.bench import __main__ as bench
from tests.tools.bench.figures import Figure, seconds
from tests.tools.bench.processes import served
from tests.tools.bench.submit import (
    LONG,
    LONG_ROWS,
    SHORT,
    SHORT_ROWS,
    Output,
    _config,
    _delete,
    _submitting,
    generator_output,
    turn_rows,
)

PYTHON = Path(".venv-peers/bin/python")
ROUNDS, TURN_ROUNDS, TURNS = 11, 5, 500
_COLUMNS = ("prompt_token_ids", "response_ids", "rollout_logprobs")
_UNIT = "x TransferQueue"


def figures() -> Iterator[Figure]:
    long, short = generator_output(LONG_ROWS, LONG), generator_output(SHORT_ROWS, SHORT)
    turns = turn_rows(TURNS)
    with served() as service, _queue({"long": long, "short": short, "turns": _columns(turns)}) as queue:
        address = service.grpc_address
        yield from _batches("long", address, queue, long)
        yield from _batches("short", address, queue, short)
        yield from _turns(address, queue, turns)


class Queue:
    """TransferQueue in its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._asked: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    def answer(self) -> str:
        line = self._answers.readline()
        if not line:
            raise RuntimeError("TransferQueue's process ended; its output is above")
        return line

    def seconds(self, kind: str) -> Any:
        """Seconds of putting these rows; for turns, a list."""
        print(kind, file=self._asked, flush=True)
        return json.loads(self.answer())


def _batches(kind: str, address: str, queue: Queue, output: Output) -> Iterator[Figure]:
    """Rates of one call each for all rows, by turns; a ratio is the median of the rounds'."""
    once = _submitting(address, output)
    rounds = [(once(), queue.seconds(kind)) for _ in range(ROUNDS)][1:]
    ratio = statistics.median(theirs / ours for ours, theirs in rounds)
    theirs_s = statistics.median(theirs for _, theirs in rounds)
    size = sum(row.nbytes for name in _COLUMNS for row in output[name]) / 1e6
    for name, amount, unit in (("rows_s", len(output["uids"]), "rows/s"), ("mb_s", size, "MB/s")):
        yield Figure(f"peers.{kind}_{name}", ratio, _UNIT, None, amount / theirs_s, unit, at_most=False)


def _turns(address: str, queue: Queue, rows: list[Output]) -> Iterator[Figure]:
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(TURN_ROUNDS + 1):
        times = _submitted(address, f"peers-turns-{number}", rows), queue.seconds("turns")
        if number > 0:
            ours += times[0]
            theirs += times[1]
    for name, quantile in (("p50", 0.5), ("p99", 0.99)):
        mine, limit = float(np.quantile(ours, quantile)), float(np.quantile(theirs, quantile))
        yield Figure(f"peers.turn_{name}", mine / limit, _UNIT, None, limit * 1e3, "ms")
    rate = 1 / statistics.mean(theirs)
    yield Figure("peers.turn_rate", sum(theirs) / sum(ours), _UNIT, None, rate, "turns/s", at_most=False)


def _submitted(address: str, run: str, rows: list[Output]) -> list[float]:
    with RolloutClient(address, run) as client:
        client.create_run(_config())
        times = [seconds(lambda row=row: client.submit([row])) for row in rows]  # type: ignore[misc]
    _delete(address, run)
    return times


@contextmanager
def _queue(kinds: dict[str, Output]) -> Iterator[Queue]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.npz"
        stored: dict[str, Any] = {}
        for kind, columns in kinds.items():
            for name in _COLUMNS:
                stored[f"{kind}.{name}"] = np.concatenate(columns[name])
                stored[f"{kind}.{name}.ends"] = np.cumsum([len(row) for row in columns[name]])
        np.savez(path, **stored)
        side = [str(PYTHON), str(Path(__file__).with_name("peers_side.py")), str(path)]
        with subprocess.Popen(side, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            queue = Queue(process)
            queue.answer()
            yield queue
            process.communicate()


def _columns(rows: list[Output]) -> Output:
    return {name: [row[name] for row in rows] for name in _COLUMNS}


def main() -> int:
    if not PYTHON.exists():
        print("TransferQueue is not installed: run `make bench-peers`, which makes .venv-peers", file=sys.stderr)
        return 2
    return bench.measured({"peers": sys.modules[__name__]})


if __name__ == "__main__":
    sys.exit(main())
