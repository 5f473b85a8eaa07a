"""Threads for what a run's writer hands out, and their end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gristmill_service.run.workers import Workers

PATIENCE_S = 60.0


def test_a_task_that_comes_while_the_workers_stop_is_run_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(1, "test")
    submit, stopping = workers._pool.submit, threading.Thread(target=workers.stop, args=(0.0,))

    def stop_first(*given: Any) -> Any:
        stopping.start()
        stopping.join(0.2)
        return submit(*given)

    monkeypatch.setattr(workers._pool, "submit", stop_first)
    workers.submit("key", lambda: None)
    stopping.join(PATIENCE_S)
    workers.submit("key", lambda: None)


def test_nobody_waits_for_a_task_that_is_dropped_at_the_end() -> None:
    workers, may_end, began = Workers(1, "test"), threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        may_end.wait(PATIENCE_S)

    workers.submit("busy", block)
    assert began.wait(PATIENCE_S)
    workers.submit("dropped", lambda: None)
    waiting = threading.Thread(target=workers.wait_idle, args=("dropped",), daemon=True)
    waiting.start()
    assert not workers.stop(0.01)
    may_end.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
