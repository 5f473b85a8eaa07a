"""A client's token and certificates, and the certificate authorities that it trusts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from gristmill._wire.hosts import is_of_this_machine
from gristmill.errors import InvalidArgumentError

_PREFIX = "GRISTMILL_"
# Kubernetes replaces the token in a service account's file about once an hour.
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token and certificates of a client. The default of each setting is the environment variable in parentheses.

    token: sent with every call (GRISTMILL_TOKEN).
    token_file: the file with the token, read again every few seconds (GRISTMILL_TOKEN_FILE). While it cannot be read,
        the previous token stays in use.
    ca_file: the certificate authority that signed the service's certificate, as PEM (GRISTMILL_CA_FILE). Connections
        are encrypted.
    cert_file, key_file: the client's certificate and key, for a service that requires them (GRISTMILL_CERT_FILE,
        GRISTMILL_KEY_FILE).
    tls: True: encrypt connections without a `ca_file`, and trust gRPC's default authorities (GRISTMILL_TLS=1). False:
        without certificate files, send the token also to other machines in plain text, because the network encrypts it,
        as a service mesh does, or keeps others out (GRISTMILL_TLS=0).

    Raises InvalidArgumentError if two settings exclude each other, or a file cannot be read.
    """

    token: str | None = field(default_factory=lambda: _of("TOKEN"), repr=False)
    token_file: Path | str | None = field(default_factory=lambda: _of("TOKEN_FILE"))
    ca_file: Path | str | None = field(default_factory=lambda: _of("CA_FILE"))
    cert_file: Path | str | None = field(default_factory=lambda: _of("CERT_FILE"))
    key_file: Path | str | None = field(default_factory=lambda: _of("KEY_FILE"))
    tls: bool | None = field(default_factory=lambda: _tls_of_environment())
    _read: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise InvalidArgumentError("token and token_file are both set; set only one of them")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidArgumentError("only one of cert_file and key_file is set; set both, or neither")
        if self.token and not _is_header(self.token):
            raise InvalidArgumentError("token has characters that a header cannot contain; set it exactly as printed")
        self.metadata()

    @property
    def is_encrypted(self) -> bool:
        return bool(self.tls) or self.ca_file is not None or self.cert_file is not None

    def check_reach(self, address: str) -> None:
        """Raises InvalidArgumentError if the token would be sent to another machine in plain text, and `tls` is not
        False. address: HOST:PORT or unix:/PATH."""
        has_token = bool(self.token or self.token_file)
        if has_token and not self.is_encrypted and self.tls is None and not is_of_this_machine(address):
            raise InvalidArgumentError(
                f"token: it would be sent to {address} in plain text; set ca_file (GRISTMILL_CA_FILE), or tls=True "
                "(GRISTMILL_TLS=1) if a public authority signed the service's certificate; or, if the network itself "
                "protects it, as a service mesh does, tls=False (GRISTMILL_TLS=0)"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of each call."""
        token = self._current() if self.token_file else self.token
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel(self, library: Any, address: str, options: Any) -> Any:
        """Returns a channel of `grpc` or `grpc.aio`, with the current certificates in the files."""
        if not self.is_encrypted:
            return library.insecure_channel(address, options)
        ca, key, cert = (_bytes(name, getattr(self, name)) for name in ("ca_file", "key_file", "cert_file"))
        return library.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)

    def version(self) -> object:
        """Returns a value that changes when a certificate file changes. The files are checked every few seconds."""
        version, until = self._read.get("version", (None, 0.0))
        now = time.monotonic()
        if now >= until:
            version = tuple(_changed_at(path) for path in (self.ca_file, self.key_file, self.cert_file) if path)
            self._read["version"] = version, now + _LOOK_S
        return version

    def _current(self) -> str:
        token, until = self._read.get("token", ("", 0.0))
        now = time.monotonic()
        if now >= until:
            try:
                token = self._in_file()
            except InvalidArgumentError:
                # The file may be in the middle of a replacement. The service refuses a token that has expired.
                if not token:
                    raise
            self._read["token"] = token, now + _LOOK_S
        return str(token)

    def _in_file(self) -> str:
        token = (_bytes("token_file", self.token_file) or b"").decode("ascii", "replace").strip()
        if not _is_header(token):
            raise InvalidArgumentError(
                f"token_file: {self.token_file} has no token; set a file that contains only a token"
            )
        return token


def _is_header(token: str) -> bool:
    return bool(token) and token.isascii() and token.isprintable()


def _changed_at(path: Path | str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _of(name: str) -> str | None:
    return os.environ.get(_PREFIX + name) or None


def _tls_of_environment() -> bool | None:
    text = _of("TLS")
    if text not in (None, "0", "1"):
        raise InvalidArgumentError(f"GRISTMILL_TLS is {text!r}; set it to 1 or 0")
    return None if text is None else text == "1"


def _bytes(name: str, path: Path | str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{name}: cannot read {path}: {error.strerror}; set a readable file") from None
