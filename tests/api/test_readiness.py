"""/readyz asks the store, which may take long, and holds up no other call meanwhile."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.on_loop import Service


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
        assert "what stores the runs has not answered for 2 s" in refused.text
        assert [get(path).status_code for path in ("healthz", "v1/runs")] == [200, 200]
        assert time.monotonic() - began < 10
    finally:
        answers.set()
    assert get("readyz").status_code == 200
