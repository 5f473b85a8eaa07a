"""/readyz asks the store, which may take long, and holds up no other call meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

from tests.on_loop import Service, on_loop
from tests.run.harness import CONFIG


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


def test_a_batch_that_waits_for_shared_memory_leaves_the_service_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.runs.create("full", CONFIG)
    monkeypatch.setattr(service._target.runs._runs["full"]._builder, "blocked_reason", "batch 0 waits")
    answer = httpx.get(f"{service.http_url}/readyz", trust_env=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "waits": "batch 0 waits"})
