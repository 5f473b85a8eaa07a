"""Columns that trainers write back, by any replica and over the death of the run's owner."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from tests.api.apis import Api, Json, Refused
from tests.faults.services import CONFIG, Services, check, eventually, group, on_redis, owner
from tests.redis.servers import RedisServer

SETTINGS: Json = {
    **CONFIG,
    "policy_mini_batch_size": 1,
    "advantage_estimator": "gae",
    "max_buffered_batches": 3,
    "columns": [
        {"name": name, "dtype": "float32", "scope": scope, "source": "trainer"}
        for name, scope in (("values", "response"), ("verdict", "row"))
    ],
}
GONE = ("UNAVAILABLE", "NOT_FOUND", "CANCELLED")


def columns_of(shard: bytes) -> dict[str, Any]:
    tensors = load(shard)
    mask = tensors["response_mask"] == 1
    tokens = tensors["sequences"][:, -mask.shape[1] :]
    verdict = np.where(tensors["row"] < 0, 99, tensors["row"] + 1).astype(np.float32)
    return {"values": np.where(mask, tokens / 8, 99).astype(np.float32), "verdict": verdict}


def write(api: Api, run: str, batch: int, mini_batch: int, incarnation: int) -> None:
    """Each column by a call of its own, as the Python client does."""
    for name, values in columns_of(api.read(run, batch, mini_batch, 0)).items():
        api.write(run, (batch, mini_batch, 0), incarnation, save({name: values}))


class Run:
    """A run that is written and trained through calls that know only to ask again."""

    def __init__(self, name: str, api: Api) -> None:
        self.name, self.api = name, api

    def train_next(self) -> None:
        answer = self._again(lambda: self._next(forward=True))
        batch, count = answer["position"]["batch"], None
        while count is None or self._again(lambda: self.api.batch(self.name, batch))["state"] == "forward":
            plan = self._again(lambda: self._plan(batch))
            count = len(plan["mini_batches"])
            for mini_batch in range(count):
                self._again(lambda at=mini_batch: write(self.api, self.name, batch, at, answer["incarnation"]))
        for mini_batch in range(count):
            shard = self._again(lambda: self._next(forward=False))
            assert shard["position"] == {"batch": batch, "epoch": 0, "mini_batch": mini_batch}
            data = self._again(lambda at=mini_batch: self.api.read(self.name, batch, at, 0))
            tensors, expected = load(data), columns_of(data)
            response_mask = tensors["response_mask"] == 1
            np.testing.assert_array_equal(tensors["values"], np.where(response_mask, expected["values"], 0))
            np.testing.assert_array_equal(tensors["verdict"], np.where(tensors["row"] < 0, 0, expected["verdict"]))
            assert np.abs(tensors["advantages"][response_mask]).max() > 0
            place = shard["position"]
            self._again(lambda place=place: self.api.acknowledge(self.name, 0, place, commit=True))

    def _next(self, *, forward: bool) -> Json:
        shard = self.api.shard(self.name, 0, wait_s=1.0, forward=forward)
        if shard["state"] not in ("published", "forward"):
            raise Refused("UNAVAILABLE", "", "not there yet", None)
        return shard

    def _plan(self, batch: int) -> Json:
        answer = self.api.batch(self.name, batch, wait_s=1.0)
        if "plan" not in answer:
            raise Refused("UNAVAILABLE", "", "not there yet", None)
        plan: Json = answer["plan"]
        return plan

    def _again(self, call: Any) -> Any:
        deadline = time.monotonic() + 60
        while True:
            try:
                return call()
            except Refused as refused:
                if time.monotonic() > deadline:
                    raise
                check(refused, *GONE, "RESOURCE_EXHAUSTED")
                time.sleep(0.02)


def test_any_replica_takes_writes_and_a_new_owner_goes_on_with_what_was_written(
    services: Services, shared_redis: RedisServer, run: str
) -> None:
    flags = on_redis(shared_redis.url, prefix=f"written-{run}")
    replicas = services.start(2, *flags)
    replicas[0].grpc.create(run, SETTINGS)
    run_owner = owner(replicas, run)
    [other] = [one for one in replicas if one is not run_owner]
    for uid in range(CONFIG["train_batch_size"]):
        other.grpc.submit(run, group(str(uid)))
    eventually(lambda: other.grpc.batch(run, 0)["state"] == "forward", "its forward shards are there")
    apis: list[Api] = [other.grpc, other.http]
    before = columns_of(other.grpc.read(run, 0, 0, 0))
    for api, (name, values) in zip(apis, before.items(), strict=True):
        api.write(run, (0, 0, 0), 1, save({name: values}))
    file = save({"values": before["values"]})
    place = {"run": run, "batch": 0, "mini_batch": 0, "rank": 0, "incarnation": 1}
    assert other.grpc.write_messages(place | {"size_bytes": len(file)}, {"tensors": file}), "the same bytes, in parts"
    left = other.grpc.batch(run, 0).get("awaits", [])
    assert all(one["mini_batch"] != 0 for one in left)
    run_owner.kill()
    eventually(lambda: other.grpc.batch(run, 0)["state"] != "pending", "the other one has the run")
    assert other.grpc.batch(run, 0).get("awaits", []) == left
    Run(run, other.grpc).train_next()
