"""`gristmill doctor`: what is wrong is named with its remedy, and only what is wrong fails."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill import Credentials
from gristmill_service.access.tokens import create_token
from gristmill_service.cli import checks
from gristmill_service.cli.watch.service_client import Replica
from gristmill_service.settings import Settings
from tests.cli.terminal import gristmill
from tests.on_loop import Service
from tests.redis.servers import HOST, RedisServer, wait_until
from tests.serving import FREE_PORTS


def addresses(service: Service) -> tuple[str, ...]:
    return "--address", service.grpc_address, "--http-address", service.http_url.removeprefix("http://")


def checked(*arguments: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and what was found, by what was looked at."""
    done = gristmill("doctor", "--json", *arguments)
    return done.returncode, {check["what"]: check for check in json.loads(done.stdout)["checks"]}


def test_all_is_well(service: Service) -> None:
    done = gristmill("doctor", "--store", "memory", *addresses(service))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok     ") for line in lines)
    for what in ("settings", "gRPC at", "version of", "credentials", "HTTP at", "clock at"):
        assert sum(line.startswith(f"ok     {what}") for line in lines) == 1


def test_a_service_that_is_unreachable_is_wrong_over_both_apis() -> None:
    status, by_name = checked("--store", "memory", "--address", "127.0.0.1:1", "--http-address", "127.0.0.1:1")
    assert status == 1
    for api in ("gRPC", "HTTP"):
        assert "gristmill serve" in by_name[f"{api} at 127.0.0.1:1"]["remedy"]


def test_the_port_of_probes_is_checked_where_it_is_set(service: Service) -> None:
    _, port = service.http_url.rsplit(":", 1)
    assert (
        gristmill("doctor", "--store", "memory", *addresses(service), "--probe-address", f"0.0.0.0:{port}").returncode
        == 0
    )
    status, by_name = checked("--store", "memory", *addresses(service), "--probe-address", "0.0.0.0:1")
    assert status == 1
    assert "--probe-address" in by_name["HTTP at 127.0.0.1:1"]["remedy"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"GRISTMILL_TOKEN": "unknown"}, "the token is unknown"),
        ({}, "requires a token"),
        ({"GRISTMILL_TOKEN_FILE": "/none"}, "/none"),
        ({"GRISTMILL_TLS": "yes"}, "set it to 1 or 0"),
    ],
)
def test_wrong_credentials_are_one_line_among_the_others(
    environment: dict[str, Any], words: str, tmp_path: Path
) -> None:
    create_token(tmp_path / "tokens.yaml", "boss", ["admin"], ["*"], None)
    service = Service(Settings(**FREE_PORTS, store="memory", tokens_file=tmp_path / "tokens.yaml"))
    service.start()
    try:
        done = gristmill("doctor", "--store", "memory", *addresses(service), **environment)
    finally:
        service.stop()
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("WRONG  ")]
    assert line.startswith("WRONG  credentials: ")
    assert words in line


def test_a_wrong_setting_is_reported_and_the_rest_is_checked_all_the_same(service: Service) -> None:
    status, by_name = checked("--store", "memory", "--max-waiters", 0, "--address", service.grpc_address)
    assert status == 1
    assert "max_waiters" in by_name["settings"]["found"]
    assert by_name[f"gRPC at {service.grpc_address}"]["ok"]


def test_shared_memory_that_cannot_be_written_to_is_wrong(service: Service, tmp_path: Path) -> None:
    status, by_name = checked("--shared-memory-dir", tmp_path / "none", *addresses(service))
    assert status == 1
    place = by_name[f"shared memory in {tmp_path / 'none'}"]
    assert not place["ok"]
    assert "--shared-memory-dir" in place["remedy"]


def test_a_journal_is_looked_for_where_it_will_be_made(service: Service, tmp_path: Path) -> None:
    journal = tmp_path / "later" / "journal"
    _, by_name = checked("--store", "memory", "--journal-dir", journal, *addresses(service))
    assert f"journal in {tmp_path}" in by_name


def test_settings_of_redis_that_lose_rows_are_wrong(service: Service, tmp_path: Path) -> None:
    with RedisServer(tmp_path, appendonly="no", arguments=["maxmemory-policy allkeys-lru"]) as redis:
        done = gristmill("doctor", "--store", "redis", "--redis-url", redis.url, *addresses(service))
    assert done.returncode == 1
    wrong = "\n".join(line for line in done.stdout.splitlines() if line.startswith("WRONG  Redis at"))
    for words in ("is allkeys-lru", "set it to noeviction", "appendonly is no", "maxmemory is not set"):
        assert words in wrong


def test_a_redis_whose_replicas_may_fall_behind_is_wrong(service: Service, tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "master", maxmemory="1gb") as master,
        RedisServer(tmp_path / "replica", arguments=[f"replicaof {HOST} {master.port}"]),
    ):
        client = master.client()
        wait_until(lambda: client.info("replication")["connected_slaves"] == 1, "the replica follows")
        asked = ("--store", "redis", "--redis-url", master.url, "--redis-min-replicas", 1, *addresses(service))
        done = gristmill("doctor", *asked)
        for name, value in (
            ("min-replicas-to-write", 1),
            ("client-output-buffer-limit", "replica 4gb 4gb 60"),
        ):
            client.config_set(name, value)
        assert gristmill("doctor", *asked).returncode == 0
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 2
    assert f"WRONG  Redis at {master.address}: min-replicas-to-write is 0" in wrong[0]
    assert "disconnects a replica that is 256 MiB behind" in wrong[1]


def test_a_clock_that_differs_is_reported_with_its_direction() -> None:
    assert checks.clock("host:8080", 1.4).is_well
    assert checks.clock("host:8080", 3.4, unsure_s=1.5).is_well, "the answer took 3 s to come"
    assert not checks.clock("host:8080", 3.4, unsure_s=0.1).is_well
    behind = checks.clock("host:8080", -42.0)
    assert "42 s behind this machine's" in behind.state
    assert "NTP" in behind.remedy


def test_a_busy_server_that_sends_an_earlier_date_once_has_no_wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = [30.0, 0.0]

    def answer(client: httpx.Client, url: str) -> httpx.Response:
        date = format_datetime(datetime.now(UTC) - timedelta(seconds=ages.pop(0)), usegmt=True)
        return httpx.Response(200, headers={"date": date})

    monkeypatch.setattr(httpx.Client, "get", answer)
    assert [check.is_well for check in checks.over_http("host:8080", Credentials())] == [True, True]
    assert not ages


@pytest.mark.parametrize("version", ["", "9.9.9"])
def test_another_version_is_wrong(version: str) -> None:
    by_name = {check.subject: check for check in checks.over_grpc(Replica("h:1", True, version=version))}
    assert by_name["gRPC at h:1"].is_well
    assert by_name["version of h:1"].remedy == "install the same version everywhere"
