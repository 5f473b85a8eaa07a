"""probe_address: a listener for probes and metrics alone, which goes on answering until the service has ended."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.access.tokens import create_token
from gristmill_service.api.http.waiting import WaitingServer
from gristmill_service.settings import Settings, load_settings
from tests.cli.terminal import gristmill
from tests.on_loop import Service, on_loop
from tests.run.harness import CONFIG, wait_until
from tests.serving import FREE_PORTS


@contextmanager
def serving(**more: Any) -> Iterator[Service]:
    settings = {**FREE_PORTS, "probe_address": "127.0.0.1:0", "store": "memory", "shutdown_grace_s": 20, **more}
    service = Service(Settings(**settings))
    service.start()
    try:
        yield service
    finally:
        service.stop()


def get(url: str, **more: Any) -> httpx.Response:
    return httpx.get(url, trust_env=False, **more)


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def test_it_serves_probes_and_metrics_and_nothing_else() -> None:
    with serving() as service:
        service.runs.create("shown", CONFIG)
        url = str(service.probe_url)
        assert url != service.http_url
        assert (get(f"{url}/healthz").json(), get(f"{url}/readyz").json()) == ({"status": "alive"}, {"status": "ready"})
        assert 'run="shown"' in get(f"{url}/metrics").text
        assert httpx.head(f"{url}/healthz", trust_env=False).status_code == 200
        others = ("/", "/docs", "/openapi.json", "/v1/runs", "/v1/runs/shown", "/v1/session", "/page/page.css")
        odd = ("/healthz/", "//v1/runs", "/metrics/../v1/runs", "/%761/runs", "/metrics%2f..%2fv1%2fruns")
        with httpx.Client(base_url=url, trust_env=False) as client:
            for path in (*others, *odd):
                for method in ("GET", "POST", "DELETE", "OPTIONS"):
                    answer = client.request(method, path)
                    assert answer.status_code == 404, (method, path)
                    assert answer.json()["error"]["code"] == "NOT_FOUND"
        assert httpx.post(f"{url}/metrics", json={}, trust_env=False).status_code == 405
        assert [run.name for run in service.runs.own()] == ["shown"]


def test_metrics_are_for_the_same_callers_as_at_the_other_address(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    every, limited = (create_token(path, name, ["scraper"], [name], None) for name in ("*", "shown"))
    viewer = create_token(path, "viewer", ["viewer"], ["*"], None)
    with serving(tokens_file=path) as service:
        for run in ("shown", "secret"):
            service.runs.create(run, CONFIG)
        url = str(service.probe_url)

        def scraped(token: str) -> httpx.Response:
            return get(f"{url}/metrics", headers={"authorization": f"Bearer {token}"})

        assert [get(f"{url}/{probe}").status_code for probe in ("healthz", "readyz", "metrics")] == [200, 200, 401]
        assert [scraped(token).status_code for token in (every, limited, viewer)] == [200, 200, 403]
        assert 'run="secret"' in scraped(every).text
        assert ('run="shown"' in scraped(limited).text, 'run="secret"' in scraped(limited).text) == (True, False)


def test_it_uses_the_same_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with serving(tls_cert_file=cert, tls_key_file=key) as service:
        url = str(service.probe_url)
        assert url.startswith("https://")
        assert get(f"{url}/readyz", verify=trusting).status_code == 200


def test_it_reports_the_shutdown_until_the_last_call_is_answered() -> None:
    with serving() as service, ThreadPoolExecutor(1) as pool:
        url, (host, port) = str(service.probe_url), ("127.0.0.1", port_of(service.http_url))
        with socket.create_connection((host, port)) as caller:
            caller.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
            assert b"100 Continue" in caller.recv(100)
            stopping = pool.submit(service.stop)
            wait_until(lambda: get(f"{url}/readyz").status_code == 503, 10)
            assert "shutting down" in get(f"{url}/readyz").text
            assert [get(f"{url}/{probe}").status_code for probe in ("healthz", "metrics")] == [200, 200]
            wait_until(lambda: not listens(host, port), 10)
            assert get(f"{url}/healthz").status_code == 200
            assert not stopping.done()
        stopping.result(20)
        assert not listens(host, port_of(url))


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_answers_while_the_service_waits_for_its_store() -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Settings(**FREE_PORTS, probe_address=f"127.0.0.1:{port}", store="memory")
    waiting = WaitingServer(settings)
    on_loop(waiting.report, "Redis is unreachable")
    try:
        assert get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        for path in ("readyz", "metrics", "v1/runs"):
            refused = get(f"http://127.0.0.1:{port}/{path}")
            assert (refused.status_code, "Redis is unreachable" in refused.text) == (503, True)
    finally:
        on_loop(waiting.close)
    assert not listens("127.0.0.1", port)


@pytest.mark.parametrize("taken", ["0.0.0.0", "[::]"])
def test_a_port_that_is_taken_is_named_and_nothing_is_half_started(taken: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with closing(socket.socket(family)) as other:
        other.bind((taken.strip("[]"), 0))
        other.listen()
        address = f"{taken}:{other.getsockname()[1]}"
        stores = {"journal_dir": tmp_path, "shard_store": "memory"}
        message = f"probe_address: cannot listen on {address}: .* or set another probe_address"
        with (
            pytest.raises(UnavailableError, match=message.replace("[", r"\[")),
            serving(probe_address=address, **stores, store="shared_memory"),
        ):
            pass
        # While the service waits for its store, too.
        waiting = WaitingServer(Settings(**FREE_PORTS, probe_address=address))
        with pytest.raises(UnavailableError, match="probe_address"):
            on_loop(waiting.report, "Redis is unreachable")
        on_loop(waiting.close)
    # The journal's lock is free again.
    with serving(**stores, store="shared_memory") as service:
        assert get(f"{service.probe_url}/readyz").status_code == 200


def test_it_may_be_an_address_of_ipv6() -> None:
    with serving(probe_address="[::1]:0") as service:
        url = str(service.probe_url)
        assert url.startswith("http://[::1]:")
        assert get(f"{url}/readyz").status_code == 200


def test_it_is_flooded_without_a_connection_less_for_the_apis() -> None:
    with serving() as service:
        url = urlsplit(str(service.probe_url))
        opened = [socket.create_connection((url.hostname, url.port), timeout=20) for _ in range(100)]
        try:
            assert get(f"{service.probe_url}/healthz", timeout=20).status_code == 200
            assert get(f"{service.http_url}/healthz").status_code == 200
        finally:
            for one in opened:
                one.close()


def test_the_doctor_asks_it_as_it_asks_the_other_address() -> None:
    with serving() as service:
        for url in (service.http_url, str(service.probe_url)):
            place = url.removeprefix("http://")
            asked = ("--store", "memory", "--address", service.grpc_address, "--http-address", place)
            done = gristmill("doctor", *asked, "--probe-address", str(service.probe_url).removeprefix("http://"))
            assert (done.returncode, f"HTTP at {place}: answers, and is ready" in done.stdout) == (0, True), done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe_address": "unix:/run/probes.sock"}, "only grpc_address may be a unix socket"),
        ({"probe_address": "8081"}, "expected HOST:PORT"),
        ({"probe_address": "0.0.0.0:1", "tokens_file": "a"}, "scrapers would send their tokens unencrypted"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_settings(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokens_file": "a", "insecure": True},
        {"tokens_file": "a", "tls_cert_file": "b", "tls_key_file": "c"},
    ],
)
def test_other_machines_may_reach_it_where_no_token_is_sent_in_the_open(settings: dict[str, Any]) -> None:
    assert load_settings({**settings, "probe_address": "[::]:8081"}).probe_address == "[::]:8081"
