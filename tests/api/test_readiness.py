"""/readyz asks what keeps the runs, which may take a while, and holds up no other call meanwhile."""

from __future__ import annotations

import threading
import time

import httpx

from gristmill_service.api.context import ApiContext
from gristmill_service.api.http.app import make_app
from gristmill_service.api.http.server import HttpServer
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.run.runs import Runs
from gristmill_service.storage.memory_runs import MemoryRunStore
from gristmill_service.storage.memory_shards import MemoryShardStore


class SlowRunStore(MemoryRunStore):
    """A store whose file system hangs until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def unhealthy_reason(self) -> str:
        if threading.current_thread().name.startswith("gristmill"):
            # The service's own clockwork.
            return ""
        self.asked.set()
        self.answers.wait(10)
        return ""


def test_a_slow_disk_holds_up_no_other_call() -> None:
    store = SlowRunStore()
    runs = Runs(MemoryShardStore(), store)
    server = HttpServer(make_app(ApiContext(runs, LongPoll(8), Metrics(), 1 << 20, not_ready="")), "127.0.0.1:0", 1.0)
    server.start()
    ready: list[int] = []
    asking = threading.Thread(target=lambda: ready.append(httpx.get(f"{server.url}/readyz", timeout=20).status_code))
    try:
        asking.start()
        assert store.asked.wait(10)
        began = time.monotonic()
        assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
        assert time.monotonic() - began < 2
        assert not ready
    finally:
        store.answers.set()
        asking.join()
        server.refuse_new_calls()
        server.wait_until_idle()
        runs.close(1)
    assert ready == [200]
