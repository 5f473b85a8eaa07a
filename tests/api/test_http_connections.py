"""HTTP connections: counted when they are accepted, closed where nothing moves, and their calls end with them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from fastapi import FastAPI, Response

from gristmill_service.access.certificates import Certificates
from gristmill_service.api.http import server
from gristmill_service.api.http.guards import connections
from gristmill_service.api.http.server import HttpServer
from tests.api.apis import hangs_up
from tests.on_loop import on_loop
from tests.run.harness import wait_until

LARGE = 30_000_000
cancelled = list[str]()
app = FastAPI()


@app.get("/small")
async def small() -> str:
    return "small"


@app.get("/large")
async def large() -> Response:
    return Response(bytes(LARGE))


@app.get("/long")
async def long() -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        cancelled.append("long")
        raise


Serve = Callable[..., HttpServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a server that has at most that many connections."""
    with ExitStack() as opened:

        def start(most: int = 100, certificates: Certificates | None = None) -> HttpServer:
            monkeypatch.setattr(server, "most_connections", lambda: most)
            running: HttpServer = on_loop(HttpServer, app, "127.0.0.1:0", 1.0, certificates)
            on_loop(running.start)
            opened.callback(on_loop, running.wait_until_idle)
            opened.callback(on_loop, running.refuse_new_calls)
            return running

        yield start


@pytest.fixture
def wires() -> Iterator[Callable[..., socket.socket]]:
    """Opens connections to a server, from one of this machine's addresses."""
    with ExitStack() as opened:

        def connect(to: HttpServer, came_from: str = "127.0.0.1") -> socket.socket:
            where = urlsplit(to.url)
            address = (where.hostname, where.port)
            wire = socket.create_connection(address, timeout=20, source_address=(came_from, 0))
            return opened.enter_context(wire)

        yield connect


def is_open(wire: socket.socket) -> bool:
    wire.settimeout(0.2)
    try:
        wire.recv(1)
    except TimeoutError:
        return True
    return False


def answer(running: HttpServer) -> int:
    verify = ssl._create_unverified_context()
    return httpx.get(f"{running.url}/small", trust_env=False, verify=verify).status_code


def unread(wire: socket.socket) -> None:
    """Asks for an answer and reads none of it."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")


def test_connections_that_never_begin_a_handshake_are_counted(
    serve: Serve, wires: Callable[..., socket.socket], tmp_path: Path
) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    key.write_bytes(leaf.private_key_pem.bytes())
    for blob in leaf.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    running = serve(8, Certificates(cert, key, None))
    silent = [wires(running) for _ in range(20)]
    assert [answer(running) for _ in range(3)] == [200] * 3
    assert all(map(hangs_up, silent[:12]))


def test_a_machine_has_three_quarters_of_the_connections(serve: Serve, wires: Callable[..., socket.socket]) -> None:
    running = serve(8)
    others = [wires(running, "127.0.0.2") for _ in range(2)]
    greedy = [wires(running) for _ in range(20)]
    for wire in greedy:
        # The system gives silent ones to the service a second later, in no order.
        wire.sendall(b"GET /")
    assert all(map(hangs_up, greedy[:14]))
    assert all(map(is_open, [*others, *greedy[14:]]))


def test_connections_that_say_nothing_and_are_closed_again_are_never_served(
    serve: Serve, wires: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve()
    served: list[connections.Connection] = []
    monkeypatch.setattr(connections.Connection, "open", lambda connection, *_: served.append(connection))

    def are_served() -> bool:
        served.clear()
        opened = [wires(running) for _ in range(20)]
        time.sleep(0.05)
        for wire in opened:
            wire.close()
        time.sleep(0.05)
        return bool(served)

    # A machine that stalls for a second may serve them, but not every time.
    assert not all(are_served() for _ in range(5))


def test_bodies_that_come_slowly_and_answers_that_nobody_reads_give_way(
    serve: Serve, wires: Callable[..., socket.socket]
) -> None:
    running = serve(8)
    held = [wires(running) for _ in range(6)]
    for number, wire in enumerate(held):
        if number % 2:
            unread(wire)
        else:
            wire.sendall(b"POST /small HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1")
    assert [answer(running) for _ in range(10)] == [200] * 10


def test_an_answer_that_nobody_reads_is_not_kept(
    serve: Serve, wires: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.2)
    running = serve()
    wire = wires(running)
    unread(wire)
    wait_until(lambda: bool(running._server.server_state.tasks))
    wait_until(lambda: not running._server.server_state.connections)
    # The request ends a moment after its connection.
    wait_until(lambda: not running._server.server_state.tasks)


def test_an_answer_that_is_read_slowly_comes_whole(
    serve: Serve, wires: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    running = serve()
    wire = wires(running)
    wire.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
    size = 0
    while size < LARGE:
        # It takes some seconds, and never half of one without progress.
        size += len(wire.recv(1 << 16))
        time.sleep(0.005)
    assert answer(running) == 200


def test_a_body_that_is_not_read_does_not_keep_its_connection(
    serve: Serve, wires: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    running = serve()
    wire = wires(running)
    wire.sendall(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1")
    # Until the service hangs up.
    assert b"".join(iter(lambda: wire.recv(4096), b"")).startswith(b"HTTP/1.1 404")


def test_a_caller_that_hangs_up_cancels_what_it_asked_for(serve: Serve, wires: Callable[..., socket.socket]) -> None:
    running = serve()
    wire = wires(running)
    cancelled.clear()
    wire.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
    wait_until(lambda: bool(running._server.server_state.tasks))
    wire.close()
    wait_until(lambda: bool(cancelled))
    # The server forgets a task in the loop's turn after the task has ended.
    wait_until(lambda: not running._server.server_state.tasks)
