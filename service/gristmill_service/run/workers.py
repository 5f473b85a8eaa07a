"""Threads for what a run's writer hands out: building batches, removing what is not needed any more, timers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

Task = Callable[[], None]

_log = structlog.get_logger(__name__)


class TaskQueue(Protocol):
    def submit(self, key: Hashable, task: Task) -> None:
        """Runs the task later, after those that were given before under the same key."""


class Workers:
    """Tasks of one key run one after another, in order; those of different keys side by side, on a few threads.
    Thread-safe."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._changed = threading.Condition()
        self._queues: dict[Hashable, deque[Task]] = {}
        self._is_stopped = False

    def submit(self, key: Hashable, task: Task) -> None:
        """After `stop`, the task is dropped."""
        with self._changed:
            if self._is_stopped:
                return
            queue = self._queues.get(key)
            if queue is not None:
                queue.append(task)
                return
            self._queues[key] = deque([task])
            self._pool.submit(self._run_next, key)

    def is_busy(self, key: Hashable) -> bool:
        """Whether a task of this key runs or is to run."""
        return key in self._queues

    def wait_idle(self, key: Hashable) -> None:
        """Returns when no task of this key runs or is to run, or the workers were stopped. New ones must not come
        meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or key not in self._queues)

    def stop(self, timeout_s: float) -> bool:
        """Takes no more tasks. Returns when those that were given are done, or after the timeout; whether they are."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._queues, max(0.0, deadline - time.monotonic()))
            self._is_stopped = True
            self._changed.notify_all()
            is_done = not self._queues
        self._pool.shutdown(wait=is_done, cancel_futures=True)
        return is_done

    def _run_next(self, key: Hashable) -> None:
        task = self._queues[key][0]
        try:
            task()
        except Exception:  # noqa: BLE001 - a task that fails must not end the thread of all others
            _log.exception("task failed", key=str(key))
        with self._changed:
            queue = self._queues[key]
            queue.popleft()
            if queue and not self._is_stopped:
                self._pool.submit(self._run_next, key)
            else:
                del self._queues[key]
                self._changed.notify_all()
