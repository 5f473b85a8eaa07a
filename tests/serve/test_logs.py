"""The log: what it has, and how a row is followed through it from the id of the request that brought it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog

from gristmill import AsyncRolloutClient, InvalidArgumentError, RolloutClient, TrainerClient
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc, run_pb2, run_pb2_grpc
from gristmill_service.access.tokens import create_token
from gristmill_service.logs import configure_logs
from tests.api.apis import CONFIG, GrpcApi, group, row, rows_message
from tests.redis.servers import RedisServer
from tests.serving import ServiceProcess, StartService

pytestmark = pytest.mark.slow

ID = "x-request-id"
MADE = re.compile(r"[0-9a-f]{8}-[0-9a-f]+")


def lines(service: ServiceProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log.read_text().splitlines()]


def wait_for(service: ServiceProcess, event: str) -> None:
    """Returns when the log has the event."""
    until = time.monotonic() + 60
    while all(line["event"] != event for line in lines(service)):
        assert time.monotonic() < until, f"the log does not have: {event}"
        time.sleep(0.02)


@pytest.fixture
def telling(start_service: StartService) -> ServiceProcess:
    return start_service("--store", "memory", "--log-format", "json", "--log-level", "debug")


def submit(service: ServiceProcess, run: str, rows: list[dict[str, Any]], *metadata: tuple[str, str]) -> str:
    """The id that the answer has."""
    with grpc.insecure_channel(service.grpc_address) as channel:
        request = rollout_pb2.SubmitRowsRequest(run=run, rows=rows_message(rows))
        _, call = rollout_pb2_grpc.RolloutServiceStub(channel).SubmitRows.with_call(  # type: ignore[no-untyped-call]
            request, timeout=30, metadata=metadata
        )
        trailers: dict[str, str] = dict(call.trailing_metadata())
        return trailers[ID]


def test_a_rows_request_leads_to_its_batch(telling: ServiceProcess) -> None:
    with closing(GrpcApi(telling.grpc_address)) as api:
        api.create("run", CONFIG)
        submit(telling, "run", group("a"), (ID, "worker-7:first"))
        submit(telling, "run", group("b"), (ID, "worker-7:second"))
        api.batch("run", 0, wait_s=20)
    assert telling.stop() == 0
    logged = lines(telling)
    [submitted] = [line for line in logged if line.get("request_id") == "worker-7:first"]
    assert submitted["event"] == "rows submitted"
    assert (submitted["run"], submitted["rows"], submitted["accepted"]) == ("run", 4, 4)
    assert submitted["first"].startswith("uid 'a' sample 0")
    [sealed] = [line for line in logged if line["event"] == "batch sealed" and submitted["groups"][0] in line["groups"]]
    # It was the second request that completed the batch.
    assert (sealed["batch"], sealed["request_id"]) == (0, "worker-7:second")
    [published] = [line for line in logged if line["event"] == "batch published"]
    assert (published["run"], published["batch"]) == ("run", sealed["batch"])


def test_submissions_are_logged_only_where_that_is_asked_for(start_service: StartService) -> None:
    service = start_service("--store", "memory", "--log-format", "json")
    with closing(GrpcApi(service.grpc_address)) as api:
        api.create("run", CONFIG)
        for uid in ("a", "b"):
            api.submit("run", group(uid))
        api.batch("run", 0, wait_s=20)
    # A waiter may be answered before the line is written.
    wait_for(service, "batch published")
    assert service.stop() == 0
    events = [line["event"] for line in lines(service)]
    lost = "runs lost, as they are only in memory; journal_dir keeps runs"
    assert events == ["ready", "batch sealed", "batch published", "shutting down", lost, "closed"]
    assert [(line["count"], line["runs"]) for line in lines(service) if line["event"] == lost] == [(1, ["run"])]


def test_a_sealed_batch_names_its_first_groups(start_service: StartService) -> None:
    service = start_service("--store", "memory", "--log-format", "json")
    with closing(GrpcApi(service.grpc_address)) as api:
        api.create("run", {**CONFIG, "train_batch_size": 20})
        for number in range(20):
            api.submit("run", group(f"p{number}"))
        api.batch("run", 0, wait_s=20)
    assert service.stop() == 0
    [sealed] = [line for line in lines(service) if line["event"] == "batch sealed"]
    assert (sealed["prompts"], sealed["groups"]) == (20, [f"uid 'p{number}'" for number in range(8)])


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, 'a"b'])
def test_an_id_that_is_none_is_replaced(telling: ServiceProcess, given: str) -> None:
    with closing(GrpcApi(telling.grpc_address)) as api:
        api.create("run", CONFIG)
    assert MADE.fullmatch(submit(telling, "run", [row("a", 0)], (ID, given)))


def test_a_refusal_has_the_id_and_so_has_its_line(telling: ServiceProcess) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        submit(telling, "no-such-run", [row("a", 0)], (ID, "lost"))
    assert dict(refused.value.trailing_metadata())[ID] == "lost"
    [refusal] = [line for line in lines(telling) if line.get("request_id") == "lost"]
    assert (refusal["event"], refusal["call"], refusal["code"]) == ("call refused", "SubmitRows", "NOT_FOUND")


def test_over_http_too(telling: ServiceProcess) -> None:
    with httpx.Client(base_url=telling.http_url) as client:
        created = client.post("/v1/runs", json={"run": "run", "config": CONFIG})
        assert MADE.fullmatch(created.headers[ID])
        answer = client.post("/v1/runs/run/rows", json={"rows": [row("a", 0)]}, headers={ID: "by-hand"})
        assert answer.headers[ID] == "by-hand"
        assert client.get("/v1/runs/none", headers={ID: "lost"}).headers[ID] == "lost"
    [refused] = [line for line in lines(telling) if line.get("request_id") == "lost"]
    assert (refused["event"], refused["call"], refused["code"]) == ("call refused", "get_run", "NOT_FOUND")
    [submission] = [line for line in lines(telling) if line.get("request_id") == "by-hand"]
    assert (submission["event"], submission["groups"]) == ("rows submitted", ["uid 'a'"])


def test_a_clients_error_names_the_request(telling: ServiceProcess) -> None:
    with RolloutClient(telling.grpc_address, "run") as client:
        client.create_run(CONFIG)
        with pytest.raises(InvalidArgumentError, match=r"\(request [0-9a-f]{8}-[0-9a-f]+\)$") as refused:
            client.submit([row("a", 99)])
    [request_id] = re.findall(r"\(request (.*)\)$", str(refused.value))
    events = [line["event"] for line in lines(telling) if line.get("request_id") == request_id]
    assert events == ["rows submitted", "rows refused"]


def test_an_async_clients_error_too(telling: ServiceProcess) -> None:
    async def submit_wrongly() -> None:
        async with AsyncRolloutClient(telling.grpc_address, "run") as client:
            await client.create_run(CONFIG)
            with pytest.raises(InvalidArgumentError, match=r"\(request [0-9a-f]{8}-[0-9a-f]+\)$"):
                await client.submit([row("a", 99)])

    asyncio.run(submit_wrongly())


def test_every_message_of_a_client_has_an_id_of_its_own(telling: ServiceProcess) -> None:
    with RolloutClient(telling.grpc_address, "run") as client:
        client.create_run(CONFIG)
        for uid in ("a", "b"):
            for one in group(uid):
                client.submit([one])
        with TrainerClient(telling.grpc_address, "run", 0, dp_size=2, prefetch=0) as trainer:
            next(iter(trainer))
    ids = [line["request_id"] for line in lines(telling) if line["event"] == "rows submitted"]
    assert len(ids) == len(set(ids)) == 8
    # Of one client, in the order in which they were sent.
    assert len({one.split("-")[0] for one in ids}) == 1


def test_what_is_passed_on_to_the_runs_owner_keeps_its_id(start_service: StartService, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        flags = ("--store", "redis", "--redis-url", redis.url, "--log-format", "json", "--log-level", "debug")
        owner, other = start_service(*flags), start_service(*flags)
        with closing(GrpcApi(owner.grpc_address)) as api:
            api.create("run", CONFIG)
        assert submit(other, "run", [row("a", 0)], (ID, "passed-on")) == "passed-on"
        answer = httpx.post(
            f"{other.http_url}/v1/runs/run/rows", json={"rows": [row("b", 0)]}, headers={ID: "passed-on-too"}
        )
        assert answer.headers.get_list(ID) == ["passed-on-too"]
        request_ids = {line.get("request_id") for line in lines(owner) if line["event"] == "rows submitted"}
        assert request_ids == {"passed-on", "passed-on-too"}


CODES = "".join(
    map(chr, [*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), 0xFEFF])
)
"""What moves the cursor, ends a line somewhere, or turns text around: no log line has any of it."""


@pytest.mark.parametrize("form", ["human", "json"])
def test_what_a_caller_sends_is_escaped_in_the_log(start_service: StartService, tmp_path: Path, form: str) -> None:
    tokens = tmp_path / "tokens.yaml"
    shown = (("authorization", f"Bearer {create_token(tokens, 'viewer', ['viewer'], ['a-*'], None)}"),)
    service = start_service("--store", "memory", "--log-format", form, "--tokens-file", str(tokens))
    name = f"x{CODES.replace(chr(0), '')}[31mred\ny=1"
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError):
            stub.GetRun(run_pb2.GetRunRequest(run=name), metadata=shown, timeout=30)
    service.stop()
    text = service.log.read_text()
    [line] = [line for line in text.split("\n") if "GetRun" in line or "get_run" in line]
    assert "[31mred" in line
    assert not set(text) & set(CODES.replace("\n", ""))


@pytest.mark.parametrize("form", ["human", "json"])
def test_no_log_line_of_any_library_has_codes_of_a_terminal(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorder's log is the same."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    before = structlog.get_config()
    level = root.level
    try:
        configure_logs("info", form)
        logging.getLogger("a library").warning("odd %s", CODES)
        try:
            raise ValueError(CODES)
        except ValueError:
            logging.getLogger("gristmill.recorder").exception("failed %s", CODES)
            structlog.get_logger("ours").error("failed", reason=CODES, groups=[CODES], at=Path(f"/{CODES[1:]}"))
            structlog.get_logger("ours").exception("failed")
    finally:
        root.setLevel(level)
        structlog.configure(**before)
    text = capsys.readouterr().err
    assert text.count("ValueError") >= 2
    assert not set(text) & set(CODES.replace("\n", ""))
