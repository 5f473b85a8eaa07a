"""The errors that only storage raises. They belong to the tree of `gristmill.errors`, where clients find them too."""

from __future__ import annotations

from gristmill.errors import UnavailableError


class LogLostError(UnavailableError):
    """What was appended and what the log holds may differ: it has to be closed, and opened and replayed anew."""


class OwnedElsewhereError(UnavailableError):
    """Another process decides for the run: it can be asked there. secret: what it wants to be shown then."""

    def __init__(
        self, message: str, run: str = "", grpc_address: str = "", http_url: str = "", secret: str = ""
    ) -> None:
        super().__init__(message)
        self.run, self.grpc_address, self.http_url, self.secret = run, grpc_address, http_url, secret


class FullError(UnavailableError):
    """The file system has no room."""
