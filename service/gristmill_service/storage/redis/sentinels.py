"""Which server is the master, as its sentinels say: all of them are asked, and the newest configuration counts.

One sentinel may be cut off and still name a master that the others have replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import redis
from redis.sentinel import MasterNotFoundError, Sentinel

Address = tuple[str, int]


class Sentinels(Sentinel):
    """Thread-safe. nodes: for each sentinel the clients to try, one after another, until one is let in."""

    def __init__(self, nodes: Sequence[Sequence[redis.Redis]], **options: Any) -> None:
        cast(Any, super()).__init__([], sentinel_kwargs={}, **options)
        self.sentinels = [client for clients in nodes for client in clients]
        self._nodes = [list(clients) for clients in nodes]
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._found: Address | redis.RedisError

    def discover_master(self, service_name: str) -> Address:
        """Raises MasterNotFoundError where no sentinel knows of one that is up, and AuthenticationError where none lets
        us in."""
        called_at = time.monotonic()
        with self._lock:
            # A crowd of new connections shares an answer that was asked for after all of them had come.
            if self._asked_at < called_at:
                self._asked_at = time.monotonic()
                self._found = self._ask_all(service_name)
            if isinstance(self._found, redis.RedisError):
                raise type(self._found)(*self._found.args)
            return self._found

    def _ask_all(self, service_name: str) -> Address | redis.RedisError:
        answers, errors = list[tuple[int, Address | None]](), list[redis.RedisError]()
        for clients in self._nodes:
            try:
                answers.append(_ask(clients, service_name))
            except redis.RedisError as error:
                errors.append(error)
        newest = max((epoch for epoch, _ in answers), default=0)
        for epoch, address in answers:
            if epoch == newest and address is not None:
                return address
        if errors and not answers and all(isinstance(error, redis.AuthenticationError) for error in errors):
            return redis.AuthenticationError(f"by its sentinels: {errors[0]}")
        reasons = "; ".join(map(str, errors)) or "it is down"
        return MasterNotFoundError(f"No master found for {service_name!r}: {reasons}")


def _ask(clients: list[redis.Redis], service_name: str) -> tuple[int, Address | None]:
    """The epoch of what one sentinel knows, and the address; None where the master is down."""
    for client in clients:
        pipeline: Any = client.pipeline(transaction=False)
        pipeline.execute_command("SENTINEL MASTER", service_name)
        pipeline.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", service_name)
        try:
            state, address = pipeline.execute()
        except redis.AuthenticationError:
            if client is clients[-1]:
                raise
            continue
        if client is not clients[0]:
            clients.remove(client)
            clients.insert(0, client)
        host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in address)
        is_up = state["is_master"] and not state["is_sdown"] and not state["is_odown"]
        # While it fails over, a sentinel already names the heir, beside the state of the master before.
        is_heir = (host, int(port)) != (state["ip"], state["port"])
        return int(state["config-epoch"]), (host, int(port)) if is_up or is_heir else None
    raise AssertionError("a sentinel has a client")
