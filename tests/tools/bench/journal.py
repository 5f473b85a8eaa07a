"""Measures what the journal costs: the time to go on after a restart, the rate of submissions, and bytes at rest."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from gristmill._client.connection.transport import Transport
from gristmill.v1 import run_pb2
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import Runs
from tests.tools.bench.figures import Figure
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.processes import served
from tests.tools.bench.submissions import LONG, SHORT, Sender, config, split, tables
from tests.tools.bench.workloads import workload

JOURNAL_BYTES = 1 << 30
STARTS = 5
ROUNDS = 9
# Of long rows, of short ones: each round takes about as long.
ROUND_BYTES = {"": 256 << 20, ".short": 48 << 20}


def figures() -> Iterator[Figure]:
    yield _recovery()
    yield from _throughput("", LONG)
    yield from _throughput(".short", SHORT)
    yield _at_rest()


def _recovery() -> Figure:
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        _fill(Path(directory))
        size = _held(Path(directory))
        seconds = []
        for _ in range(STARTS):
            with served(["--journal-dir", directory]) as service:
                seconds.append(service.ready_s)
    with served() as empty:
        limit = empty.ready_s
    return Figure("recovery.seconds_per_gb", statistics.median(seconds) / (size / 1e9), "s/GB", 3.0, limit, "s empty")


def _fill(directory: Path) -> None:
    """As a killed service leaves it: a run of long rows, nothing of it sealed."""
    ledger = JournalRunStore(directory, "never")
    runs = Runs(MemoryShardStore(), ledger, make_monitor=Monitor)
    runs.create("bench", config())
    for table in tables(LONG, JOURNAL_BYTES):
        runs.get("bench").submit(table)
    runs.close(0.0)
    ledger.close()


def _throughput(name: str, lengths: tuple[int, int]) -> Iterator[Figure]:
    """Submissions over gRPC, with a journal on tmpfs compared with none, in alternation."""
    messages = list(tables(lengths, ROUND_BYTES[name]))
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(dir=TMPFS))
        senders = []
        for flags in ([], ["--journal-dir", directory]):
            service = opened.enter_context(served(flags))
            transport = Transport(service.grpc_address, 60.0, "bench")
            opened.callback(transport.close)
            sender = Sender(service.grpc_address, messages)
            opened.callback(sender.close)
            senders.append((transport, sender))
        pairs = []
        for number in range(ROUNDS + 1):
            order = senders if number % 2 else senders[::-1]
            pair = [_round(transport, sender, f"round-{number}") for transport, sender in order]
            pairs.append(pair if number % 2 else pair[::-1])
    # The first round warms up.
    ratio = statistics.median(without / journal for without, journal in pairs[1:])
    without, journal = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
    size, rows = sender.nbytes / 1e6, sender.rows
    yield Figure(f"journal.throughput_ratio{name}", ratio, "x without", None, size / without, "MB/s", at_most=False)
    yield Figure(f"journal.throughput_mb_s{name}", size / journal, "MB/s", None, rows / journal, "rows/s")


def _round(transport: Transport, sender: Sender, run: str) -> float:
    made = run_pb2.CreateRunRequest(run=run, config_json=config().model_dump_json(exclude_defaults=True))
    transport.call(transport.runs.CreateRun, made)
    seconds = sender.seconds(run)
    status = transport.call(transport.runs.GetRun, run_pb2.GetRunRequest(run=run)).status
    assert status.rows_accepted == sender.rows, status
    transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))
    return seconds


def _at_rest() -> Figure:
    """Measures the workload of agents, whose rows repeat what came before them as their prompt."""
    work = workload("agent")
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        ledger = JournalRunStore(Path(directory), "never")
        runs = Runs(MemoryShardStore(), ledger, make_monitor=Monitor)
        # One group more than there are: nothing is sealed.
        runs.create("bench", config(train_batch_size=len(set(work.steps.uids)) + 1, policy_mini_batch_size=1))
        for table in split(work):
            runs.get("bench").submit(table)
        # Closing copies the last rows from the WAL to the database, and removes it.
        runs.close(0.0)
        ledger.close()
        held = _held(Path(directory))
    tokens = work.steps.tokens.total
    return Figure("journal.bytes_per_token", held / tokens, "B/token", None, work.input_bytes / tokens, "B/token sent")


def _held(directory: Path) -> int:
    """Blocks of the databases: what a file has room for is not counted."""
    return sum(os.stat(path).st_blocks * 512 for path in directory.glob("run-*/*"))
