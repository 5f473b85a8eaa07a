"""The errors that only storage raises. They belong to the tree of `gristmill.errors`, where clients find them too."""

from __future__ import annotations

from gristmill.errors import UnavailableError


class LogLostError(UnavailableError):
    """What was appended and what the log holds may differ: it has to be closed, and opened and replayed anew."""


class OwnedElsewhereError(UnavailableError):
    """Another process decides for the run: it can be asked there."""

    def __init__(self, message: str, run: str = "", grpc_address: str = "", http_url: str = "") -> None:
        super().__init__(message)
        self.run, self.grpc_address, self.http_url = run, grpc_address, http_url


class FullError(UnavailableError):
    """The file system has no room."""
