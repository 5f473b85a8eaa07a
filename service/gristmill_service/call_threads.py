"""The threads that calls are answered in: few at work at a time, however many calls there are.

Python runs one thread at a time, and each change of threads costs as much as a small call's own work. So a call waits
in a queue, not in a thread of its own, until one of the few at work is done. A thread that waits for something does
not count as at work: it says so (`waiting`), or is found at it after a while. Calls that are answered elsewhere, as in
an event loop, take turns with those of the threads (`Turn`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

from gristmill_service.call_turns import CallTurns

_STUCK_S = 0.05

Task = Callable[[], None]


@contextmanager
def waiting() -> Iterator[None]:
    """Around a wait: where the thread is one of a pool's, or has a turn, another may work meanwhile."""
    worker = threading.current_thread()
    found = worker if isinstance(worker, _Worker) else _turn.get()
    if found is None:
        yield
        return
    found.pool.leave(found)
    try:
        yield
    finally:
        found.pool.come_back(found)


class _Worker(threading.Thread):
    """tasks: those that it is handed; None ends it. caller: whose it works on. since: when it began to."""

    def __init__(self, pool: CallThreads, number: int) -> None:
        super().__init__(target=pool.answer, args=(self,), name=f"grpc-{number}", daemon=True)
        self.pool = pool
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.caller, self.since = "", 0.0


class Turn:
    """Of a call that is answered elsewhere. since: since when it is at work; 0 while it waits. had_s: seconds for which
    it was before."""

    def __init__(self, pool: CallThreads, caller: str, begin: Task) -> None:
        self.pool, self.caller, self.begin = pool, caller, begin
        self.since, self.had_s = 0.0, 0.0
        self.is_over = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around the answering, once it has begun: `waiting` is about this call."""
        token = _turn.set(self)
        try:
            yield
        finally:
            _turn.reset(token)

    def end(self) -> None:
        """The call is answered, or given up before its turn came. A second call does nothing."""
        self.pool.end(self)


_turn: ContextVar[Turn | None] = ContextVar("gristmill_turn", default=None)


class CallThreads:
    """Thread-safe. An executor as `grpc.server` wants one."""

    def __init__(self, at_work: int, threads: int, queue_of: Callable[..., str]) -> None:
        """at_work: how many calls are worked on at once. threads: how many there may be, with those that wait.
        queue_of: of the arguments of `submit`, who calls: those who wait share the threads' CPU time."""
        self._at_work, self._most, self._queue_of = at_work, threads, queue_of
        self._lock = threading.Lock()
        self._waiting = CallTurns[Task | Turn]()
        self._threads: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._working: set[_Worker | Turn] = set()
        self._is_closed = False
        self._has_backlog = threading.Event()
        self._watch = threading.Thread(target=self._release_stuck, name="grpc-watch", daemon=True)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def task() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001  it is told to whoever asks the future
                future.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of threads is closed")
            self._put(self._queue_of(function, *args), task)
        return future

    def queue(self, caller: str, begin: Task) -> Turn:
        """Has a call wait for its turn. begin: is called when it has come, perhaps at once, from any thread; must be
        quick and raise nothing. Then the call has to `end`."""
        turn = Turn(self, caller, begin)
        with self._lock:
            if self._is_closed:
                # Those who are left share what there is.
                self._begin(turn)
                begin()
            else:
                self._put(caller, turn)
        return turn

    def shutdown(self) -> None:
        """Returns when every call that it has threads for is answered."""
        with self._lock:
            self._is_closed = True
            for worker in self._idle:
                worker.tasks.put(None)
            self._idle.clear()
            self._has_backlog.set()
        if self._watch.ident is not None:
            self._watch.join()
        # Also of those that are started meanwhile.
        for worker in self._threads:
            worker.join()

    # --- With the lock held

    def _put(self, caller: str, call: Task | Turn) -> None:
        if self._watch.ident is None:
            self._watch.start()
        self._waiting.put(caller, call)
        self._hand_out()
        if self._waiting and not self._has_backlog.is_set():
            self._has_backlog.set()

    def _hand_out(self) -> None:
        """Gives what is queued to threads, while so many may work."""
        while self._begin_turns() and (worker := self._free_worker()):
            worker.tasks.put(self._take(worker))

    def _begin_turns(self) -> bool:
        """Begins calls that need no thread, as far as it is their turn. Returns whether it is that of one that does."""
        while self._waiting and len(self._working) < self._at_work:
            if not isinstance(found := self._waiting.first(), Turn):
                return True
            self._waiting.take()
            if not found.is_over:
                self._begin(found)
                found.begin()
        return False

    def _free_worker(self) -> _Worker | None:
        if self._idle:
            return self._idle.pop()
        if len(self._threads) == self._most:
            return None
        worker = _Worker(self, len(self._threads))
        # Not before: one that cannot be started is none of them.
        worker.start()
        self._threads.append(worker)
        return worker

    def _begin(self, one: _Worker | Turn) -> None:
        self._working.add(one)
        one.since = time.monotonic()

    def _stop(self, turn: Turn) -> None:
        if turn.since:
            turn.had_s += time.monotonic() - turn.since
            turn.since = 0.0

    def _take(self, worker: _Worker) -> Task:
        worker.caller, task = self._waiting.take()
        assert not isinstance(task, Turn)
        self._begin(worker)
        return task

    # --- For whoever is at work

    def leave(self, one: _Worker | Turn) -> None:
        """It waits, and works no more for a while."""
        with self._lock:
            self._working.discard(one)
            if isinstance(one, Turn):
                self._stop(one)
            self._hand_out()

    def come_back(self, one: _Worker | Turn) -> None:
        with self._lock:
            if not isinstance(one, Turn) or not one.is_over:
                self._begin(one)

    def end(self, turn: Turn) -> None:
        with self._lock:
            if turn.is_over:
                return
            turn.is_over = True
            self._working.discard(turn)
            self._stop(turn)
            self._waiting.charge(turn.caller, turn.had_s)
            self._hand_out()

    def answer(self, worker: _Worker) -> None:
        task = worker.tasks.get()
        before = time.thread_time()
        while task is not None:
            task()
            now = time.thread_time()
            task = self._following(worker, now - before) or worker.tasks.get()
            before = now

    def _following(self, worker: _Worker, seconds: float) -> Task | None:
        """seconds: what the call took of the thread's time, waits not counted."""
        with self._lock:
            self._working.discard(worker)
            self._waiting.charge(worker.caller, seconds)
            if self._begin_turns():
                return self._take(worker)
            if self._is_closed:
                worker.tasks.put(None)
            else:
                self._idle.append(worker)
            return None

    def _release_stuck(self) -> None:
        """Lets others work beside threads that wait without having said so, for as long as calls are queued."""
        while not self._is_closed or self._waiting:
            self._has_backlog.wait()
            time.sleep(_STUCK_S / 2)
            with self._lock:
                before = time.monotonic() - _STUCK_S
                self._working = {worker for worker in self._working if worker.since > before}
                self._hand_out()
                if not self._waiting and not self._is_closed:
                    self._has_backlog.clear()
