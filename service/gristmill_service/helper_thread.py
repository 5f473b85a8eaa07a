"""A second thread for independent tasks, such as the shards of a batch.

Copying and arithmetic on arrays release the GIL, so that two threads use two cores.
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
    """Returns the only helper thread, for all batches: more threads would take cores from a trainer on the same
    machine. It is reused, because starting a thread takes milliseconds if all cores are busy."""
    return ThreadPoolExecutor(1, "gristmill-helper")


def _help(work: Callable[[], None]) -> Future[None] | None:
    """Starts the work also in the helper thread. Returns None if no thread can be started; the caller then does all."""
    try:
        return _helper().submit(work)
    except RuntimeError:
        return None


def in_two_threads(tasks: Iterable[T], do: Callable[[T], R]) -> list[R]:
    """Performs all tasks in this thread and, if it is free, in the helper thread. Returns the results.

    Raises the error of the first failed task, in task order; later tasks may be skipped. No task is running when the
    function returns or raises.
    """
    listed = list(tasks)
    missing, results, failed = iter(enumerate(listed)), dict[int, R](), dict[int, BaseException]()

    def work() -> None:
        # Both threads take tasks from the same list; taking a task is atomic.
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
        # If the helper has not started, no task is left for it.
        if helping is not None and not helping.cancel():
            wait([helping])
    if failed:
        raise failed[min(failed)]
    return [results[number] for number in range(len(listed))]
