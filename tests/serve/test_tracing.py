"""Traces, as a collector gets them from a real service; and what a service without one pays: nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import httpx
import pytest

from gristmill import RolloutClient, TrainerClient
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc
from tests.api.apis import CONFIG, GrpcApi, Refused, group, row, rows_message
from tests.redis.servers import RedisServer
from tests.serve.collector import Collector
from tests.serving import ServiceProcess, StartService

pytestmark = pytest.mark.slow

ROLLOUTS = "gristmill.v1.RolloutService/"
TRAINERS = "gristmill.v1.TrainerService/"
STAGES = ["gather", "validate", "merge", "advantage", "schedule", "layout", "plan", "publish"]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = CALLER.split("-")[1:3]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector to which services that are started from now on send their traces, soon."""
    with closing(Collector()) as spans:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield spans


@pytest.fixture
def service(collector: Collector, start_service: StartService, tmp_path: Path) -> ServiceProcess:
    return start_service("--shared-memory-dir", str(tmp_path), "--log-format", "json", "--log-level", "debug")


def submit(address: str, run: str, rows: list[dict[str, object]], *metadata: tuple[str, str]) -> None:
    with grpc.insecure_channel(address) as channel:
        request = rollout_pb2.SubmitRowsRequest(run=run, rows=rows_message(rows))
        rollout_pb2_grpc.RolloutServiceStub(channel).SubmitRows(request, timeout=30, metadata=metadata)  # type: ignore[no-untyped-call]


def test_a_call_is_a_span_in_its_callers_trace(collector: Collector, service: ServiceProcess) -> None:
    with closing(GrpcApi(service.grpc_address)) as api:
        api.create("run", CONFIG)
    submit(service.grpc_address, "run", [row("a", 0)], ("traceparent", CALLER), ("x-request-id", "mine"))
    span = collector.named(f"{ROLLOUTS}SubmitRows")
    assert (span.trace, span.parent, span.service, span.is_error) == (TRACE, PARENT, "gristmill", False)
    assert span.attributes["gristmill.run"] == "run"
    assert span.attributes["gristmill.request_id"] == "mine"
    assert span.attributes["rpc.grpc.status_code"] == 0
    # One who reads the log finds the trace, and the other way round.
    [logged] = [line for line in service.log.read_text().splitlines() if '"mine"' in line]
    assert json.loads(logged)["trace_id"] == TRACE


def test_a_batch_is_a_trace_with_its_stages_linked_to_the_call_that_completed_it(
    collector: Collector, service: ServiceProcess
) -> None:
    with closing(GrpcApi(service.grpc_address)) as api:
        api.create("run", CONFIG)
        api.submit("run", group("a"))
        submit(service.grpc_address, "run", group("b"), ("traceparent", CALLER))
        api.batch("run", 0, wait_s=20)
    made = collector.named("make batch")
    assert (made.attributes["gristmill.run"], made.attributes["gristmill.batch"]) == ("run", 0)
    completed = collector.named(f"{ROLLOUTS}SubmitRows", lambda span: span.parent == PARENT)
    assert made.links == (completed.id,)
    stages = {stage: collector.named(stage, lambda span: span.parent == made.id) for stage in STAGES}
    assert {span.trace for span in stages.values()} == {made.trace}


def test_pulls_are_spans_with_what_was_pulled(collector: Collector, service: ServiceProcess) -> None:
    with closing(GrpcApi(service.grpc_address)) as api:
        api.create("run", CONFIG)
        for uid in ("a", "b"):
            api.submit("run", group(uid))
        api.shard("run", 1, wait_s=20)
        data = api.read("run", 0, 0, 1)
    assert collector.named(f"{TRAINERS}GetShard").attributes["gristmill.rank"] == 1
    read = collector.named(f"{TRAINERS}ReadShard").attributes
    assert [read[f"gristmill.{name}"] for name in ("run", "batch", "mini_batch", "rank")] == ["run", 0, 0, 1]
    assert read["gristmill.bytes"] >= len(data)


def test_a_refusal_is_an_error_with_its_status(collector: Collector, service: ServiceProcess) -> None:
    with closing(GrpcApi(service.grpc_address)) as api, pytest.raises(Refused):
        api.get("no-such-run")
    span = collector.named("gristmill.v1.RunService/GetRun")
    assert (span.is_error, span.attributes["rpc.grpc.status_code"]) == (True, grpc.StatusCode.NOT_FOUND.value[0])


def test_requests_over_http_are_spans_by_their_routes_and_probes_are_none(
    collector: Collector, service: ServiceProcess
) -> None:
    httpx.post(f"{service.http_url}/v1/runs", json={"run": "run", "config": CONFIG})
    httpx.get(f"{service.http_url}/readyz")
    httpx.get(f"{service.http_url}/v1/runs/run", headers={"traceparent": CALLER})
    span = collector.named("GET /v1/runs/{run}")
    assert (span.trace, span.parent, span.attributes["gristmill.run"]) == (TRACE, PARENT, "run")
    assert span.attributes["http.response.status_code"] == 200
    assert not [span.name for span in collector.spans if "readyz" in span.name]


def test_what_is_passed_on_stays_in_the_trace(
    collector: Collector, start_service: StartService, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        owner, other = (start_service("--store", "redis", "--redis-url", redis.url) for _ in range(2))
        with closing(GrpcApi(owner.grpc_address)) as api:
            api.create("run", CONFIG)
        submit(other.grpc_address, "run", [row("a", 0)], ("traceparent", CALLER))
        taken = collector.named(f"{ROLLOUTS}SubmitRows", lambda span: span.parent == PARENT)
        decided = collector.named(f"{ROLLOUTS}SubmitRows", lambda span: span.parent == taken.id)
        assert decided.trace == taken.trace == TRACE


def test_what_waits_to_be_sent_is_sent_before_the_end(
    collector: Collector, start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    service = start_service("--shared-memory-dir", str(tmp_path))
    with closing(GrpcApi(service.grpc_address)) as api:
        api.names()
    assert service.stop() == 0
    collector.named("gristmill.v1.RunService/ListRuns")


def test_training_goes_on_and_ends_in_time_while_the_collector_is_away(
    start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    service = start_service("--shared-memory-dir", str(tmp_path))
    with RolloutClient(service.grpc_address, "run") as client:
        client.create_run({**CONFIG, "dp_size": 1})
        for uid in ("a", "b"):
            client.submit(group(uid))
        with TrainerClient(service.grpc_address, "run", 0) as trainer:
            for shard in next(iter(trainer)).mini_batches():
                shard.ack()
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 15


def serve(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("gristmill")), "serve", "--store", "memory"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_a_protocol_that_is_not_spoken_is_refused() -> None:
    ended = serve(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")
    assert ended.returncode == 2
    assert ended.stderr.startswith("gristmill serve: OTEL_EXPORTER_OTLP_PROTOCOL 'http/protobuf'")
    assert len(ended.stderr.splitlines()) == 1


_HIDES = """
import sys

class Hidden:
    def find_spec(self, name, *_):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""


def test_without_the_extra_an_endpoint_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.joinpath("sitecustomize.py").write_text(_HIDES)
    ended = serve(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.startswith("gristmill serve: OTEL_EXPORTER_OTLP_ENDPOINT 'http://127.0.0.1:1' needs pack")
    assert "pip install '.[otel]' in gristmill's checkout" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


_SERVES = """
import asyncio, sys
from gristmill_service.service import Service
from gristmill_service.settings import Settings
from gristmill_service.tracing import configure_tracing
configure_tracing({})
async def serve():
    service = Service(Settings(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0", store="memory"))
    await service.start()
    await service.stop()
asyncio.run(serve())
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""


def test_nothing_of_it_is_imported_where_no_endpoint_is_configured() -> None:
    done = subprocess.run([sys.executable, "-c", _SERVES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("variable", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_it_can_be_turned_off(
    collector: Collector, start_service: StartService, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    service = start_service("--store", "memory")
    with closing(GrpcApi(service.grpc_address)) as api:
        api.names()
    assert service.stop() == 0
    assert collector.spans == []
