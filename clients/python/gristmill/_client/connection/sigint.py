"""Ctrl-C at a moment when nothing is half done: gRPC's locks and ours do not survive an exception in their midst."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class DeferSigint:
    """Ctrl-C within the block is raised at its end. A second one is not waited with: it is raised at once.

    Does nothing outside of the main thread, where Python raises no KeyboardInterrupt.
    """

    def __enter__(self) -> Self:
        self._before: Any = None
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._asked and error is None:
                self._before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            # Where this comes while the block is entered or left, nobody else would give it back.
            signal.signal(signal.SIGINT, self._before)
            self._before(number, frame)
        self._asked = True
