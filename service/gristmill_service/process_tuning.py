"""Tuning of the serving process: how it keeps memory, and how its threads share the interpreter.

docs/performance.md has the effects that were measured. Nothing here changes a result.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress

# glibc's names for mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_ON_HEAP = 32 << 20
_SPARE_BYTES = 512 << 20

_SWITCH_S = 0.0005
_DESCRIPTORS = 32_768
_GC_THRESHOLDS = (50_000, 20, 50)


def tune_process() -> None:
    """Tunes this process to serve. Memory is tuned with glibc alone: other C libraries have no `mallopt`."""
    _reuse_memory()
    # A connection takes a descriptor, and what stores runs needs some, too.
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(_DESCRIPTORS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    # A thread that computes gives way to one that answers after 0.5 ms instead of Python's 5.
    sys.setswitchinterval(_SWITCH_S)
    # Every row is a few small tuples that live until their batch is freed: collecting would look at them again and
    # again, and there is nothing to find. What was imported is never garbage.
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.freeze()


def give_back_memory() -> None:
    """Gives the memory that was freed back to the system, which `tune_process` has glibc keep."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def most_connections() -> int:
    """How many connections each door may have, so that other descriptors are left for what stores runs."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_DESCRIPTORS if most == resource.RLIM_INFINITY else most) // 3


def _reuse_memory() -> None:
    """Has glibc keep the memory of freed messages.

    Messages of megabytes come and go. By default glibc gives each back to the system, so that the next one's pages are
    made and cleared anew, which takes longer than filling them. With an arena a thread, each thread would keep its own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)
    mallopt(_M_ARENA_MAX, 1)
