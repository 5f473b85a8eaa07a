"""A second thread for work whose parts do not depend on each other, such as the shards of a batch.

Copying and arithmetic on arrays do not hold the interpreter's lock, so that two threads do them on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@cache
def _helper() -> ThreadPoolExecutor:
    """Returns the one thread for all batches: more would take cores from the trainer on the same machine. It lives on,
    because starting a thread takes milliseconds where all cores are busy."""
    return ThreadPoolExecutor(1, "gristmill-helper")


def _help(work: Callable[[], None]) -> Future[None] | None:
    """Has the second thread work, too. None where the system gives no thread: this one does all, then."""
    try:
        return _helper().submit(work)
    except RuntimeError:
        return None


def in_two_threads(tasks: Iterable[T], do: Callable[[T], R]) -> list[R]:
    """Does each of the tasks, in this thread and, where it is free, in the one that helps. Returns what they gave.

    Raises what the first of them that fails does, in their order; those behind it may be left undone. Nothing is done
    any more when it returns or raises.
    """
    listed = list(tasks)
    missing, results, failed = iter(enumerate(listed)), dict[int, R](), dict[int, BaseException]()

    def work() -> None:
        # Both threads take the next one from the same list, which is one step of the interpreter.
        for number, task in missing:
            if failed and min(failed) < number:
                return
            try:
                results[number] = do(task)
            except BaseException as error:  # noqa: BLE001 - raised below, by the thread that asked
                failed[number] = error
                return

    helping = _help(work) if len(listed) > 1 else None
    try:
        work()
    finally:
        # One that has not begun has nothing left to do.
        if helping is not None and not helping.cancel():
            wait([helping])
    if failed:
        raise failed[min(failed)]
    return [results[number] for number in range(len(listed))]
