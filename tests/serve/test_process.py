"""`gristmill serve` as a process: its start, its signals, its exit status, and what it costs when idle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import gristmill
from gristmill_service.cli.serve import ready_line
from gristmill_service.settings import Settings
from tests.api.apis import CONFIG, Api, GrpcApi, HttpApi, Refused, group, row
from tests.serving import ServiceProcess, StartService

pytestmark = pytest.mark.slow

COMMAND = [str(Path(sys.executable).with_name("gristmill")), "serve"]


def serve(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A `gristmill serve` that is expected to end by itself."""
    return subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


def test_it_serves_and_ends_with_the_first_signal(service_process: ServiceProcess) -> None:
    with closing(GrpcApi(service_process.grpc_address)) as api:
        api.create("run", CONFIG)
        for uid in ("a", "b"):
            api.submit("run", group(uid))
        assert api.batch("run", 0, wait_s=20)["state"] == "published"
    assert service_process.stop() == 0


def test_shards_are_mapped_by_other_processes_and_gone_after_it(
    service_process: ServiceProcess, tmp_path: Path
) -> None:
    with closing(GrpcApi(service_process.grpc_address)) as api:
        api.create("run", CONFIG)
        for uid in ("a", "b"):
            api.submit("run", group(uid))
        path = Path(api.shard("run", 0, wait_s=20)["shared_memory_path"])
        assert path.is_relative_to(tmp_path)
        assert path.read_bytes() == api.read("run", 0, 0, 0)
        assert path.stat().st_mode & 0o077 == 0
    assert service_process.stop() == 0
    assert not path.exists()


def test_shutting_down_finishes_what_is_sealed_and_answers_who_waits(service_process: ServiceProcess) -> None:
    with (
        closing(GrpcApi(service_process.grpc_address)) as api,
        closing(HttpApi(service_process.http_url)) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        api.create("run", {**CONFIG, "train_batch_size": 64, "policy_mini_batch_size": 32})
        long = list(range(1, 20_000))
        groups = [[row(f"uid-{number}", sample, prompt_token_ids=long) for sample in range(2)] for number in range(64)]
        for rows in groups[:-1]:
            api.submit("run", rows)
        answers = [pool.submit(one.batch, "run", 5, 20.0) for one in (api, http)]
        until = time.monotonic() + 20
        while "gristmill_waiting_calls 2.0" not in http.client.get("/metrics").text:
            assert time.monotonic() < until, "nobody waits"
            time.sleep(0.02)
        # They complete a batch that takes a moment to make.
        api.submit("run", groups[-1])
        assert service_process.stop() == 0
        for answer in answers:
            with pytest.raises(Refused) as refused:
                answer.result()
            assert refused.value.code == "UNAVAILABLE"
    log = service_process.log.read_text()
    assert log.index("batch published") < log.index("closed")


def test_a_second_signal_ends_it_at_once(service_process: ServiceProcess) -> None:
    # A body that never ends holds the shutdown up for as long as the grace.
    host, port = service_process.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
        # The call is under way once the service asks for its body.
        assert b"100 Continue" in caller.recv(100)
        service_process.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        while service_process.process.poll() is None and time.monotonic() - start < 10:
            service_process.process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert service_process.process.wait(timeout=10) == 128 + signal.SIGTERM


def test_ctrl_c_is_a_clean_end(service_process: ServiceProcess) -> None:
    service_process.process.send_signal(signal.SIGINT)
    assert service_process.process.wait(timeout=30) == 0


def test_it_is_ready_soon_and_small_when_idle_and_without_torch(start_service: StartService, tmp_path: Path) -> None:
    service = start_service("--shared-memory-dir", str(tmp_path))
    user, system = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    ready_cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    apis: list[Api] = [GrpcApi(service.grpc_address), HttpApi(service.http_url)]
    for api in apis:
        assert api.names() == []
        api.close()
    proc = Path(f"/proc/{service.pid}")
    resident = int(proc.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert "libtorch" not in proc.joinpath("maps").read_text()
    assert resident < 250e6
    # Processor time, as tests share the machine. `make bench` measures what passes until it is ready.
    assert ready_cpu_s < 4


def test_the_announced_addresses_go_with_it(service_process: ServiceProcess) -> None:
    assert json.loads(service_process.announced.read_text())["pid"] == service_process.pid
    assert service_process.stop() == 0
    assert not service_process.announced.exists()


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_an_address_that_is_taken_is_one_clear_line(service_process: ServiceProcess, tmp_path: Path, api: str) -> None:
    taken = {"grpc": service_process.grpc_address, "http": service_process.http_url.removeprefix("http://")}[api]
    addresses = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", api: taken}
    ended = serve(
        *("--grpc-address", addresses["grpc"], "--http-address", addresses["http"]),
        *("--shared-memory-dir", str(tmp_path)),
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"gristmill serve: {api}_address: cannot listen on {taken}")
    assert len(ended.stderr.splitlines()) == 1


def test_a_socket_that_somebody_listens_on_stays_theirs(start_service: StartService, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    service = start_service("--store", "memory", "--grpc-address", f"unix:{path}")
    ended = serve("--store", "memory", "--grpc-address", f"unix:{path}", "--http-address", "127.0.0.1:0")
    assert ended.returncode == 2
    assert f"unix:{path} is in use" in ended.stderr
    with closing(GrpcApi(service.grpc_address)) as api:
        assert api.names() == []


def test_a_socket_that_a_dead_process_left_is_taken_over(start_service: StartService, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    service = start_service("--store", "memory", "--grpc-address", f"unix:{path}")
    with closing(GrpcApi(service.grpc_address)) as api:
        assert api.names() == []


def test_a_wrong_setting_is_one_clear_line() -> None:
    ended = serve("--max-waiters", "0")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "--max-waiters: max_waiters is 0" in ended.stderr


def test_help_shows_what_a_setting_may_be() -> None:
    help_text = serve("--help").stdout
    for flag in ("--store shared_memory|memory|redis", "--log-level debug|info|warning|error"):
        assert flag in help_text


def test_every_setting_has_a_flag_that_says_what_it_is_for() -> None:
    help_text = " ".join(serve("--help").stdout.split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in help_text
        assert field.description is not None
        assert field.description.replace(" ", "") in help_text.replace(" ", ""), name


def test_the_command_prints_its_version() -> None:
    done = subprocess.run([COMMAND[0], "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"gristmill {gristmill.__version__}\n"


def test_a_service_without_a_journal_says_at_its_start_what_ends_with_it(tmp_path: Path) -> None:
    lost = "its runs are only in memory, and end with it (--journal-dir keeps them)"
    in_memory, with_journal = (
        Settings.model_validate({"store": "memory", "journal_dir": place}) for place in (None, tmp_path)
    )
    assert ready_line("a:1", "http://a:2", in_memory).endswith(lost)
    assert ready_line("a:1", "http://a:2", with_journal).endswith("http://a:2/docs")


def test_settings_come_from_the_environment_too() -> None:
    ended = serve(GRISTMILL_LOG_LEVEL="loud")
    assert ended.returncode == 2
    assert "GRISTMILL_LOG_LEVEL: log_level is 'loud'" in ended.stderr


def test_logs_are_json_where_asked(start_service: StartService) -> None:
    service = start_service("--store", "memory", "--log-format", "json")
    assert service.stop() == 0
    events = [json.loads(line)["event"] for line in service.log.read_text().splitlines()]
    assert events == ["ready", "shutting down", "closed"]


def test_what_is_restored_is_logged(start_service: StartService, tmp_path: Path) -> None:
    flags = ["--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path), "--log-format", "json"]
    service = start_service(*flags)
    with closing(GrpcApi(service.grpc_address)) as api:
        for name in ("empty", "run"):
            api.create(name, CONFIG)
        for uid in ("a", "b", "c"):
            api.submit("run", group(uid))
        api.submit("run", [row("d", 0)])
    assert service.stop() == 0
    assert '"run restored"' not in service.log.read_text()
    again = start_service(*flags)
    assert again.stop() == 0
    restored = [json.loads(line) for line in again.log.read_text().splitlines() if '"run restored"' in line]
    figures = {line["run"]: [line[key] for key in ("batches", "groups_open", "rows")] for line in restored}
    assert figures == {"empty": [0, 0, 0], "run": [1, 2, len(group("a")) * 3 + 1]}
