"""An open file of the journal, shared by threads. Its descriptor is never used after it could be another file's."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from gristmill.errors import UnavailableError


class OpenFile(AbstractContextManager[int]):
    """Owns a descriptor and counts its users. Thread-safe.

    The system gives the number of a closed file to the next file that is opened, which may be another run's. So a
    number is used only inside `use`, and it is closed when `close` was called and the last user has left.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        # Guards what follows.
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    def use(self) -> AbstractContextManager[int]:
        """A context with the descriptor, which many may enter. Entering raises UnavailableError after `close`."""
        # Itself, as every append enters it: a generator would take as long as a small record's write.
        return self

    def __enter__(self) -> int:
        with self._lock:
            if self._is_closed:
                raise closed_error(self._path.parent)
            self._users += 1
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._is_closed and not self._users
        if is_last:
            os.close(self._descriptor)

    @property
    def is_released(self) -> bool:
        """Whether `close` was called, and nobody uses the file any more."""
        with self._lock:
            return self._is_closed and not self._users

    def close(self) -> None:
        """Nobody can begin to use the file any more. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            is_unused = not self._users
        if is_unused:
            os.close(self._descriptor)


def closed_error(directory: Path) -> UnavailableError:
    return UnavailableError(
        f"the files of {directory} were closed meanwhile, because the run is being deleted or read again; ask again"
    )
