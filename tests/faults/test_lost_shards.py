"""Shards that Redis lost, as a cluster does that fails over: they are rebuilt from their rows on any replica."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from safetensors.numpy import load

from gristmill._client.connection.transport import Transport
from gristmill._client.trainer.shards.pull import stream
from gristmill._wire.addresses import ShardAddress as TrainerAddress
from gristmill.errors import UnavailableError
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import Position
from tests.faults.replicas import CREATED, Join, Replica, keys, published
from tests.faults.services import CONFIG, Service, Services, group, on_redis, owner, patiently
from tests.redis.servers import RedisServer, wait_until
from tests.run.harness import group_rows, table

ADDRESS = ShardAddress("policy", 0, 0)
FRAME = "policy/0/0/0"
"""The field of a batch's hash that has the first frame of this shard."""
PULLS: dict[str, Callable[[Replica], object]] = {
    "plan": lambda replica: replica.runs.get("run").batch(0).plan,
    "batch:0": lambda replica: replica.runs.get("run").shard("policy", 0, Position(0), 0).location,
    FRAME: lambda replica: b"".join(replica.runs.read_shard("run", 0, ADDRESS)),
}


def test_a_flipped_bit_reaches_no_trainer_and_its_batch_is_built_again(
    services: Services, shared_redis: RedisServer, run: str
) -> None:
    service = services.start(1, *on_redis(shared_redis.url))[0]
    service.grpc.create(run, CONFIG)
    service.grpc.submit(run, [*group("a"), *group("b")])
    service.grpc.batch(run, 0, wait_s=20)
    before = service.grpc.read(run, 0, 0, 0)
    [batch] = [key for key in keys(shared_redis, run) if key.endswith(":batch:0")]
    client = shared_redis.client()
    stored: Any = client.hget(batch, FRAME)
    value = bytearray(stored)
    value[len(value) // 2] ^= 1
    client.hset(batch, FRAME, bytes(value))
    with closing(Transport(service.grpc_address, 60.0, "TrainerClient")) as transport:
        tensors, _ = stream(transport, TrainerAddress(run, "policy", 0, 0, 0), len(before))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in load(before).items()
    }
    assert service.grpc.read(run, 0, 0, 0) == before


@pytest.mark.parametrize("lost", PULLS)
@pytest.mark.parametrize("when", ["while the run is open", "before it is opened"])
def test_shards_that_redis_lost_are_rebuilt_from_their_rows(
    server: RedisServer, join: Join, lost: str, when: str
) -> None:
    first = join(server.url, "first")
    first.runs.create("run", CREATED)
    first.runs.get("run").submit(table(*group_rows("a")))
    wait_until(lambda: published(first, "run", 0), "the batch is published")
    before = PULLS[lost](first)
    replica = first

    def lose() -> None:
        [batch] = [key for key in keys(server, "run") if key.endswith(":batch:0")]
        assert server.client().delete(batch) if lost == "batch:0" else server.client().hdel(batch, lost)

    if when == "before it is opened":
        first.die()
        lose()
        replica = join(server.url, "second")
        wait_until(lambda: "run" in replica.runs.names(), "the run is taken over")
    else:
        first.runs.get("run")._builder.plans.clear()
        lose()

    def pulled() -> object:
        try:
            return PULLS[lost](replica)
        except UnavailableError:
            return None

    wait_until(lambda: pulled() == before, "the same bytes can be pulled again")
    status = replica.runs.get("run").status()
    assert (status.failed_batches, status.groups_dropped, status.batches_sealed) == ({}, {}, 1)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_they_are_rebuilt_also_where_another_replica_is_asked(
    services: Services, shared_redis: RedisServer, run: str, kind: str
) -> None:
    both = services.start(2, *on_redis(shared_redis.url))
    both[0].grpc.create(run, CONFIG)
    owned = owner(both, run)
    other: Service = next(one for one in both if one is not owned)
    owned.grpc.submit(run, [*group("a"), *group("b")])
    owned.grpc.batch(run, 0, wait_s=20)
    api = getattr(other, kind)
    before = api.read(run, 0, 0, 0)
    [batch] = [key for key in keys(shared_redis, run) if key.endswith(":batch:0")]
    shared_redis.client().hdel(batch, FRAME)
    assert patiently(lambda: api.read(run, 0, 0, 0)) == before
