"""Shards pulled through a replica of the service from Redis: compressed for who takes them so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from gristmill._client.connection.transport import Transport
from gristmill._client.trainer.shards import pull
from gristmill._client.trainer.shards.pull import stream
from gristmill._wire.addresses import ShardAddress
from gristmill._wire.codecs.zstd_frames import FRAME_BYTES
from gristmill.v1 import trainer_pb2
from gristmill_service.access.gate import Gate
from gristmill_service.api.admission import Admission
from gristmill_service.api.context import ApiContext
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.api.rpc.server import GrpcServer
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.off_loop import each
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.settings import Settings
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.shard_store import ShardSource, ShardStore
from tests import naive
from tests.on_loop import on_loop
from tests.redis.fence import OpenFence
from tests.redis.servers import RedisServer
from tests.serving import FREE_PORTS
from tests.tools.bench.workloads import workload

ADDRESS = ShardAddress("run", "policy", 3, 0, 1)


@pytest.fixture(scope="module")
def batch() -> BuiltBatch:
    work = workload("agent")
    return build_batch(work.steps, work.config("prefix"), run="run", batch=0)


@pytest.fixture
def shard(batch: BuiltBatch) -> ShardSource:
    return next(one for one in batch.shards if (one.address.mini_batch, one.address.rank) == (1, 3))


@pytest.fixture(scope="module", params=["redis", "memory"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, batch: BuiltBatch
) -> Iterator[ShardStore]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        made = (
            RedisShardStore(client := server.client(), OpenFence(client))
            if request.param == "redis"
            else MemoryShardStore()
        )
        made.publish("run", 0, b"{}", batch.shards)
        yield made


@pytest.fixture
def transport(store: ShardStore) -> Iterator[Transport]:
    """Connects to a service that has this one run; of a run's calls only the reads of shards."""

    async def read_shard(*args: Any) -> AsyncIterator[bytes]:
        return each(store.read(*args))

    async def read_shard_frames(*args: Any) -> AsyncIterator[bytes] | None:
        frames = store.read_frames(*args)
        return None if frames is None else each(frames)

    async def serve() -> GrpcServer:
        runs: Any = SimpleNamespace(read_shard=read_shard, read_shard_frames=read_shard_frames, is_owner=None)
        settings = Settings(**FREE_PORTS)
        api = ApiContext(runs, Admission(), LongPoll(), Metrics(), 1 << 26, Gate(settings, runs))
        started = GrpcServer(api, settings, None, None)
        await started.start()
        return started

    server = on_loop(serve)
    made = Transport(server.address, 20.0, "TrainerClient")
    yield made
    made.close()
    on_loop(server.refuse_new_calls, 0.0)
    on_loop(server.wait_until_idle)


def test_a_trainer_gets_the_same_tensors_whatever_the_store_holds(transport: Transport, shard: ShardSource) -> None:
    tensors, metadata = stream(transport, ADDRESS, shard.size)
    expected = load(naive.shard_bytes(shard))
    assert metadata["rank"] == 3
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name].numpy(), expected[name]) for name in expected)


def test_files_are_sent_as_they_are_to_who_does_not_decompress_them(
    transport: Transport, store: ShardStore, shard: ShardSource
) -> None:
    def messages(*, accepts_zstd: bool) -> list[trainer_pb2.ReadShardResponse]:
        request = ADDRESS.request()
        request.accepts_zstd = accepts_zstd
        return list(transport.trainers.ReadShard(request, timeout=20))

    whole, accepted = messages(accepts_zstd=False), messages(accepts_zstd=True)
    assert b"".join(one.data for one in whole) == naive.shard_bytes(shard)
    assert not any(one.is_zstd for one in whole)
    is_zstd = isinstance(store, RedisShardStore)
    assert {one.is_zstd for one in accepted} == {is_zstd}
    sizes = [sum(len(one.data) for one in some) for some in (whole, accepted)]
    assert sizes[1] < 0.2 * sizes[0] if is_zstd else sizes[1] == sizes[0]
    assert max(len(one.data) for one in whole + accepted) <= FRAME_BYTES


def test_chosen_columns_are_compressed_where_all_are(
    transport: Transport, store: ShardStore, shard: ShardSource
) -> None:
    request = ADDRESS.request()
    request.accepts_zstd = request.chooses_columns = True
    chosen = list(transport.trainers.ReadShard(request, timeout=20))
    assert {one.is_zstd for one in chosen} == {isinstance(store, RedisShardStore)}
    tensors, _ = stream(transport, ADDRESS, shard.size, [])
    assert tensors.keys() == load(naive.shard_bytes(shard)).keys(), "it has no declared columns"


def test_a_client_without_zstandard_gets_files(
    transport: Transport, shard: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "is_available", lambda: False)
    monkeypatch.setattr(pull, "decompressed", None)
    tensors, _ = stream(transport, ADDRESS, shard.size)
    assert tensors.keys() == load(naive.shard_bytes(shard)).keys()


def test_memory_that_a_trainer_gets_is_its_own_to_write_to(transport: Transport, shard: ShardSource) -> None:
    tensors, _ = stream(transport, ADDRESS, shard.size)
    tensors["rewards"] += 1.0
    again, _ = stream(transport, ADDRESS, shard.size)
    assert not np.array_equal(again["rewards"].numpy(), tensors["rewards"].numpy())
