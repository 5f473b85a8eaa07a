"""Processes that share runs on Redis, without their APIs, in this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import redis

from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.storage.redis.connection import RedisAddress, connect
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.scripts import Outcome
from gristmill_service.storage.redis.shard_store import RedisShardStore
from tests.on_loop import Runs
from tests.redis.servers import RedisServer
from tests.run.harness import CONFIG

CREATED = {**CONFIG, "train_batch_size": 1, "max_buffered_batches": 1000, "max_staleness": 100_000}
PREFIX = "runs"


class Replica:
    """What a service is on Redis, without its APIs."""

    def __init__(self, url: str, name: str, lease_s: float, **more: Any) -> None:
        self.client = connect(RedisAddress(url=url))
        self.run_store = RedisRunStore(self.client, PREFIX, lease_s)
        self.store = RedisShardStore(self.client, self.run_store, PREFIX)
        self.runs = Runs(self.store, self.run_store, build_batch=build_batch, make_monitor=Monitor, **more)
        self.run_store.advertise(name, name)
        self._is_open = True

    def die(self) -> None:
        """Its threads end, and it says goodbye to nobody: its leases are as if they had run out."""
        names = list(self.runs._runs)
        self.run_store._leases.close()
        self.run_store._scripts.step = lambda *_, **__: Outcome.FENCED  # type: ignore[method-assign]
        self.close()
        with closing(connect(RedisAddress(url=self.url))) as client:
            for name in names:
                client.delete(self.run_store._keys(name).owner)

    @property
    def url(self) -> str:
        assert isinstance(self.client, redis.Redis)
        options = self.client.connection_pool.connection_kwargs
        return f"redis://{options['host']}:{options['port']}"

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.runs.close(5)
            self.run_store.close()
            self.client.close()


Join = Callable[..., Replica]


def published(replica: Replica, run: str, batch: int) -> bool:
    return replica.runs.get(run).batch(batch).state is BatchState.PUBLISHED


def keys(server: RedisServer, run: str) -> list[str]:
    names: Any = server.client().keys("*")
    return [key.decode() for key in names if run in key.decode()]
