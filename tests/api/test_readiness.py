"""/readyz asks the store, which may take long, and holds up no other call meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gristmill_service.settings import Settings
from tests.api.apis import row, rows_message
from tests.on_loop import Service, on_loop
from tests.run.harness import CONFIG, wait_until
from tests.serving import FREE_PORTS


def test_a_slow_disk_holds_up_no_call(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def get(path: str) -> httpx.Response:
        return httpx.get(f"{service.http_url}/{path}", trust_env=False)

    def slowly() -> str:
        asked.set()
        answers.wait(20)
        return ""

    monkeypatch.setattr(service._target.runs._store, "unhealthy_reason", slowly)
    assert asked.wait(10)
    try:
        began = time.monotonic()
        refused = get("readyz")
        assert refused.status_code == 503
        assert "the run store has not answered for 2 s" in refused.text
        assert [get(path).status_code for path in ("healthz", "v1/runs")] == [200, 200]
        assert time.monotonic() - began < 10
    finally:
        answers.set()
    assert get("readyz").status_code == 200


def test_who_asks_between_an_answer_and_its_reader_disturbs_nobody(service: Service) -> None:
    runs = service._target.runs

    async def ask() -> None:
        looking = runs._looking = asyncio.get_running_loop().create_future()
        later: list[asyncio.Task[None]] = []
        looking.add_done_callback(lambda _: later.append(asyncio.create_task(runs.look())))
        first = asyncio.create_task(runs.look())
        await asyncio.sleep(0)
        looking.set_result("")
        await first
        await asyncio.gather(*later)

    on_loop(ask)


BLOCKED = "batches of a run wait for the shard store; the health of that run reports why"


def test_a_batch_that_waits_for_shared_memory_leaves_the_service_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.runs.create("full", CONFIG)
    monkeypatch.setattr(service._target.runs._runs["full"]._builder, "blocked_reason", "batch 0 waits")
    answer = httpx.get(f"{service.http_url}/readyz", trust_env=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "waits": BLOCKED})


def test_a_service_is_not_ready_while_rows_are_too_large_for_what_is_free_and_its_runs_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(Settings(**FREE_PORTS, journal_dir=tmp_path, shard_store="memory", shutdown_grace_s=5))
    with ExitStack() as opened:
        service.start()
        opened.callback(service.stop)
        client = opened.enter_context(httpx.Client(base_url=service.http_url, trust_env=False))
        store, reopened = service._target.runs._store, list[str]()
        room = store._room

        def measure() -> None:
            room._total, room._least, room._free = 1 << 30, 16 << 20, 17 << 20

        monkeypatch.setattr(room, "measure", measure)
        measure()
        monkeypatch.setattr(store, "open", reopened.append)
        client.post("/v1/runs", json={"run": "r", "config": CONFIG})
        large = {**row("large", 0), "prompt_token_ids": [1] * 2_000_000}
        body = rows_message([large]).SerializeToString()
        for _ in range(3):
            refused = client.post("/v1/runs/r/rows", content=body, headers={"content-type": "application/x-protobuf"})
            assert refused.status_code == 503
            assert "is full (17825792 bytes are free, a request needs" in refused.text
        wait_until(lambda: client.get("/readyz").status_code == 503)
        assert "gristmill_store_unhealthy 1.0" in client.get("/metrics").text
        assert client.post("/v1/runs/r/rows", json={"rows": [row("a", 0)]}).status_code == 200
        assert client.get("/v1/runs/r").json()["rows_accepted"] == 1
        assert reopened == [], "the run is not recovered from its log"
