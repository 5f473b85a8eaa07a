"""One service: its runs, its two front doors, and the order in which they start and stop.

Owns no signal and no exit status: `serve` wires it to a process, tests hold it directly.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import structlog

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.access.certificates import Certificates, PeerCertificates
from gristmill_service.access.gate import Gate
from gristmill_service.access.quotas import most_a_run
from gristmill_service.api.context import ApiContext
from gristmill_service.api.http.app import make_app
from gristmill_service.api.http.server import HttpServer
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.api.rpc.server import GrpcServer, call_threads
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.monitoring.metrics.registry import Watched
from gristmill_service.monitoring.metrics.run_stats import RunStats, run_stats
from gristmill_service.monitoring.views.token_texts import TokenTexts
from gristmill_service.run.runs import Runs
from gristmill_service.settings import Settings, split_address
from gristmill_service.storage.backends import open_storage

_log = structlog.get_logger(__name__)


class Service:
    """Listens from `start` on. Raises UnavailableError from the constructor where an address cannot be had."""

    def __init__(self, settings: Settings) -> None:
        self._grace_s = settings.shutdown_grace_s
        with ExitStack() as undo:
            self._storage = undo.enter_context(open_storage(settings))
            metrics = Metrics()
            self.runs = Runs(
                metrics.storing.timed(self._storage.shards),
                metrics.storing.timed(self._storage.runs),
                make_monitor=Monitor,
                max_row_bytes=int(settings.max_row_bytes),
                max_runs=settings.max_runs,
                most_a_run=most_a_run(settings),
            )
            undo.callback(self.runs.close, 0.0)
            self.long_poll = LongPoll(settings.max_waiters)
            gate, certificates = Gate(settings, self.runs), Certificates.of(settings)
            metrics.watch(
                Watched(
                    runs=self._run_stats,
                    waiting=lambda: self.long_poll.count,
                    leases=self.runs.leases,
                    unhealthy_reason=self.runs.unhealthy_reason,
                    room=self._room,
                    quotas=gate.usage,
                )
            )
            self._context = ApiContext(
                self.runs,
                self.long_poll,
                metrics,
                int(settings.max_message_bytes),
                gate,
                [*settings.http_host_names.split(","), urlsplit(settings.advertise_http_url or "").hostname or ""],
                token_texts=None if settings.tokenizer is None else TokenTexts(settings.tokenizer),
            )
            peers = None if certificates is None else PeerCertificates(certificates, settings.tls_peer_ca_file)
            threads = call_threads(gate, settings)
            app = make_app(self._context, peers, threads)
            self._http = HttpServer(app, settings.http_address, settings.shutdown_grace_s, certificates)
            undo.callback(self._http.close)
            _refuse_taken(settings.grpc_address)
            self._grpc = GrpcServer(self._context, settings, certificates, peers, threads)
            undo.pop_all()
        self.grpc_address = self._context.grpc_address = self._grpc.address
        self.http_url = self._http.url
        self._storage.advertise(
            settings.advertise_grpc_address or self.grpc_address,
            settings.advertise_http_url or self.http_url,
            gate.secret.value,
        )

    def start(self) -> None:
        """Returns when both doors answer."""
        self._grpc.start()
        self._http.start()
        self._context.not_ready = ""
        _log.info("ready", grpc=self.grpc_address, http=self.http_url)

    def stop(self) -> None:
        """Takes no new calls, finishes what is being sealed, answers who waits, and closes. Within the grace."""
        _log.info("shutting down", waiting=self.long_poll.count)
        self._context.not_ready = "shutting down"
        with ExitStack() as whatever_fails:
            # Memory that outlives the process is given back in any case.
            whatever_fails.callback(self._storage.close)
            self._grpc.refuse_new_calls(self._grace_s)
            self._http.refuse_new_calls()
            self.runs.close(self._grace_s)
            self.long_poll.close()
            self._grpc.wait_until_idle()
            self._http.wait_until_idle()
            self._context.gate.flush_log()
        _log.info("closed")

    def _run_stats(self) -> Iterator[RunStats]:
        for run in self.runs.own():
            # Deleted, or taken over, since the list was made.
            with suppress(NotFoundError, UnavailableError):
                yield run_stats(run)

    def _room(self) -> Mapping[str, tuple[int, int]]:
        return {"rows": self.runs.row_room, **self._storage.room()}


def _refuse_taken(grpc_address: str) -> None:
    """Finds a port that is taken before gRPC does, which would also log the failure in its own form."""
    if grpc_address.startswith("unix:"):
        return
    with suppress(socket.gaierror):
        found = socket.getaddrinfo(*split_address(grpc_address), type=socket.SOCK_STREAM)
        if all(_is_taken(family, where) for family, _, _, _, where in found):
            raise UnavailableError(
                f"grpc_address: cannot listen on {grpc_address}: it is in use; stop the program that uses it, or give "
                "another grpc_address (--grpc-address)"
            )


def _is_taken(family: int, where: Any) -> bool:
    try:
        with socket.socket(family) as probe:
            # A port whose last connections are still closing may be taken again.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
