"""Services on Redis whose master dies: watched by a sentinel, or in a cluster; a replica that may be behind takes over.

Without the flags of `DURABLE` what the replica had not yet is lost, and has to be reported; with them nothing is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gristmill_service.settings import Settings
from tests.redis.cluster import RedisCluster
from tests.redis.servers import HOST, RedisServer, Sentinel, wait_until
from tests.tools.chaos.services import JournalMode, Mode, RedisMode, ReplicasMode

DURABLE = ("--redis-min-replicas", "1")
"""A change is acknowledged when a replica has it, too."""
_REPLICAS = 2
_LAG_S = 1.0
"""Bounds how far a replica that was not paused may be behind."""
_LONGEST_S = 60.0


class FailoverMode(ReplicasMode):
    may_roll_back = may_fail_batches = True
    often = ("master killed",) * 4
    flags: tuple[str, ...] = ()

    def _fall_behind(self, master: RedisServer, replica: RedisServer) -> None:
        """The replica hears nothing of its master for a moment, mostly, before that dies."""
        if self.may_roll_back:
            self.rolled_back_since = time.time() - _LAG_S
        if self._draw.random() < 0.7:
            # What was sent to it before would still be read; this ends the connection, and it cannot make another.
            replica.pause()
            master.client().client_kill_filter(_type="replica")
            time.sleep(0.1 + self._pause_s(0.5))


class SentinelMode(FailoverMode):
    def __init__(self, directory: Path, draw: random.Random) -> None:
        super().__init__(directory, draw)
        self._watched = Sentinel(directory / "redis", appendonly="always").start()
        self._serve([self._watched.url] * _REPLICAS, *self.flags)
        self.faults = self._service_faults() | {"master killed": self._fail_over, "replica of redis killed": self._stop}

    def _fail_over(self) -> None:
        replica = self._watched.replica
        assert replica is not None
        self._fall_behind(self._watched.master, replica)
        self._watched.master.kill()
        replica.resume()
        dead = self._watched.kill_master()
        time.sleep(self._pause_s(0.5))
        dead.start()
        self._watched.follow()

    def _stop(self) -> None:
        replica = self._watched.replica
        assert replica is not None
        replica.kill()
        time.sleep(self._pause_s(1.0))
        replica.start()
        self._watched.follow()

    def _keys(self) -> Iterable[bytes]:
        return self._watched.master.client().scan_iter()

    def close(self) -> None:
        super().close()
        self._watched.stop()


class DurableSentinelMode(SentinelMode):
    may_roll_back = may_fail_batches = False
    flags = DURABLE


class ClusterMode(FailoverMode):
    def __init__(self, directory: Path, draw: random.Random) -> None:
        super().__init__(directory, draw)
        self._cluster = RedisCluster(directory / "redis", appendonly="always").start()
        self._pairs = [(master, self._replica_of(number)) for number, master in enumerate(self._cluster.nodes)]
        self._serve([self._cluster.url] * _REPLICAS, *self.flags)
        self.faults = self._service_faults() | {"master killed": self._fail_over}

    def _replica_of(self, number: int) -> RedisServer:
        lines = ["cluster-enabled yes", "cluster-node-timeout 2000"]
        replica = RedisServer(self.directory / "redis" / f"replica-{number}", appendonly="always", arguments=lines)
        client, master = replica.start().client(), self._cluster.nodes[number]
        client.execute_command("CLUSTER", "MEET", HOST, self._cluster.nodes[0].port)
        name = master.client().execute_command("CLUSTER", "MYID")
        # It has to have heard of the master before it can follow it.
        wait_until(lambda: client.execute_command("CLUSTER", "REPLICATE", name), "the replica follows", _LONGEST_S)
        wait_until(lambda: _follows(replica), "the replica has what the master has", _LONGEST_S)
        return replica

    def _fail_over(self) -> None:
        number = self._draw.randrange(len(self._pairs))
        master, replica = self._pairs[number]
        self._fall_behind(master, replica)
        master.kill()
        replica.resume()
        wait_until(lambda: replica.client().role()[0] == b"master", "the replica is promoted", _LONGEST_S)
        time.sleep(self._pause_s(0.5))
        master.start()
        wait_until(lambda: _follows(master), "the old master follows", _LONGEST_S)
        self._pairs[number] = (replica, master)

    def _keys(self) -> Iterable[bytes]:
        return [key for master, _ in self._pairs for key in master.client().scan_iter()]

    def close(self) -> None:
        super().close()
        for pair in self._pairs:
            for server in pair:
                server.stop()


class DurableClusterMode(ClusterMode):
    may_roll_back = may_fail_batches = False
    flags = DURABLE


def _follows(server: RedisServer) -> bool:
    info = server.client().info("replication")
    return bool(info["role"] == "slave" and info["master_link_status"] == "up")


MODES: dict[str, Callable[[Path, random.Random], Mode]] = {
    "journal": JournalMode,
    "redis": RedisMode,
    "sentinel": SentinelMode,
    "cluster": ClusterMode,
}
if "redis_min_replicas" in Settings.model_fields:
    MODES |= {"sentinel-durable": DurableSentinelMode, "cluster-durable": DurableClusterMode}
