"""A client of several replicas finds one that serves: refused, broken, hanging, or back again."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill import (
    AsyncRolloutClient,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    RolloutClient,
    TrainerClient,
    UnavailableError,
)
from gristmill._client.connection import retries
from gristmill._client.connection.channels import Channels, addresses_of
from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.failures import failure_of
from gristmill._client.connection.retries import Backoff
from gristmill._client.trainer.shards.pull import stream
from gristmill._wire.addresses import ShardAddress
from gristmill.errors import GristmillError
from gristmill.v1 import trainer_pb2_grpc
from tests.client.faces import AwaitedClient, Connect
from tests.client.faulty import Fault, FaultyService, refuse, serving, unavailable
from tests.client.test_shards import CONFIG, ROWS, shard_bytes
from tests.client.test_transport import Status, Streams
from tests.serving import StartService

FAST_S = 7.0
"""More than any failover takes that waits for nothing, also on a busy machine; less than any bound on a hang."""


@pytest.fixture(autouse=True)
def in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.SystemRandom, "shuffle", lambda self, values: None)


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def step(client: RolloutClient, uid: str = "a", sample: int = 0) -> None:
    with client.trajectory(uid, sample, policy_version=0) as trajectory:
        trajectory.step([1], [2], reward=1.0, is_last_step=True)


def deliver(client: RolloutClient, uid: str) -> None:
    step(client, uid)
    client.flush()


Replica = tuple[FaultyService, str, Callable[[], None]]
StartReplica = Callable[..., Replica]


def turns(client: RolloutClient | AwaitedClient) -> int:
    """How often the client went on to the next replica."""
    core = client._core if isinstance(client, RolloutClient) else client.awaited
    return core._connection.channels._current_number


@pytest.fixture
def connect(connect: Connect) -> Iterator[Connect]:
    """Makes a client of either kind, closed with the test."""
    with ExitStack() as opened:

        def connect_to(*addresses: str, timeout_s: float = 20.0) -> Any:
            client = connect(",".join(addresses), "run", timeout_s=timeout_s)
            opened.callback(client.close)
            return client

        yield connect_to


@pytest.fixture
def replicas() -> Iterator[StartReplica]:
    """Starts fake replicas: gives the service, its address, and what stops it."""
    with ExitStack() as all_stopped:

        def start(port: int = 0) -> Replica:
            service, running = FaultyService(), ExitStack()
            address = running.enter_context(serving(service, port=port))
            all_stopped.callback(running.close)
            return service, address, running.close

        yield start


# Addresses.


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("here:1", ("here:1",)),
        ("one:50051, two:50051", ("one:50051", "two:50051")),
        ("unix:/a/b,[::1]:65535", ("unix:/a/b", "[::1]:65535")),
    ],
)
def test_an_address_names_one_replica_or_several(address: str, parts: tuple[str] | tuple[str, str]) -> None:
    assert addresses_of(address) == parts


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("", "''"),
        ("here", "'here'"),
        ("one:1,", "'' in 'one:1,'"),
        ("one:1,two", "'two' in 'one:1,two'"),
        ("one:1,http://two:1", "'http://two:1' in "),
        ("one:0,two:1", "'one:0' in "),
        ("one:1,two:65536", "'two:65536' in "),
        ("one:1,:2", "':2' in "),
        ("unix:,one:1", "'unix:' in "),
        (["one:1"], r"\['one:1'\]"),
    ],
)
def test_what_is_no_address_is_named(address: Any, named: str) -> None:
    for make in (
        lambda: RolloutClient(address, "run"),
        lambda: AsyncRolloutClient(address, "run"),
        lambda: TrainerClient(address, "run", 0),
    ):
        with pytest.raises(InvalidArgumentError, match=f"address is {named}.*expected HOST:PORT or unix:/PATH"):
            make()


def test_many_clients_spread_over_the_replicas_however_they_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    orders = set()
    for _ in range(200):
        random.seed(0)
        orders.add(tuple(Channels("a:1,b:1,c:1", Credentials())._addresses))
    assert len(orders) == 6


# A replica that is unreachable.


def test_one_that_refuses_connections_is_passed_over(
    connect: Connect, replicas: StartReplica, closed_port: str
) -> None:
    service, address, _ = replicas()
    client = connect(closed_port, address)
    with within(FAST_S):
        assert client.policy_version() == 7
        deliver(client, "a")
    assert turns(client) == 1
    assert service.arrivals == [("a", 0, 0)]


def test_one_that_is_stopping_is_passed_over(connect: Connect, replicas: StartReplica) -> None:
    (first, one, _), (second, two, _) = replicas(), replicas()
    first.before.extend([refuse(UnavailableError("shutting down"), "30000")])
    client = connect(one, two)
    with within(FAST_S):
        assert client.policy_version() == 7
        deliver(client, "a")
    assert (first.arrivals, second.arrivals) == ([], [("a", 0, 0)])


def test_a_replica_that_is_back_is_used_when_the_other_dies(connect: Connect, replicas: StartReplica) -> None:
    (_, one, stop_first), (second, two, stop_second) = replicas(), replicas()
    client = connect(one, two)
    deliver(client, "a")
    stop_first()
    with within(FAST_S):
        deliver(client, "b")
    again, _, _ = replicas(port=int(one.rpartition(":")[2]))
    deliver(client, "c")
    stop_second()
    # gRPC tries an unreachable replica again after 2 s at the latest.
    with within(FAST_S + 2):
        deliver(client, "d")
    assert [uid for uid, *_ in second.arrivals] == ["b", "c"]
    assert [uid for uid, *_ in again.arrivals] == ["d"]


def test_when_none_serves_all_are_named(connect: Connect, closed_port: str, replicas: StartReplica) -> None:
    _, address, stop = replicas()
    stop()
    client = connect(closed_port, address, timeout_s=2.5)
    with within(FAST_S), pytest.raises(UnavailableError, match=rf"{closed_port}, {address}: the service cannot be"):
        client.policy_version()
    assert turns(client) >= 2
    with pytest.raises(UnavailableError, match=rf"uid 'a' sample 0: {closed_port}, {address}: .*gave up after 2.5 s"):
        deliver(client, "a")


def test_an_error_of_one_replica_names_all_of_them() -> None:
    status = Status("UNAVAILABLE", "away", gristmill_error="UnavailableError")
    assert str(failure_of(status, "a:1, b:1").error) == "a:1, b:1: away"


# Calls under way.


def test_a_call_that_breaks_is_made_again_elsewhere(connect: Connect, replicas: StartReplica) -> None:
    (first, one, stop), (second, two, _) = replicas(), replicas()
    first.gate.clear()
    client = connect(one, two)
    with ThreadPoolExecutor(1) as killer:
        killed = killer.submit(lambda: first.entered.wait(60) and stop())
        with within(FAST_S):
            deliver(client, "a")
        killed.result()
    assert second.arrivals == [("a", 0, 0)]


def test_a_call_that_hangs_is_made_again_elsewhere(
    connect: Connect, replicas: StartReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_ATTEMPT_AMONG_OTHERS_S", 3.0)
    (first, one, _), (second, two, _) = replicas(), replicas()
    first.gate.clear()
    client = connect(one, two)
    with within(FAST_S):
        deliver(client, "a")
    assert turns(client) == 1
    assert second.arrivals == [("a", 0, 0)]


def test_a_slow_service_is_given_time_once_all_replicas_were_tried(
    connect: Connect, replicas: StartReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_ATTEMPT_AMONG_OTHERS_S", 0.1)
    slow = lambda _: time.sleep(0.5)  # noqa: E731
    (first, one, _), (second, two, _) = replicas(), replicas()
    first.before.append(slow)
    second.before.append(slow)
    client = connect(one, two)
    assert client.policy_version() == 7
    assert turns(client) == 1


def test_what_must_not_be_repeated_is_asked_once_and_waited_for(replicas: StartReplica) -> None:
    (first, one, _), (second, two, _) = replicas(), replicas()
    first.before.extend([unavailable])
    second.before.extend([lambda _: time.sleep(0.3)])
    with RolloutClient(f"{one},{two}", "run") as client:
        with pytest.raises(UnavailableError):
            client.seal()
        assert client.seal() == (0, 1)
    assert (first.calls, second.calls) == ([0], [0])


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (refuse(ResourceExhaustedError("full"), "20"), None),
        (refuse(InvalidArgumentError("no")), InvalidArgumentError),
        (refuse(NotFoundError("none")), NotFoundError),
    ],
)
def test_what_is_refused_is_not_asked_elsewhere(
    connect: Connect, replicas: StartReplica, refusal: Fault, raised: type[GristmillError] | None
) -> None:
    (first, one, _), (second, two, _) = replicas(), replicas()
    client = connect(one, two)
    for ask in (client.policy_version, lambda: deliver(client, "a")):
        first.before.append(refusal)
        if raised is None:
            ask()
        else:
            with pytest.raises(raised):
                ask()
    assert turns(client) == 0
    assert second.calls == []


def test_calls_that_fail_together_fail_over_once(replicas: StartReplica) -> None:
    (first, one, _), (_, two, _), (third, three, _) = replicas(), replicas(), replicas()
    all_there = threading.Barrier(6)

    def fail_together(context: grpc.ServicerContext) -> None:
        all_there.wait(60)
        unavailable(context)

    first.before = deque([fail_together] * 6)
    third.before = deque([unavailable] * 6)
    with RolloutClient(",".join((one, two, three)), "run") as client, ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda _: client.policy_version(), range(6))) == [7] * 6
        assert client._transport.channels._current_number == 1
    assert len(third.before) == 6


def test_a_client_closed_while_it_looks_for_a_replica_says_so(closed_port: str) -> None:
    client = RolloutClient(f"{closed_port},{closed_port}", "run")
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(client.policy_version)
        time.sleep(0.2)
        client.close()
        with pytest.raises(Exception, match=r"this RolloutClient is closed|Channel closed"):
            asking.result()
        with pytest.raises(Exception, match="this client is closed"):
            client._transport.channels._current()


@given(st.integers(1, 5), st.integers(1, 30), st.one_of(st.none(), st.floats(0, 100)))
def test_pauses_grow_by_the_round(replicas: int, attempts: int, pushback_s: float | None) -> None:
    backoff = Backoff(replicas)
    for attempt in range(1, attempts + 1):
        pause_s = backoff.pause_s(pushback_s, is_of_replica=True)
        if attempt % replicas:
            assert pause_s <= 0.05
        else:
            least = pushback_s or 0.0
            assert least <= pause_s <= least + min(5.0, 0.05 * 2 ** (attempt // replicas - 1))


# Streams.


@contextmanager
def streaming(*answers: Iterable[bytes | grpc.StatusCode]) -> Iterator[tuple[str, grpc.Server]]:
    """A replica that answers ReadShard so."""
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Streams(*answers, are_zstd=False), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", server
    server.stop(None).wait()


def read(size: int, *addresses: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with TrainerClient(",".join(addresses), "run", 0, timeout_s=20.0) as trainer:
        return stream(trainer._transport, ShardAddress("run", "policy", 0, 0, 0), size)


def test_a_stream_whose_replica_dies_is_read_again_from_the_other() -> None:
    (data,) = shard_bytes(ROWS, CONFIG)
    half_sent = threading.Event()

    def half() -> Iterator[bytes]:
        yield data[:100]
        half_sent.set()
        time.sleep(1)

    with streaming(half()) as (one, server), streaming([data]) as (two, _), ThreadPoolExecutor(1) as killer:
        killed = killer.submit(lambda: half_sent.wait(60) and server.stop(None))
        with within(FAST_S):
            tensors, _ = read(len(data), one, two)
        killed.result()
    assert len(tensors["sequences"]) == 6


# Real services.


@pytest.mark.slow
def test_a_wait_leaves_a_service_that_is_paused_in_seconds(start_service: StartService, run_name: str) -> None:
    """Also late in the wait, when keepalive is all that goes over the connection, and the service has permitted it."""
    first, second = start_service(), start_service()
    for service in (first, second):
        with RolloutClient(service.grpc_address, run_name) as client:
            client.create_run(CONFIG)
    with (
        RolloutClient(f"{first.grpc_address},{second.grpc_address}", run_name) as client,
        TrainerClient(second.grpc_address, run_name, 0) as trainer,
        ThreadPoolExecutor(1) as threads,
    ):
        trainer.announce_policy_version(1)
        waiting = threads.submit(client.wait_policy_version, 1, 60)
        time.sleep(15)
        assert client._transport.channels._current_number == 0
        os.kill(first.pid, signal.SIGSTOP)
        try:
            with within(30):
                assert waiting.result() == 1
        finally:
            os.kill(first.pid, signal.SIGCONT)
            # A SIGTERM that comes before it runs again may be lost.
            with RolloutClient(first.grpc_address, run_name) as late:
                late.status()
