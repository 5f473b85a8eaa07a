"""Clients and replicas that live on through many renewals of their certificates keep no connection of an earlier one,
and cut no call."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from gristmill import Credentials
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.storage.run_store import OwnedElsewhereError
from tests.access.conftest import Files, Serve
from tests.client.faces import FACES, connecting
from tests.test_off_loop import Call

CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
RENEWALS = 20


def connections(address: str) -> int:
    """Established connections to this address on loopback."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    # gRPC's sockets for IPv4 are sockets for IPv6.
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    columns = [line.split() for table in tables for line in table]
    return sum(remote.endswith(port) and state == "01" for _, _, remote, state, *_ in columns)


@pytest.mark.parametrize("face", FACES)
def test_a_client_closes_the_connection_of_a_renewed_certificate_after_its_last_call(
    serve: Serve, files: Files, monkeypatch: pytest.MonkeyPatch, face: str
) -> None:
    """Each left 63 KB and a descriptor until gRPC took the connection for idle."""
    monkeypatch.setattr("gristmill._client.connection.credentials._LOOK_S", 0.0)
    cert, key = files.certify("server")
    service = serve(tls_cert_file=cert, tls_key_file=key)
    service.runs.create("r", CONFIG)
    answers: list[int] = []

    def renew() -> None:
        changed = os.stat(files.ca_file).st_mtime_ns + 10**9
        os.utime(files.ca_file, ns=(changed, changed))

    with (
        connecting(face) as connect,
        connect(service.grpc_address, "r", credentials=Credentials(ca_file=files.ca_file)) as client,
    ):
        core = client.awaited if face == "awaited" else client._core
        channels = core._connection.channels
        waiting = threading.Thread(target=lambda: answers.append(client.wait_policy_version(1, 60)))
        waiting.start()
        while not [channel for channel in channels._made.values() if channel.calls]:
            time.sleep(0.01)
        for _ in range(RENEWALS):
            renew()
            assert client.policy_version() == 0
        assert [channel.calls for channel in channels._before if channel.calls] == [1], "the call that waits goes on"
        assert len(channels._before) <= 2
        service.runs.get("r").announce(1)
        waiting.join(30)
        assert answers == [1]
        client.policy_version()
        assert channels._before == []
        deadline = time.monotonic() + 30
        while connections(service.grpc_address) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert connections(service.grpc_address) == 1


def test_a_replica_closes_the_connection_of_a_renewed_certificate_after_its_last_call(files: Files) -> None:
    async def test() -> None:
        released = asyncio.Event()

        async def answer(request: bytes, _: Any) -> bytes:
            if request == b"wait":
                await released.wait()
            return request

        async def is_owner(*_: str) -> bool:
            return True

        ca = files.ca_file.read_bytes()
        cert, key = (path.read_bytes() for path in files.certify("server"))
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
        handlers = {"y": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x", handlers)])
        await server.start()
        shown = [grpc.ssl_channel_credentials(ca)]
        forwarding = Forwarding(is_owner, lambda: shown[-1])
        owner = OwnedElsewhereError("owned", "run", f"127.0.0.1:{port}")
        waiting = asyncio.create_task(forwarding.unary("/x/y", b"wait", owner, Call()))
        assert await forwarding.unary("/x/y", b"0", owner, Call()) == b"0"
        for number in range(RENEWALS):
            shown.append(grpc.ssl_channel_credentials(ca))
            assert await forwarding.unary("/x/y", b"%d" % number, owner, Call()) == b"%d" % number
        assert (len(forwarding._renewed), len(forwarding._calls)) == (1, 2)
        released.set()
        assert await waiting == b"wait"
        assert (len(forwarding._renewed), len(forwarding._calls)) == (0, 1)
        await forwarding.close()
        await server.stop(None)

    asyncio.run(test())
