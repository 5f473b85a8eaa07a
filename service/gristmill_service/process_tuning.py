"""Tunes the serving process: its memory allocator, garbage collection and threads.

docs/performance.md contains the measured effects. Nothing here changes a result.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gristmill.errors import UnavailableError

# glibc's parameters of mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_ON_HEAP = 32 << 20
_SPARE_BYTES = 512 << 20

_QUIET_S = 2.0

_SWITCH_S = 0.0005
_DESCRIPTORS = 32_768
_GC_THRESHOLDS = (10_000, 50, 50)


def tune_process() -> None:
    """Tunes this process for serving. Memory is tuned only with glibc, because other C libraries lack `mallopt`."""
    _reuse_memory()
    # Connections and run stores need file descriptors.
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(_DESCRIPTORS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    # A computing thread yields to the event loop after 0.5 ms instead of Python's 5.
    sys.setswitchinterval(_SWITCH_S)
    # Every row consists of a few small tuples, which live until their batch is freed: frequent collections would
    # traverse them and find little garbage. One collection of this many objects takes about 3 ms.
    gc.set_threshold(*_GC_THRESHOLDS)


def spare_what_is_there() -> None:
    """Excludes all current objects from garbage collection, because imported objects never become garbage."""
    gc.collect()
    gc.freeze()


def started_pool(
    threads: int, name: str, make: Callable[[int, str], ThreadPoolExecutor] = ThreadPoolExecutor
) -> ThreadPoolExecutor:
    """Returns a pool whose threads are already started, so that it cannot fail later for lack of threads.

    Raises UnavailableError if the threads cannot be started.
    """
    pool, all_run = make(threads, name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        pool.shutdown(cancel_futures=True)
        raise UnavailableError(
            f"the process cannot start {threads} more threads for its pool {name}; raise its limit of processes and "
            "threads (ulimit -u, a container's pids limit)"
        ) from None
    all_run.wait()
    return pool


def give_back_memory() -> None:
    """Returns freed memory to the system. After `tune_process`, glibc otherwise retains it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def give_back_memory_when_quiet(count: Callable[[], int]) -> None:
    """Returns freed memory to the system each time after no large message was read or sent for some seconds, until
    cancelled. count: returns the number of large messages so far."""
    before = count()
    is_due = False
    while True:
        await asyncio.sleep(_QUIET_S)
        now = count()
        if is_due and now == before:
            # In a thread, because it takes long if much is free.
            await asyncio.to_thread(give_back_memory)
        is_due, before = now != before, now


def most_connections() -> int:
    """Returns the maximum number of connections of each API, which leaves file descriptors for the stores."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_DESCRIPTORS if most == resource.RLIM_INFINITY else most) // 3


def _reuse_memory() -> None:
    """Makes glibc retain the memory of freed messages.

    Messages of megabytes are allocated and freed frequently. By default, glibc returns their memory to the system, and
    the pages of the next message are allocated and cleared again, which takes longer than filling them. With an arena
    per thread, each thread would retain its own memory.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
    mallopt(_M_ARENA_MAX, 1)
