"""The proxy's configuration: HAProxy takes it, calls of gRPC and HTTP come through it, and strangers are limited."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gristmill import Batch, Credentials, RolloutClient, Shard, TrainerClient
from gristmill.v1 import run_pb2, run_pb2_grpc
from gristmill_service.access.tokens import create_token
from gristmill_service.settings import Settings
from tests.deploy.charts import DEPLOY
from tests.on_loop import Service
from tests.redis.proxy import Proxy as Network
from tests.serving import FREE_PORTS

HAPROXY = shutil.which("haproxy")
CONFIGURATION = DEPLOY / "proxy" / "haproxy.cfg"
CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}

_ESTABLISHED = "01"

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: apt-get install haproxy")


@dataclass(frozen=True)
class Proxied:
    """A service that is reached through HAProxy. port: of the proxy, on this
    machine. tokens: by role."""

    service: Service
    port: int
    ca_file: Path
    tokens: Mapping[str, str]

    def credentials(self, role: str) -> Credentials:
        return Credentials(token=self.tokens[role], ca_file=str(self.ca_file))

    def client(self) -> httpx.Client:
        """An HTTP client with one connection."""
        context = ssl.create_default_context(cafile=self.ca_file)
        return httpx.Client(base_url=f"https://localhost:{self.port}", verify=context, trust_env=False, timeout=30)

    def get(self, path: str, role: str | None = None, **headers: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path, headers=headers | self.authorization(role))

    @contextmanager
    def connected(self, protocols: list[str]) -> Iterator[ssl.SSLSocket]:
        context = ssl.create_default_context(cafile=self.ca_file)
        context.set_alpn_protocols(protocols)
        with (
            socket.create_connection(("localhost", self.port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            yield connection

    def asked(self, first_lines: str, role: str | None = None) -> int:
        """Returns the status of a request as it is written, which a client would tidy."""
        shown = "".join(f"\r\n{name}: {value}" for name, value in self.authorization(role).items())
        with self.connected(["http/1.1"]) as connection:
            connection.sendall(f"{first_lines}\r\nHost: localhost{shown}\r\n\r\n".encode())
            return _status(connection)

    def closes_at_once(self) -> bool:
        """Returns whether a connection ends before its first byte. Only the first message of TLS is sent: Python leaks
        the socket of a connection that is reset before its handshake."""
        sent = ssl.MemoryBIO()
        handshake = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            handshake.do_handshake()
        try:
            with socket.create_connection(("localhost", self.port), timeout=10) as connection:
                connection.sendall(sent.read())
                return connection.recv(1) == b""
        except ConnectionError:
            return True

    @contextmanager
    def health(self) -> Iterator[health_pb2_grpc.HealthStub]:
        """gRPC's health service, over a connection of its own."""
        credentials = grpc.ssl_channel_credentials(self.ca_file.read_bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(f"localhost:{self.port}", credentials, options) as channel:
            yield health_pb2_grpc.HealthStub(channel)

    @contextmanager
    def listing(self, token: str) -> Iterator[Callable[[], grpc.StatusCode | None]]:
        """A call over a gRPC connection of its own, which returns the status of its refusal."""
        credentials = grpc.ssl_channel_credentials(self.ca_file.read_bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(f"localhost:{self.port}", credentials, options) as channel:
            stub: Any = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]

            def ask() -> grpc.StatusCode | None:
                try:
                    metadata = (("authorization", f"Bearer {token}"),)
                    stub.ListRuns(run_pb2.ListRunsRequest(), metadata=metadata, timeout=20)
                except grpc.RpcError as error:
                    code: grpc.StatusCode = error.code()
                    return code
                return None

            yield ask

    @contextmanager
    def from_elsewhere(self) -> Iterator[Proxied]:
        """The same, called from another address."""
        with Network(self.port, source="127.0.0.2") as network:
            yield replace(self, port=network.port)

    def connections_to_the_service(self) -> int:
        port = f":{int(self.service.grpc_address.rpartition(':')[2]):04X}"
        lines = "".join(Path("/proc/net", name).read_text(encoding="ascii") for name in ("tcp", "tcp6"))
        table = [line.split() for line in lines.splitlines()]
        return sum(local.endswith(port) and state == _ESTABLISHED for _, local, _, state, *_ in table)

    def authorization(self, role: str | None) -> dict[str, str]:
        return {} if role is None else {"authorization": f"Bearer {self.tokens[role]}"}


Proxy = Callable[..., Proxied]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Starts a service with a proxy that has other limits. Each has a port of its own."""
    with ExitStack() as running:

        def start(**limits: object) -> Proxied:
            return _started(tmp_path_factory.mktemp("proxy"), running, {k: str(v) for k, v in limits.items()})

        yield start


@pytest.fixture(scope="module")
def proxied(proxy: Proxy) -> Proxied:
    return proxy()


def _started(directory: Path, running: ExitStack, limits: Mapping[str, str]) -> Proxied:
    authority, certificate = trustme.CA(), directory / "server.pem"
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    path = directory / "tokens.yaml"
    tokens = {role: create_token(path, role, [role], ["*"], None) for role in ("worker", "trainer", "scraper")}
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, tokens_file=path))
    running.callback(service.stop)
    service.start()
    port, stats = _free_port(), _free_port()
    environment = {
        **os.environ,
        "LISTEN": f"127.0.0.1:{port}",
        "STATS": f"127.0.0.1:{stats}",
        "CERT_FILE": str(certificate),
        "GRPC_ADDRESS": service.grpc_address,
        "HTTP_ADDRESS": service.http_url.removeprefix("http://"),
        **limits,
    }
    process = running.enter_context(
        subprocess.Popen([str(HAPROXY), "-db", "-f", CONFIGURATION], env=environment, stderr=subprocess.DEVNULL)
    )
    running.callback(process.terminate)
    proxied = Proxied(service, port, directory / "ca.pem", tokens)
    _wait_until_ready(stats, process)
    return proxied


def _wait_until_ready(stats: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            figures = httpx.get(f"http://127.0.0.1:{stats}/metrics", trust_env=False).text
            up = [line for line in figures.splitlines() if line.startswith("haproxy_backend_active_servers")]
            if sum(line.endswith(" 1") for line in up if "gristmill" in line) == 2:
                return
        time.sleep(0.05)
    raise AssertionError(f"haproxy is not ready; its exit status is {process.poll()}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_haproxy_takes_the_configuration_without_a_warning(tmp_path: Path) -> None:
    certificate = tmp_path / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    done = subprocess.run(
        [str(HAPROXY), "-c", "-dW", "-f", CONFIGURATION],
        env={**os.environ, "CERT_FILE": str(certificate)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def test_a_run_is_filled_and_trained_through_the_proxy(proxied: Proxied) -> None:
    address = f"localhost:{proxied.port}"
    with RolloutClient(address, "r", credentials=proxied.credentials("worker")) as client:
        client.create_run(CONFIG)
        with client.trajectory("a", 0) as trajectory:
            # Larger than any buffer of the proxy.
            trajectory.step([1, 2], [3] * 200_000, reward=1.0, is_last_step=True)
        client.finish()
    with TrainerClient(address, "r", 0, auto_commit=True, credentials=proxied.credentials("trainer")) as trainer:
        uids = [shard.metadata["uids"] for batch in trainer for shard in _acknowledged(batch)]
    assert uids == [["a"]]
    assert proxied.get("/v1/runs/r", "trainer").json()["run"] == "r"


def test_http_is_spoken_in_both_versions(proxied: Proxied) -> None:
    offered = []
    for protocols in (["h2", "http/1.1"], ["http/1.1"]):
        with proxied.connected(protocols) as connection:
            offered.append(connection.selected_alpn_protocol())
    assert offered == ["h2", "http/1.1"]
    assert proxied.get("/healthz").json() == {"status": "alive"}
    assert proxied.get("/").status_code == 200


def test_no_spelling_reaches_the_metrics_or_other_calls_of_the_inside(proxied: Proxied) -> None:
    for path in (
        "/metrics",
        "//metrics",
        "/%6detrics",
        "/metrics/",
        "/metrics?x",
        "/v1/../metrics",
        "/docs",
        "/openapi.json",
    ):
        assert proxied.asked(f"GET {path} HTTP/1.1", "scraper") == 404, path
    assert proxied.asked("GET http://localhost/metrics HTTP/1.1", "scraper") == 404
    assert proxied.asked("TRACE / HTTP/1.1") == 405


def test_grpc_checks_health_and_is_refused_all_else(proxied: Proxied) -> None:
    question = health_pb2.HealthCheckRequest()
    with proxied.health() as health:
        assert health.Check(question, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            next(health.Watch(question, timeout=20))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_callers_cannot_say_what_only_a_proxy_or_a_replica_may(proxied: Proxied) -> None:
    shown = {"gristmill-forwarded": "x", "gristmill-came-from": "10.0.0.1", "X-Forwarded-User": "ann@example.org"}
    # Marked as passed on and without the secret, it would be UNAVAILABLE, 503.
    assert proxied.get("/v1/runs", **shown).status_code == 401
    assert proxied.get("/v1/runs", "trainer", **shown).status_code == 200


def test_who_signs_in_gets_a_cookie_for_tls_only(proxied: Proxied) -> None:
    with proxied.client() as client:
        answer = client.post("/v1/session", json={"token": proxied.tokens["trainer"]})
    assert answer.status_code == 200
    assert "secure" in answer.headers["set-cookie"].lower()


def test_each_connection_has_one_of_its_own_to_the_service(proxied: Proxied) -> None:
    """The service throttles a gRPC caller by its connection: no caller is throttled for another."""
    before = proxied.connections_to_the_service()
    with ExitStack() as opened:
        for _ in range(3):
            health = opened.enter_context(proxied.health())
            for _ in range(3):
                health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert proxied.connections_to_the_service() - before == 3


def test_slow_headers_and_bodies_never_reach_the_service(proxy: Proxy) -> None:
    proxied = proxy(REQUEST_TIME="1s")
    with proxied.connected(["http/1.1"]) as headers, proxied.connected(["http/1.1"]) as body:
        headers.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        body.sendall(b"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert [_status(headers), _status(body)] == [408, 408]


def test_headers_have_a_limit(proxied: Proxied) -> None:
    assert proxied.asked("GET /healthz HTTP/1.1\r\nX: " + "a" * 20_000) in (400, 431)
    lines = "".join(f"\r\nX-{number}: a" for number in range(70))
    assert proxied.asked(f"GET /healthz HTTP/1.1{lines}") in (400, 431)


def test_a_connection_has_a_limit_of_streams(proxied: Proxied) -> None:
    with proxied.connected(["h2"]) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        head = connection.recv(9)
        assert head[3] == 4, "a frame of settings"
        settings = connection.recv(int.from_bytes(head[:3], "big"))
    assert (3, 100) in [struct.unpack(">HI", settings[at : at + 6]) for at in range(0, len(settings), 6)]


def test_an_address_has_a_limit_of_new_connections(proxy: Proxy) -> None:
    limited = proxy(CONNECT_RATE=5)
    closed = [limited.closes_at_once() for _ in range(20)]
    assert not any(closed[:5])
    assert closed[-1]


def test_an_address_has_a_limit_of_requests(proxy: Proxy) -> None:
    limited = proxy(REQUEST_RATE=20, DROP_RATE=40)
    statuses: list[int] = []

    def ask_on() -> None:
        with limited.client() as client:
            statuses.extend(client.get("/healthz").status_code for _ in range(1000))

    with pytest.raises(httpx.TransportError):
        ask_on()
    # A slow machine is given more: the rate is that of the last 10 s.
    assert statuses[:20] == [200] * 20
    assert {*statuses} == {200, 429}


def test_grpc_is_refused_beyond_the_limit_as_by_the_service(proxy: Proxy) -> None:
    limited = proxy(REQUEST_RATE=5)
    with limited.health() as health, pytest.raises(grpc.RpcError) as refused:
        [health.Check(health_pb2.HealthCheckRequest(), timeout=20) for _ in range(1000)]
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "1000") in [*refused.value.trailing_metadata()]


def test_an_address_has_a_limit_of_refused_requests(proxy: Proxy) -> None:
    limited = proxy(ERROR_RATE=10)
    with limited.client() as client:
        statuses = [client.get("/v1/runs").status_code for _ in range(15)]
    assert statuses[:10] == [401] * 10
    assert statuses[-1] == 429
    assert limited.closes_at_once()


@pytest.mark.parametrize("api", ["HTTP", "gRPC"])
def test_wrong_tokens_of_one_address_are_refused_by_the_proxy_and_another_address_goes_on(
    proxy: Proxy, api: str
) -> None:
    limited = proxy(ERROR_RATE=10)
    with limited.from_elsewhere() as other, limited.listing("wrong") as attack, limited.client() as client:
        preferred = {"authorization": "Bearer wrong", "prefer": "errors=body"}
        calls = {"HTTP": lambda: client.get("/v1/runs", headers=preferred).status_code, "gRPC": attack}
        statuses = [calls[api]() for _ in range(15)]
        assert statuses[:10] == [401 if api == "HTTP" else grpc.StatusCode.UNAUTHENTICATED] * 10
        assert statuses[-1] == (429 if api == "HTTP" else grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert limited.closes_at_once()
        with other.listing(other.tokens["worker"]) as listed:
            assert listed() is None
        with other.client() as person:
            assert [person.get(path).status_code for path in ("/", "/page/app.js")] == [200] * 2
            assert person.post("/v1/session", json={"token": other.tokens["trainer"]}).status_code == 200
            assert person.get("/v1/runs").status_code == 200


def test_an_address_has_a_limit_of_concurrent_requests(proxy: Proxy) -> None:
    limited = proxy(REQUESTS=3)
    limited.service.runs.create("r", CONFIG)
    with limited.from_elsewhere() as other, ThreadPoolExecutor(3) as pool, limited.client() as client:
        ended = threading.Event()

        def wait() -> None:
            with limited.client() as waiting:
                while not ended.is_set():
                    waiting.get(
                        "/v1/runs/r/policy-version?at_least=1&wait_s=1", headers=limited.authorization("worker")
                    )

        waits = [pool.submit(wait) for _ in range(3)]
        try:
            deadline = time.monotonic() + 30
            while client.get("/healthz").status_code != 429:
                assert time.monotonic() < deadline
            assert other.get("/v1/runs", "worker").status_code == 200
        finally:
            ended.set()
        assert all(one.result(30) is None for one in waits)


def test_an_address_has_a_limit_of_connections(proxy: Proxy) -> None:
    limited = proxy(CONNECTIONS=3)
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(limited.connected(["h2"]))
        assert limited.closes_at_once()


def _acknowledged(batch: Batch) -> Iterator[Shard]:
    for shard in batch.mini_batches():
        yield shard
        shard.ack()


def _status(connection: ssl.SSLSocket) -> int:
    return int(connection.recv(1 << 12).split(b" ")[1])
