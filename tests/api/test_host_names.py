"""A page whose own name leads to this machine (DNS rebinding) is not answered; a service that asks for tokens need not
look."""

from __future__ import annotations

import httpx
import pytest
from pydantic import ValidationError

from gristmill_recorder.settings import RecorderSettings
from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.serving import FREE_PORTS


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "evil.example."])
def test_a_name_of_somebody_elses_is_refused_for_reads_and_for_changes(service: Service, host: str) -> None:
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    for method, path in (("GET", "/v1/runs"), ("PUT", "/v1/runs/r/policy-version"), ("GET", "/")):
        answer = httpx.request(method, service.http_url + path, headers=headers)
        assert answer.status_code == 421
        assert "http_host_names" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "[::1]:8080", "10.0.0.7", "localhost", "gristmill:8080", "gristmill.rl.svc", "a.local"]
)
def test_addresses_and_names_that_nobody_can_buy_are_answered(service: Service, host: str) -> None:
    assert httpx.get(f"{service.http_url}/v1/runs", headers={"host": host}).status_code == 200


def test_names_that_are_configured_are_answered() -> None:
    running = Service(
        Settings(**FREE_PORTS, store="memory", http_host_names="a.example, *.example.org", shutdown_grace_s=5)
    )
    running.start()
    try:
        statuses = {
            host: httpx.get(f"{running.http_url}/healthz", headers={"host": host}).status_code
            for host in ("Grist.Example.org", "example.org", "grist.example.com")
        }
    finally:
        running.stop()
    assert statuses == {"Grist.Example.org": 200, "example.org": 421, "grist.example.com": 421}


@pytest.mark.parametrize("names", ["https://grist.example.org", "a.example,grist.example.org:8080"])
def test_a_url_or_a_port_is_refused_at_the_start_as_no_host_matches_it(names: str) -> None:
    for settings in (Settings, RecorderSettings):
        with pytest.raises(ValidationError, match="without scheme and port"):
            settings.model_validate({"upstream": "http://vllm", "http_host_names": names})
