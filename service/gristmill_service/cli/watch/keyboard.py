"""Single keys of a terminal, as they are pressed."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that returns the key that is pressed within so many seconds, or nothing after them. Ctrl-C stays
    Ctrl-C. Where standard input is no terminal, it only waits."""
    if not sys.stdin.isatty():
        yield _wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield _pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _pressed(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
