"""/readyz asks the storage, which may take a while, and holds up no other call meanwhile."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from gristmill_service.service import Service


def test_a_slow_disk_holds_up_no_other_call(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers, ready = threading.Event(), threading.Event(), list[int]()

    def slowly() -> str:
        asked.set()
        answers.wait(20)
        return ""

    monkeypatch.setattr(service.runs, "unhealthy_reason", slowly)
    asking = threading.Thread(
        target=lambda: ready.append(httpx.get(f"{service.http_url}/readyz", timeout=30, trust_env=False).status_code)
    )
    asking.start()
    try:
        assert asked.wait(10)
        began = time.monotonic()
        assert httpx.get(f"{service.http_url}/healthz", timeout=10, trust_env=False).status_code == 200
        assert time.monotonic() - began < 10
        assert not ready
    finally:
        answers.set()
        asking.join()
    assert ready == [200]
