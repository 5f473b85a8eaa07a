"""Measures how submission's time grows: one client over its rows, and 1 to 16 client processes that submit at once.

`python -m tests.tools.bench.producers ADDRESS NUMBER KIND` is one of the processes: it says when it is ready, and
submits its rows whenever it reads the name of a run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import numpy as np

from gristmill import RolloutClient
from gristmill.converters import from_skyrl
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
)

Curve = list[tuple[int, float]]

ROWS = tuple(1024 << step for step in range(7))
PRODUCERS = (1, 2, 4, 8, 16)
ROW_TOKENS = 256
KINDS = {"long": (LONG_ROWS // 2, LONG), "short": (SHORT_ROWS // 2, SHORT)}
"""Rows of one producer, and their tokens."""
_ROUNDS = 5


def over_rows() -> Curve:
    """Seconds from arrays to the last answer, of 1k to 64k rows of 256 tokens."""
    with served() as service:
        return [(rows, _least(service.grpc_address, rows)) for rows in ROWS]


def _least(address: str, rows: int) -> float:
    once = _submitting(address, generator_output(rows, (ROW_TOKENS, ROW_TOKENS + 1)))
    return min(once() for _ in range(_ROUNDS))


def over_producers(kind: str) -> Curve:
    """Rows per second of all producers, the most of a few rounds."""
    rows = KINDS[kind][0]
    with served() as service:
        return [(count, count * rows / _together(service.grpc_address, kind, count)) for count in PRODUCERS]


def row_bytes(kind: str) -> float:
    """Counts tokens and logprobs, on average."""
    output = generator_output(*KINDS[kind])
    return nbytes(output) / KINDS[kind][0]


def nbytes(output: Output) -> int:
    columns = (output[name] for name in ("prompt_token_ids", "response_ids", "rollout_logprobs"))
    return sum(int(row.nbytes) for column in columns for row in column if isinstance(row, np.ndarray))


def _together(address: str, kind: str, count: int) -> float:
    """Seconds until the last of that many processes has its last answer, of the best round."""
    with ExitStack() as opened:
        producers = [opened.enter_context(_producer(address, kind, number)) for number in range(count)]
        for _, answers in producers:
            answers.readline()
        return min(_round(address, f"{kind}-{count}-{number}", producers) for number in range(_ROUNDS))


def _round(address: str, run: str, producers: list[tuple[IO[str], IO[str]]]) -> float:
    with RolloutClient(address, run) as client:
        client.create_run(_config())
        begin = time.perf_counter()
        for asked, _ in producers:
            print(run, file=asked, flush=True)
        for _, answers in producers:
            assert answers.readline(), "it has submitted"
        taken = time.perf_counter() - begin
    _delete(address, run)
    return taken


@contextmanager
def _producer(address: str, kind: str, number: int) -> Iterator[tuple[IO[str], IO[str]]]:
    command = [sys.executable, "-m", "tests.tools.bench.producers", address, str(number), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout
        process.stdin.close()


def _produce(address: str, number: str, kind: str) -> None:
    output = generator_output(*KINDS[kind])
    output["uids"] = [f"{number}-{uid}" for uid in output["uids"]]
    print("ready", flush=True)
    for line in sys.stdin:
        with RolloutClient(address, line.strip()) as client:
            client.submit(from_skyrl(output))
        print("done", flush=True)


if __name__ == "__main__":
    _produce(*sys.argv[1:])
