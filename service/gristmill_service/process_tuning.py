"""Tuning of the serving process: how it keeps memory, and the threads that it has.

docs/performance.md has the effects that were measured. Nothing here changes a result.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gristmill.errors import UnavailableError

# glibc's names for mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_ON_HEAP = 32 << 20
_SPARE_BYTES = 512 << 20

_SWITCH_S = 0.0005
_DESCRIPTORS = 32_768
_GC_THRESHOLDS = (10_000, 50, 50)


def tune_process() -> None:
    """Tunes this process to serve. Memory is tuned with glibc alone: other C libraries have no `mallopt`."""
    _reuse_memory()
    # Every connection uses a file descriptor, and so do the run stores.
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(_DESCRIPTORS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    # A thread that computes gives way to the event loop after 0.5 ms instead of Python's 5.
    sys.setswitchinterval(_SWITCH_S)
    # Every row is a few small tuples that live until their batch is freed: collecting would look at them again and
    # again, and there is little to find. One collection of that many objects takes some 3 ms.
    gc.set_threshold(*_GC_THRESHOLDS)


def spare_what_is_there() -> None:
    """Has garbage collection never look at what is there now: what was imported is never garbage."""
    gc.collect()
    gc.freeze()


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool whose threads all run: where the system gives no more of them later, nothing has to be started.

    Raises UnavailableError where it gives none now.
    """
    pool, all_run = ThreadPoolExecutor(threads, name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        pool.shutdown(cancel_futures=True)
        raise UnavailableError(
            f"the system gives this process no {threads} threads more for its pool {name}; raise its limit of "
            "processes and threads (ulimit -u, a container's pids limit)"
        ) from None
    all_run.wait()
    return pool


def give_back_memory() -> None:
    """Gives the memory that was freed back to the system, which `tune_process` has glibc keep."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def most_connections() -> int:
    """Returns how many connections each API may have, so that descriptors are left for the stores."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_DESCRIPTORS if most == resource.RLIM_INFINITY else most) // 3


def _reuse_memory() -> None:
    """Has glibc keep the memory of freed messages.

    Messages of megabytes come and go. By default glibc gives each back to the system, so that the next one's pages are
    allocated and cleared again, which takes longer than filling them. With an arena per thread, each thread would keep
    its own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
    mallopt(_M_ARENA_MAX, 1)
