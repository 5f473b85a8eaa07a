"""A real cluster of Redis for tests, with and without replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.crc import key_slot

from tests.redis.servers import HOST, Appendonly, RedisServer, wait_until


class RedisCluster:
    """Three masters, each with a third of the slots, and, where asked for, with a replica of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        appendonly: Appendonly = "no",
        arguments: Sequence[str] = (),
        with_replicas: bool = False,
    ) -> None:
        lines = ["cluster-enabled yes", "cluster-node-timeout 2000", *arguments]

        def server(name: str) -> RedisServer:
            return RedisServer(directory / name, appendonly=appendonly, arguments=lines)

        self.nodes = [server(f"node-{number}") for number in range(3)]
        self.replicas = [server(f"replica-{number}") for number in range(3 * with_replicas)]

    @property
    def url(self) -> str:
        return f"redis+cluster://{self.nodes[0].address}"

    def start(self) -> Self:
        """Returns when every node knows the others and serves its slots."""
        try:
            for node in self._all:
                node.start()
            self._join()
            self._replicate()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for node in self._all:
            node.stop()

    @property
    def _all(self) -> list[RedisServer]:
        return [*self.nodes, *self.replicas]

    def node_of(self, key: bytes) -> RedisServer:
        """The node that serves this key now."""
        slot = key_slot(key)
        asked = next(node for node in self._all if node.process is not None)
        for line in asked.client().execute_command("CLUSTER", "SLOTS"):
            if line[0] <= slot <= line[1]:
                return next(node for node in self._all if node.port == line[2][1])
        raise LookupError(f"no node serves slot {slot}")

    def kill_node_of(self, key: bytes) -> RedisServer:
        """Kills the node that serves the key, waits until its replica does, and returns the dead one, which may be
        started again and becomes a replica."""
        dead = self.node_of(key)
        dead.kill()
        wait_until(lambda: self.node_of(key) is not dead and self._is_whole(), "its replica serves", 30)
        return dead

    def depose_node_of(self, key: bytes) -> RedisServer:
        """Lets the replica of the node that serves the key take over though that lives; returns the deposed one."""
        deposed = self.node_of(key)
        heir = next(node for node in self._all if self._follows(node, deposed))
        heir.client().execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        wait_until(lambda: heir.client().role()[0] == b"master", "it is promoted")
        return deposed

    def wait_for_replicas(self) -> None:
        """Returns when each master has a replica that follows."""
        wait_until(self._is_whole, "the cluster is whole", 30)
        wait_until(lambda: sum(node.client().role()[0] == b"slave" for node in self._all) == 3, "there are replicas")
        wait_until(lambda: all(map(_is_followed, self._all)), "replicas follow", 30)

    def _follows(self, node: RedisServer, master: RedisServer) -> bool:
        role = node.client().role()
        return bool(role[0] == b"slave" and role[2] == master.port and role[3] == b"connected")

    def _is_whole(self) -> bool:
        return all(self._serves(node.client()) for node in self._all if node.process is not None)

    def _replicate(self) -> None:
        for node, replica in zip(self.nodes, self.replicas, strict=False):
            client, name = replica.client(), _node_id(node)
            wait_until(lambda client=client, name=name: name in str(client.execute_command("CLUSTER NODES")), "known")  # type: ignore[misc]
            client.execute_command("CLUSTER", "REPLICATE", name)
        if self.replicas:
            self.wait_for_replicas()

    def begin_move(self, key: bytes) -> RedisServer:
        """Begins to move the key's slot to another node, which it returns: keys that are not there yet answer ASK."""
        source = self.node_of(key)
        target = next(node for node in self.nodes if node is not source)
        slot = key_slot(key)
        target.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", _node_id(source))
        source.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", _node_id(target))
        return target

    def move(self, key: bytes) -> RedisServer:
        """Moves the key's slot with all of its keys to another node, which it returns: the old one answers MOVED."""
        source = self.node_of(key)
        target = self.begin_move(key)
        slot = key_slot(key)
        client = source.client()
        for name in client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000):
            client.execute_command("MIGRATE", HOST, target.port, name, 0, 5000)
        for node in (target, source, *self.nodes):
            node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", _node_id(target))
        return target

    def _join(self) -> None:
        first, *others = self.nodes
        share = -(-16384 // len(self.nodes))
        for number, node in enumerate(self.nodes):
            client = node.client()
            # Epochs that differ from the start spare the nodes a dispute.
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "ADDSLOTS", *range(number * share, min((number + 1) * share, 16384)))
        for other in [*others, *self.replicas]:
            first.client().execute_command("CLUSTER", "MEET", HOST, other.port)
        clients = [node.client() for node in self.nodes]
        wait_until(lambda: all(self._serves(client) for client in clients), "the cluster is whole")

    def _serves(self, client: redis.Redis) -> bool:
        lines = client.execute_command("CLUSTER", "INFO").decode().split()
        return {"cluster_state:ok", f"cluster_size:{len(self.nodes)}"} <= set(lines)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _is_followed(node: RedisServer) -> bool:
    role = node.client().role()
    return bool(role[3] == b"connected" if role[0] == b"slave" else len(role[2]) == 1)


def _node_id(node: RedisServer) -> str:
    return str(node.client().execute_command("CLUSTER", "MYID").decode())
