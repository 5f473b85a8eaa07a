"""The processor time that the current call has taken, on the event loop and in threads, so that a refused call can cost
its caller what it cost the service."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_current: ContextVar[Meter | None] = ContextVar("gristmill_meter", default=None)


class Meter:
    """The time of one call. began: when the step of its coroutine began that is running, on the thread's clock."""

    __slots__ = ("_spent_s", "began")

    def __init__(self) -> None:
        self._spent_s, self.began = 0.0, time.thread_time()

    def add(self, began: float) -> None:
        """Adds the time of this thread since `began`."""
        self._spent_s += time.thread_time() - began

    def measured(self, function: Callable[[], T]) -> T:
        """Calls a function in this thread, and adds its time."""
        began = time.thread_time()
        try:
            return function()
        finally:
            self.add(began)

    @property
    def spent_s(self) -> float:
        """The seconds until now. Read it in the call's coroutine."""
        return self._spent_s + time.thread_time() - self.began


class metered(Generic[T]):  # noqa: N801 - used like a function
    """Awaits a coroutine, and measures its steps."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        meter, work = Meter(), self._work
        _current.set(meter)
        step: Callable[[Any], Any] = work.send
        value: Any = None
        while True:
            meter.began = time.thread_time()
            try:
                awaited = step(value)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                value = None
                meter.add(meter.began)
            try:
                value = yield awaited
                step = work.send
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # noqa: BLE001 - passed to the coroutine
                step, value = work.throw, error


def spent_s() -> float:
    """Returns the seconds that the current call has taken; 0 outside of a call."""
    meter = _current.get()
    return 0.0 if meter is None else meter.spent_s


class MeteredPool(ThreadPoolExecutor):
    """Threads whose work takes the time of the call that asks for it."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        meter = _current.get()
        if meter is None:
            return super().submit(function, *args, **kwargs)
        return super().submit(meter.measured, partial(function, *args, **kwargs))
