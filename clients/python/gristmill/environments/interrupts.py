"""Ctrl-C where a package has put its own handler in the place of asyncio's."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cancelled_by_sigint() -> Iterator[None]:
    """Ctrl-C cancels the task that is within, which raises KeyboardInterrupt when it has ended: as with `asyncio.run`,
    which leaves the handler of a package alone. One that raises in the midst of whatever runs breaks what the task
    would tidy up with. A second Ctrl-C is the package's.

    Does nothing outside of the main thread, which has no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task, asked = asyncio.get_running_loop(), asyncio.current_task(), False
    assert task is not None
    before: Any = signal.getsignal(signal.SIGINT)

    def restore() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    def ask() -> None:
        nonlocal asked
        asked = True
        restore()
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, ask)
    try:
        yield
    except asyncio.CancelledError:
        if asked and not task.uncancel():
            raise KeyboardInterrupt from None
        raise
    finally:
        if not asked:
            restore()
