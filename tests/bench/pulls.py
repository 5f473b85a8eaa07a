"""From a published batch to a rank's tensors: streamed and mapped, the waking of who waits, and what prefetching hides.

Run as `python -m tests.bench.pulls DIRECTORY` it is the other side: the service, and beside it bare gRPC doing as much.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import torch
from safetensors.torch import save_file

from gristmill import RolloutClient, TrainerClient
from gristmill._client.pull import stream
from gristmill._client.transport import Transport
from gristmill._wire.addresses import Position, ShardAddress
from gristmill.errors import GristmillError
from gristmill.torch import map_shard
from gristmill.v1 import run_pb2, trainer_pb2
from tests.bench.figures import Figure, paired, seconds
from tests.bench.pipeline import TMPFS
from tests.bench.ranks import Ranks
from tests.bench.submissions import LONG, SAMPLES, SHORT, Sender, config, tables

PIECE_BYTES = 1 << 20
STREAMED_MIB = (30, 120)
ROUNDS = 15
MAPPED_MIB = (1, 100, 1024)
MAPS = 51
RANKS, WAKES = 64, 20
WAITING = 256
STEP_S = 0.020
_SETTLED_S = 0.2

# Groups of 8 rows of at most 16,000 tokens, of which a shard of 30 MiB is made.
_GROUPS = 26
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def figures() -> Iterator[Figure]:
    yield from _mapped()
    with other_side() as side:
        yield from _streamed(side)
        yield from _woken(side)
        yield _producers(side)
        yield from _overlapped(side)
        yield _while_sealing(side)


# Mapped.


def _mapped() -> Iterator[Figure]:
    """Opening a shard as a trainer does: of the sizes told, as far as there is room."""
    times = {}
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        path = Path(directory) / "shard.safetensors"
        for size in MAPPED_MIB:
            row = torch.zeros(1, dtype=torch.int32)
            tensors = {"row": row, "sequences": torch.zeros(1, size << 18, dtype=torch.int32)}
            save_file(tensors, path, metadata={"micro_batches": "[[0]]", "batch": "0", "mini_batch": "0"})
            del tensors
            times[size] = statistics.median(seconds(lambda: map_shard(str(path))) for _ in range(MAPS))
    slowest = max(times, key=times.__getitem__)
    yield Figure("pull.shared_memory_ms", times[slowest] * 1e3, "ms", 1.0, slowest, "MiB shard, the slowest")


# Streamed.


def _streamed(side: OtherSide) -> Iterator[Figure]:
    """A shard to tensors, against bare gRPC that streams the same bytes in messages of the same size; its client joins
    them, or only counts them."""
    for size in STREAMED_MIB:
        run = side.publish(f"streamed-{size}", _GROUPS * size // 30, mini_batches=1)
        found = side.shard(run, Position(0))
        address = ShardAddress(run, "policy", 0, 0, 0)

        def ours(address: ShardAddress = address, nbytes: int = found.size_bytes) -> None:
            stream(side.transport, address, nbytes)

        def joined(path: str = found.shared_memory_path) -> None:
            b"".join(side.read(path))

        def counted(path: str = found.shared_memory_path) -> None:
            sum(map(len, side.read(path)))

        rounds = max(5, ROUNDS * 30 // size)
        ratio, limit = paired(ours, joined, rounds)
        name, mib = f"pull.stream_ratio.{size}_mib", found.size_bytes / 2**20
        yield Figure(name, 1 / ratio, "x bare gRPC", 0.85, mib / limit, "MiB/s", at_most=False)
        ratio, limit = paired(ours, counted, rounds)
        yield Figure(f"{name}.kept_nowhere", 1 / ratio, "x bare gRPC", None, mib / limit, "MiB/s", at_most=False)
        side.delete(run)


# Woken.


def _woken(side: OtherSide) -> Iterator[Figure]:
    """From a batch's publication until a waiting rank has its answer, with a connection for each; and the same of bare
    gRPC, whose handlers wait for one event."""
    run = "woken"
    side.create(run, train_batch_size=1, policy_mini_batch_size=1, n_samples_per_prompt=2)
    side.call("HistoryRecorder", run.encode())
    ours, bare = Ranks(side.grpc_address, RANKS), Ranks(side.bare_address, RANKS)
    ours_s: list[float] = []
    bare_s: list[float] = []
    with ThreadPoolExecutor(1) as pool, RolloutClient(side.grpc_address, run) as client:
        for number in range(WAKES + 2):
            request = trainer_pb2.GetBatchRequest(run=run, batch=number, wait_s=20).SerializeToString()
            ours.ask("/gristmill.v1.TrainerService/GetBatch", request)
            side.until_waiting(RANKS)
            filled = pool.submit(_complete_group, client, f"prompt-{number}")
            answered = ours.answered()
            filled.result()
            published = json.loads(side.call("Published", b""))[number]
            bare.ask("/bare/Wait", b"")
            time.sleep(_SETTLED_S)
            release = pool.submit(side.call, "Release", b"")
            let_go = bare.answered()
            if number >= 2:
                ours_s += [at - published for at in answered]
                bare_s += [at - json.loads(release.result()) for at in let_go]
            _acknowledge(side, run, number)
    ours.close()
    bare.close()
    side.delete(run)
    for name, percent, reach in (("p99", 99, 5.0), ("median", 50, None)):
        value, limit = (float(np.percentile(found, percent)) * 1e3 for found in (ours_s, bare_s))
        yield Figure(f"wake.{name}_ms", value, "ms", reach, limit, "ms, bare gRPC")


def _complete_group(client: RolloutClient, uid: str) -> None:
    for sample in range(2):
        with client.trajectory(uid, sample) as trajectory:
            trajectory.step([1, 2], [3, 4], reward=float(sample), is_last_step=True)
    client.flush()


def _acknowledge(side: OtherSide, run: str, batch: int) -> None:
    request = trainer_pb2.AcknowledgeRequest(run=run, model=run_pb2.MODEL_POLICY, position=Position(batch).message())
    request.commit = True
    side.transport.call(side.transport.trainers.Acknowledge, request)


def _producers(side: OtherSide) -> Figure:
    """Rows a second that producers get accepted, a group at a time so that the run changes often, with and without
    ranks that wait for its first batch."""
    groups = [
        table.take(np.arange(at, at + SAMPLES))
        for table in tables(SHORT, 12 << 20)
        for at in range(0, len(table), SAMPLES)
    ]
    sender, numbers = Sender(side.grpc_address, groups), iter(range(1000))

    def sent(waiting: int) -> float:
        run = f"produced-{next(numbers)}"
        side.create(run)
        with _waiting(side, run, waiting):
            return sender.seconds(run)

    sent(0)
    rounds = []
    for number in range(10):
        # Either is first as often, so that drift cancels.
        first, second = (0, WAITING) if number % 2 else (WAITING, 0)
        taken = {first: sent(first), second: sent(second)}
        rounds.append((taken[0], taken[WAITING]))
    sender.close()
    ratio = statistics.median(without / among for without, among in rounds)
    rows = sender.rows / statistics.median(without for without, _ in rounds)
    return Figure("wake.producer_ratio", ratio, "x", 0.95, rows, "rows/s, nobody waiting", at_most=False)


@contextmanager
def _waiting(side: OtherSide, run: str, count: int) -> Iterator[None]:
    """So many ranks wait for the run's first batch; the run is deleted afterwards, which ends their wait."""
    request = trainer_pb2.GetBatchRequest(run=run, wait_s=30)
    calls = [side.transport.trainers.GetBatch for _ in range(count)]
    with ThreadPoolExecutor(max(1, count)) as pool:
        waits: list[Future[Any]] = [pool.submit(call, request, timeout=60) for call in calls]
        side.until_waiting(count)
        yield
        side.delete(run)
        assert all(isinstance(wait.exception(), grpc.RpcError) for wait in waits)


# Overlapped.


def _overlapped(side: OtherSide) -> Iterator[Figure]:
    """The share of a loop's time that a rank waits for its next shard, all of them streamed, at steps of 20 ms."""
    run = side.publish("overlapped", _GROUPS * 8, mini_batches=8)
    shares: dict[int, list[float]] = {0: [], 1: []}
    with patch("gristmill._client.pull.is_mappable", lambda path, size: False):
        for number in range(10):
            with TrainerClient(side.grpc_address, run, 0, prefetch=number % 2) as trainer:
                share = _waited(next(iter(trainer)).forward())
            if number >= 2:
                shares[number % 2].append(share)
    side.delete(run)
    without, ahead = (statistics.median(shares[prefetch]) for prefetch in (0, 1))
    yield Figure("overlap.wait_ratio", ahead, "of the loop", None, without, "without prefetch")


def _waited(shards: Iterator[Any]) -> float:
    waited = 0.0
    next(shards)
    time.sleep(STEP_S)
    begin = time.perf_counter()
    while True:
        asked = time.perf_counter()
        if next(shards, None) is None:
            return waited / (asked - begin)
        waited += time.perf_counter() - asked
        time.sleep(STEP_S)


def _while_sealing(side: OtherSide) -> Figure:
    """The rate at which a rank maps or streams batch n while batch n + 1 is sealed, against the rate while none is."""
    run = side.publish("sealing", _GROUPS * 4, mini_batches=4)
    address, size = ShardAddress(run, "policy", 0, 0, 0), side.shard(run, Position(0)).size_bytes

    def pull() -> None:
        stream(side.transport, address, size)

    ratios = []
    for batch in range(1, 6):
        pull()
        alone = statistics.median(seconds(pull) for _ in range(3))
        side.fill(run, _GROUPS * 4, first=batch)
        waits = threading.Thread(target=side.wait, args=(run, batch))
        waits.start()
        meanwhile = []
        while waits.is_alive():
            meanwhile.append(seconds(pull))
        if meanwhile:
            ratios.append(alone / statistics.median(meanwhile))
    side.delete(run)
    return Figure("overlap.pull_while_sealing_ratio", statistics.median(ratios), "x", None, at_most=False)


# The other side.


class OtherSide:
    """The process with the service, and with bare gRPC beside it."""

    def __init__(self, grpc_address: str, bare_address: str) -> None:
        self.grpc_address, self.bare_address = grpc_address, bare_address
        self.transport = Transport(grpc_address, 60.0, "bench")
        self._bare = grpc.insecure_channel(bare_address, _OPTIONS)

    def call(self, method: str, request: bytes) -> bytes:
        answer: bytes = self._bare.unary_unary(f"/bare/{method}")(request, timeout=60)
        return answer

    def until_waiting(self, count: int) -> None:
        while json.loads(self.call("Waiting", b"")) < count:
            time.sleep(0.01)
        time.sleep(_SETTLED_S)

    def read(self, path: str) -> Iterator[bytes]:
        pieces: Iterator[bytes] = self._bare.unary_stream("/bare/Read")(path.encode(), timeout=60)
        return pieces

    def create(self, run: str, **more: object) -> None:
        made = config(**more).model_dump_json(exclude_defaults=True)
        self.transport.call(self.transport.runs.CreateRun, run_pb2.CreateRunRequest(run=run, config_json=made))

    def delete(self, run: str) -> None:
        self.transport.call(self.transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    def publish(self, run: str, groups: int, mini_batches: int) -> str:
        """A run with one batch of so many groups, published."""
        self.create(run, train_batch_size=groups, policy_mini_batch_size=groups // mini_batches, max_buffered_batches=8)
        self.fill(run, groups)
        self.wait(run, 0)
        return run

    def fill(self, run: str, groups: int, first: int = 0) -> None:
        """Sends one batch of rows; `first` tells the batches apart."""
        found, count = [], 0
        for table in tables(LONG, 1 << 40):
            take = min(len(table), (groups - count) * SAMPLES)
            rows = table.take(np.arange(take))
            found.append(_renamed(rows, first))
            count += take // SAMPLES
            if count == groups:
                break
        sender = Sender(self.grpc_address, found)
        sender.seconds(run)
        sender.close()

    def wait(self, run: str, batch: int) -> None:
        request = trainer_pb2.GetBatchRequest(run=run, batch=batch, wait_s=30)
        answer = self.transport.call(self.transport.trainers.GetBatch, request, wait_s=30)
        assert answer.state == trainer_pb2.BATCH_STATE_PUBLISHED

    def shard(self, run: str, position: Position) -> trainer_pb2.GetShardResponse:
        request = trainer_pb2.GetShardRequest(run=run, model=run_pb2.MODEL_POLICY, position=position.message())
        found: trainer_pb2.GetShardResponse = self.transport.call(self.transport.trainers.GetShard, request)
        return found

    def close(self) -> None:
        self.transport.close()
        self._bare.close()


def _renamed(rows: Any, batch: int) -> Any:
    return replace(rows, uids=[f"{batch}-{uid}" for uid in rows.uids])


@contextmanager
def other_side() -> Iterator[OtherSide]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        command = [sys.executable, "-m", "tests.bench.pulls", directory]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        side = OtherSide(*json.loads(process.stdout.readline()))
        try:
            yield side
        finally:
            side.close()
            process.stdin.close()
            process.wait(timeout=60)


def _serve(directory: str) -> None:
    from gristmill_service.logs import configure_logs
    from gristmill_service.service import Service
    from gristmill_service.settings import Settings

    configure_logs("error", "human")
    free = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
    service = Service(Settings(**free, shared_memory_dir=Path(directory), log_level="error", shutdown_grace_s=5))
    service.start()
    bare = grpc.server(ThreadPoolExecutor(2 * RANKS), options=_OPTIONS)
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", _Bare(service).handlers()),))
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    print(json.dumps([service.grpc_address, f"127.0.0.1:{port}"]), flush=True)
    sys.stdin.read()
    bare.stop(None).wait()
    service.stop()


class _Bare:
    """What bare gRPC does in the service's place, and what is to be known of the service."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._pieces: dict[bytes, list[bytes]] = {}
        self._times: list[float] = []
        self._released = threading.Event()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        names = ("HistoryRecorder", "Published", "Waiting", "Wait", "Release")
        unary: dict[str, Callable[..., bytes]] = {name: getattr(self, f"_{name.lower()}") for name in names}
        made = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in unary.items()}
        return {**made, "Read": grpc.unary_stream_rpc_method_handler(self._read)}

    def _read(self, path: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if path not in self._pieces:
            data = Path(path.decode()).read_bytes()
            self._pieces = {path: [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]}
        yield from self._pieces[path]

    def _watch(self, name: bytes, context: grpc.ServicerContext) -> bytes:
        """Notes when each of the run's batches is published, before anyone else hears of it."""
        run = self._service.runs.get(name.decode())

        def note() -> None:
            now = time.monotonic()
            with suppress(GristmillError):
                if run.batch(len(self._times)).plan:
                    self._times.append(now)

        self._times.clear()
        run.changes.subscribe(note)
        return b""

    def _published(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return json.dumps(self._times).encode()

    def _waiting(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return json.dumps(self._service.waiting.count).encode()

    def _wait(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._released.wait(60)
        return b""

    def _release(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """When those who wait were let go; the next ones wait again."""
        now = time.monotonic()
        self._released.set()
        self._released = threading.Event()
        return json.dumps(now).encode()


if __name__ == "__main__":
    _serve(sys.argv[1])
