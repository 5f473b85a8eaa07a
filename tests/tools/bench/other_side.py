"""The other side of the benchmarks of pulls and wakes: the service, and next to it bare gRPC doing as much.

`python -m tests.tools.bench.other_side DIRECTORY` serves both from one process, prints their addresses, and ends with
its standard input.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from gristmill._client.connection.transport import Transport
from gristmill._wire.addresses import Position
from gristmill.v1 import run_pb2, trainer_pb2
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.submissions import LONG, SAMPLES, Sender, config, tables

PIECE_BYTES = 1 << 20
# After the service says that this many wait, their threads still have to fall asleep.
SETTLED_S = 0.2
_THREADS = 128
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class OtherSide:
    """The process with the service, and with bare gRPC next to it."""

    def __init__(self, grpc_address: str, http_url: str, bare_address: str) -> None:
        self.grpc_address, self.bare_address, self._http_url = grpc_address, bare_address, http_url
        self.transport = Transport(grpc_address, 60.0, "bench")
        self._bare = grpc.insecure_channel(bare_address, _OPTIONS)

    def call(self, method: str, request: bytes) -> bytes:
        answer: bytes = self._bare.unary_unary(f"/bare/{method}")(request, timeout=60)
        return answer

    def until_waiting(self, count: int) -> None:
        """Returns once that many calls wait."""
        while waiting_calls(self._http_url) < count:
            time.sleep(0.02)
        time.sleep(SETTLED_S)

    def read(self, path: str) -> Iterator[bytes]:
        pieces: Iterator[bytes] = self._bare.unary_stream("/bare/Read")(path.encode(), timeout=60)
        return pieces

    def create(self, run: str, **more: object) -> None:
        made = config(**more).model_dump_json(exclude_defaults=True)
        self.transport.call(self.transport.runs.CreateRun, run_pb2.CreateRunRequest(run=run, config_json=made))

    def delete(self, run: str) -> None:
        self.transport.call(self.transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    def publish(self, run: str, groups: int, mini_batches: int) -> str:
        """A run with one batch of that many groups, published."""
        self.create(run, train_batch_size=groups, policy_mini_batch_size=groups // mini_batches, max_buffered_batches=8)
        self.fill(run, groups)
        self.wait(run, 0)
        return run

    def fill(self, run: str, groups: int, first: int = 0) -> None:
        """Sends one batch of rows; `first` distinguishes the batches."""
        sent, count = [], 0
        for table in tables(LONG, 1 << 40):
            take = min(len(table), (groups - count) * SAMPLES)
            rows = table.take(np.arange(take))
            sent.append(_renamed(rows, first))
            count += take // SAMPLES
            if count == groups:
                break
        sender = Sender(self.grpc_address, sent)
        sender.seconds(run)
        sender.close()

    def wait(self, run: str, batch: int) -> None:
        request = trainer_pb2.GetBatchRequest(run=run, batch=batch, wait_s=30)
        answer = self.transport.call(self.transport.trainers.GetBatch, request, wait_s=30)
        assert answer.state == trainer_pb2.BATCH_STATE_PUBLISHED

    def shard(self, run: str, position: Position) -> trainer_pb2.GetShardResponse:
        request = trainer_pb2.GetShardRequest(run=run, model=run_pb2.MODEL_POLICY, position=position.message())
        answer: trainer_pb2.GetShardResponse = self.transport.call(self.transport.trainers.GetShard, request)
        return answer

    def close(self) -> None:
        self.transport.close()
        self._bare.close()


def waiting_calls(http_url: str) -> int:
    """Reads from a service's metrics how many calls wait there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{http_url}/metrics") as answer:
        match = re.search(r"^gristmill_waiting_calls (\S+)", answer.read().decode(), re.MULTILINE)
    assert match, "the service counts who waits"
    return int(float(match[1]))


def _renamed(rows: Any, batch: int) -> Any:
    return replace(rows, uids=[f"{batch}-{uid}" for uid in rows.uids])


@contextmanager
def other_side() -> Iterator[OtherSide]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        command = [sys.executable, "-m", "tests.tools.bench.other_side", directory]
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
    from gristmill_service.settings import Settings
    from tests.on_loop import Service

    configure_logs("error", "human")
    published = Publications()
    published.note()
    flags = {"shared_memory_dir": directory, "log_level": "error", "shutdown_grace_s": 5}
    free = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
    service = Service(Settings.model_validate({**free, **flags}))
    service.start()
    bare = grpc.server(ThreadPoolExecutor(_THREADS), options=_OPTIONS)
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", _Bare(published).handlers()),))
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    print(json.dumps([service.grpc_address, service.http_url, f"127.0.0.1:{port}"]), flush=True)
    sys.stdin.read()
    bare.stop(None).wait()
    service.stop()


class Publications:
    """When (time.monotonic) each batch of each run was in the store: a call that waits for it is answered later."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def note(self) -> None:
        """Notes them from now on."""
        from gristmill_service.storage.shard_store import ShardSource
        from gristmill_service.storage.shared_memory import SharedMemoryShardStore

        publish = SharedMemoryShardStore.publish

        def noted(
            store: SharedMemoryShardStore, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]
        ) -> int:
            nbytes = publish(store, run, batch, plan, shards)
            self.times.setdefault(run, []).append(time.monotonic())
            return nbytes

        SharedMemoryShardStore.publish = noted  # type: ignore[method-assign, assignment]


class _Bare:
    """Bare gRPC in the service's place: who waits is released by one event, a file is sent in pieces."""

    def __init__(self, published: Publications) -> None:
        self._published_batches = published
        self._pieces: dict[bytes, list[bytes]] = {}
        self._released = threading.Event()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        unary: dict[str, Callable[..., bytes]] = {
            "Published": self._published,
            "Wait": self._wait,
            "Release": self._release,
        }
        made = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in unary.items()}
        return {**made, "Read": grpc.unary_stream_rpc_method_handler(self._read)}

    def _read(self, path: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if path not in self._pieces:
            data = Path(path.decode()).read_bytes()
            self._pieces = {path: [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]}
        yield from self._pieces[path]

    def _published(self, run: bytes, context: grpc.ServicerContext) -> bytes:
        return json.dumps(self._published_batches.times[run.decode()]).encode()

    def _wait(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._released.wait(60)
        return b""

    def _release(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """When those who wait were released; the next ones wait again."""
        now = time.monotonic()
        released, self._released = self._released, threading.Event()
        released.set()
        return json.dumps(now).encode()


if __name__ == "__main__":
    _serve(sys.argv[1])
