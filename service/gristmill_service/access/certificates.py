"""The certificates of both APIs. Files are reloaded when they change, for new connections."""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from gristmill.errors import InvalidArgumentError
from gristmill_service.settings import Settings

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of a server's certificates.

    cert_file: the chain. client_ca_file: the CA that must have signed clients' certificates; None: they need none.
    """

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None

    @classmethod
    def of(cls, settings: Settings) -> Certificates | None:
        if settings.tls_cert_file is None or settings.tls_key_file is None:
            return None
        certificates = cls(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
        certificates.check()
        return certificates

    def check(self) -> None:
        """Raises InvalidArgumentError if a file cannot be read, or if the key does not match the certificate."""
        for name, path in (
            ("tls_cert_file", self.cert_file),
            ("tls_key_file", self.key_file),
            ("tls_client_ca_file", self.client_ca_file),
        ):
            try:
                _ = path and path.read_bytes()
            except OSError as error:
                raise InvalidArgumentError(f"{name}: cannot read {path}: {error.strerror}; pass a PEM file") from None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.cert_file, self.key_file)
            if self.client_ca_file is not None:
                context.load_verify_locations(self.client_ca_file)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgumentError(
                f"tls_cert_file, tls_key_file: {self.cert_file} and {self.key_file} are not a certificate and its key: "
                f"{error}; pass matching PEM files"
            ) from None

    def version(self) -> tuple[int, ...]:
        files = (self.cert_file, self.key_file, self.client_ca_file)
        return tuple(os.stat(path).st_mtime_ns for path in files if path is not None)


def grpc_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Returns the credentials of a gRPC server."""
    watch = _Watch(certificates)

    def fetch() -> Any:
        return _grpc_configuration(certificates) if watch.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        _grpc_configuration(certificates), fetch, require_client_authentication=certificates.client_ca_file is not None
    )


def _grpc_configuration(certificates: Certificates) -> Any:
    authority = certificates.client_ca_file
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key_file.read_bytes(), certificates.cert_file.read_bytes())],
        root_certificates=None if authority is None else authority.read_bytes(),
    )


class HttpCertificates:
    """The TLS context of an HTTP server. It is replaced when the files change: a context resumes the sessions that it
    began, without the client's certificate, so that an old context would accept the clients of a replaced CA."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates, self._watch = certificates, _Watch(certificates)
        self._context = _server_context(certificates)

    def context(self) -> ssl.SSLContext:
        """Returns the context for the next handshake."""
        if self._watch.changed():
            self._context = _server_context(self._certificates)
        return self._context


class PeerCertificates:
    """The certificates for connections to other services. Thread-safe. New connections use renewed certificates."""

    def __init__(self, certificates: Certificates, ca_file: Path | None) -> None:
        self._own, self._ca_file = certificates, ca_file
        self._watch, self._lock = _Watch(certificates), threading.Lock()
        self._context = ssl.create_default_context(cafile=ca_file)
        self._renew()

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials for gRPC connections to other services; the same object until a file changes."""
        with self._lock:
            self._look()
            return self._credentials

    def context(self) -> ssl.SSLContext:
        """Returns the TLS context for HTTP connections: always the same object, with the newest certificate."""
        with self._lock:
            self._look()
            return self._context

    def _look(self) -> None:
        if self._watch.changed():
            try:
                self._renew()
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "certificate for other services cannot be read; previous one stays in use", reason=str(error)
                )

    def _renew(self) -> None:
        certificates = self._own
        authority = None if self._ca_file is None else self._ca_file.read_bytes()
        self._context.load_cert_chain(certificates.cert_file, certificates.key_file)
        self._credentials = grpc.ssl_channel_credentials(
            authority, certificates.key_file.read_bytes(), certificates.cert_file.read_bytes()
        )


def _server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificates.cert_file, certificates.key_file)
    if certificates.client_ca_file is not None:
        context.load_verify_locations(certificates.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Watch:
    """Reports each change of the files once, as soon as the files match each other."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates, self._lock = certificates, threading.Lock()
        self._version = certificates.version()

    def changed(self) -> bool:
        with self._lock:
            try:
                version = self._certificates.version()
                if version == self._version:
                    return False
                self._certificates.check()
            except (OSError, InvalidArgumentError) as error:
                # A renewal may have replaced only some of the files yet.
                _log.warning("certificates cannot be read; previous ones stay in use", reason=str(error))
                return False
            self._version = version
        _log.info("certificates reloaded", file=str(self._certificates.cert_file))
        return True
