"""Large requests in files that the service reads, where both are on one machine: what is written and read once is
copied six times by a connection.

The service names a directory of its shared memory. Who cannot write there, because it is another machine's or another
user's, sends its requests.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from gristmill._wire.codecs.submit_codec import Buffer
from gristmill.errors import GristmillError, UnavailableError
from gristmill.v1 import rollout_pb2

# Those of calls that are over are kept, for their memory is there already. Larger requests are sent: new pages for them
# would take longer than the connection does.
_MOST_IDLE = 3
_LARGEST_BYTES = 8 << 20
# The kernel takes no more pieces at once (IOV_MAX).
_PIECES = 1024


class RequestFile:
    """A file of this process' own. The lock that it holds says that the process lives; it goes with it."""

    def __init__(self, directory: str) -> None:
        """Raises OSError where it cannot be made."""
        self.directory, self._name = directory, f"{os.getpid()}-{secrets.token_hex(8)}"
        self._path = Path(directory) / self._name
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self.size = 0
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError("it was taken for one that is left, before it was locked")
        except OSError:
            self.discard()
            raise

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Writes the pieces over what it has. Raises OSError, as where memory is full."""
        self.size = 0
        left = iter(pieces)
        while some := list(islice(left, _PIECES)):
            most = sum(map(len, some))
            if os.pwritev(self._descriptor, some, self.size) < most:
                raise OSError("the file took less than was written")
            self.size += most

    def message(self) -> bytes:
        """The request that refers to it."""
        file = rollout_pb2.RequestFile(name=self._name, size=self.size)
        return rollout_pb2.SubmitRowsRequest(file=file).SerializeToString()

    def discard(self) -> None:
        """Gives back its memory. Who reads it at this moment reads it to its end."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class RequestFiles:
    """Thread-safe. A file has one request at a time, until that is answered; one whose call failed is never written
    again, for the service may read it still."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directory = self._refused = ""
        self._idle: list[RequestFile] = []

    def told(self, directory: str) -> None:
        """The service reads requests there; it says nothing where it does not."""
        if directory and directory not in (self._directory, self._refused):
            self._use(directory)

    def write(self, pieces: Sequence[Buffer]) -> RequestFile | None:
        """A file with these bytes; None where the request has to be sent."""
        if sum(map(len, pieces)) > _LARGEST_BYTES:
            return None
        with self._lock:
            directory = self._directory
            file = self._idle.pop() if self._idle else None
        if not directory:
            return None
        try:
            file = file or RequestFile(directory)
            file.write(pieces)
        except OSError:
            if file is not None:
                file.discard()
            return None
        return file

    def answered(self, file: RequestFile) -> None:
        with self._lock:
            is_kept = file.directory == self._directory and len(self._idle) < _MOST_IDLE
            if is_kept:
                self._idle.append(file)
        if not is_kept:
            file.discard()

    def failed(self, file: RequestFile, error: GristmillError) -> None:
        """Where the service may not be able to read the file, the next requests are sent."""
        file.discard()
        if isinstance(error, UnavailableError) and file.directory == self._directory:
            self._refused = file.directory
            self._use("")

    def close(self) -> None:
        self._use("")

    def _use(self, directory: str) -> None:
        with self._lock:
            idle, self._idle, self._directory = self._idle, [], directory
        for file in idle:
            file.discard()
