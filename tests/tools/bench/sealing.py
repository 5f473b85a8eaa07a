"""A turn's p99 while a batch of a gigabyte is sealed, over that of the same service at rest.

`python -m tests.tools.bench.sealing` prints both, with a journal and shared memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from gristmill import RolloutClient
from gristmill._client.connection.transport import Transport
from gristmill.v1 import rollout_pb2, trainer_pb2
from tests.tools.bench.figures import Figure, p99, seconds
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.processes import served
from tests.tools.bench.submissions import LONG, Sender, config, run_of_its_own, tables
from tests.tools.bench.submit import turn_rows

SEALED_BYTES = 1 << 30
TURNS_AT_REST = 1000


def figures(sealed_bytes: int = SEALED_BYTES) -> Iterator[Figure]:
    with (
        tempfile.TemporaryDirectory(dir=TMPFS) as shards,
        tempfile.TemporaryDirectory() as journal,
        served(["--journal-dir", str(Path(journal) / "runs"), "--shared-memory-dir", shards]) as service,
        run_of_its_own(service.grpc_address, "large"),
        RolloutClient(service.grpc_address, "turns") as client,
    ):
        client.create_run(config().model_dump(exclude_defaults=True))
        sender = Sender(service.grpc_address, list(tables(LONG, sealed_bytes)))
        sender.seconds("large")
        rows = iter(turn_rows(100_000))
        turn = lambda: client.submit([next(rows)])  # noqa: E731
        at_rest = p99(seconds(turn) for _ in range(TURNS_AT_REST))
        seconds, while_sealing = _while_sealing(service.grpc_address, turn)
    yield Figure("turn.while_sealing_ratio", while_sealing / at_rest, "x at rest", 3.0, at_rest * 1e3, "ms")
    yield Figure("turn.sealing_gb_s", seconds / (sealed_bytes / 1e9), "s/GB", None)


def _while_sealing(address: str, turn: Callable[[], object]) -> tuple[float, float]:
    """Returns how long the sealing took, and the p99 of turns meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        sealing = pool.submit(_seal, address)
        times = []
        for _ in count():
            times.append(seconds(turn))
            if sealing.done():
                break
        return sealing.result(), p99(times)


def _seal(address: str) -> float:
    """Seals the large batch, and returns the seconds until it is published."""
    transport = Transport(address, 120.0, "bench")
    begin = time.perf_counter()
    transport.call(transport.rollouts.SealBatch, rollout_pb2.SealBatchRequest(run="large"))
    request = trainer_pb2.GetBatchRequest(run="large", batch=0, wait_s=30)
    while transport.call(transport.trainers.GetBatch, request, wait_s=30).state == trainer_pb2.BATCH_STATE_PENDING:
        pass
    transport.close()
    return time.perf_counter() - begin


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure.name} {figure.value:.3g} {figure.unit} (bound {figure.bound})")
