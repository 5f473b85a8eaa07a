"""One service on the running event loop: its runs, its two APIs, and the order in which they start and stop.

Handles neither signals nor the exit status: `serve` does this for a process, and tests use the service directly.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import structlog

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.access.certificates import Certificates, PeerCertificates
from gristmill_service.access.gate import Gate, limits_of_each_run
from gristmill_service.api.admission import Admission, Limits
from gristmill_service.api.context import ApiContext
from gristmill_service.api.http.app import make_app, make_probe_app
from gristmill_service.api.http.server import HttpServer
from gristmill_service.api.http.waiting import WaitingServer
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.api.rpc.server import GrpcServer
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.monitoring.health.report import described
from gristmill_service.monitoring.metrics import Metrics, RunStats, Watched, run_stats
from gristmill_service.monitoring.views.tokens import TokenTexts
from gristmill_service.process_tuning import give_back_memory_when_quiet
from gristmill_service.run.runs import Runs
from gristmill_service.settings import Settings, split_address
from gristmill_service.storage.backends import Storage, open_storage

_log = structlog.get_logger(__name__)
_NAMED_RUNS = 20
_PROBE_CONNECTIONS = 64


class Service:
    """A service. Call `start` once, which sets its addresses; probe_url is None without probe_address. waiting: uses
    the HTTP addresses until the service listens."""

    grpc_address: str
    http_url: str
    probe_url: str | None
    runs: Runs

    def __init__(self, settings: Settings, waiting: WaitingServer | None = None) -> None:
        self._waiting = waiting or WaitingServer(settings)
        self._settings, self.long_poll = settings, LongPoll()
        # Stops all started parts, in reverse order.
        self._opened = AsyncExitStack()

    async def start(self) -> None:
        """Opens the stores and their runs. Returns when both APIs answer.

        Raises UnavailableError if an address is in use, StorageUnreachableError if a store does not answer, and
        InvalidArgumentError for an invalid setting. After an error, everything is closed.
        """
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise

    async def _start(self) -> None:
        settings, opened = self._settings, self._opened
        self._storage = await _opened_storage(settings, opened)
        metrics, admission = Metrics(), Admission(Limits.of(settings))
        self.runs = Runs(
            metrics.storing.timed(self._storage.shards),
            metrics.storing.timed(self._storage.runs),
            make_monitor=Monitor,
            max_row_bytes=int(settings.max_row_bytes),
            max_runs=settings.max_runs,
            limits_of_each=limits_of_each_run(settings),
            describe=described,
        )
        opened.push_async_callback(self.runs.close, 0.0)
        await self.runs.start()
        gate, certificates = Gate(settings, self.runs), Certificates.of(settings)
        metrics.watch(
            Watched(
                runs=self._run_stats,
                waiting=lambda: self.long_poll.count,
                leases=self.runs.leases,
                unhealthy_reason=self.runs.unhealthy_reason,
                room=self._room,
                quotas=lambda: gate.usage(admission.counts()),
            )
        )
        self._api = ApiContext(
            self.runs,
            admission,
            self.long_poll,
            metrics,
            int(settings.max_message_bytes),
            gate,
            [*settings.http_host_names.split(","), urlsplit(settings.advertise_http_url or "").hostname or ""],
            token_texts=None if settings.tokenizer is None else TokenTexts(settings.tokenizer),
            run_store=settings.run_place,
        )
        await self._listen(certificates)

    async def _listen(self, certificates: Certificates | None) -> None:
        settings, opened, api = self._settings, self._opened, self._api
        peers = None if certificates is None else PeerCertificates(certificates, settings.tls_peer_ca_file)
        await self._waiting.close()
        app = make_app(api, peers)
        self._http = HttpServer(app, settings.http_address, settings.shutdown_grace_s, certificates)
        opened.callback(self._http.close)
        self._probes = None
        if (address := settings.probe_address) is not None:
            named: Any = {"setting": "probe_address", "most": _PROBE_CONNECTIONS}
            self._probes = HttpServer(make_probe_app(app), address, 1, certificates, **named)
            opened.callback(self._probes.close)
        await asyncio.to_thread(_refuse_taken, settings.grpc_address)
        self._grpc = GrpcServer(api, settings, certificates, peers)
        self.grpc_address = api.grpc_address = self._grpc.address
        self.http_url, self.probe_url = self._http.url, None if self._probes is None else self._probes.url
        await asyncio.to_thread(
            self._storage.advertise,
            settings.advertise_grpc_address or self.grpc_address,
            settings.advertise_http_url or self.http_url,
            api.gate.secret.value,
        )
        for task in (
            api.admission.end_overdue(),
            give_back_memory_when_quiet(lambda: api.admission.large_messages),
        ):
            opened.callback(asyncio.create_task(task).cancel)
        opened.push_async_callback(self._close_apis)
        await self._grpc.start()
        await self._http.start()
        if self._probes is not None:
            await self._probes.start()
        api.not_ready = ""
        _log.info("ready", grpc=self.grpc_address, http=self.http_url, probes=self.probe_url)

    async def stop(self) -> None:
        """Refuses new calls, finishes sealed batches, answers waiting calls, and closes everything, within the grace
        period."""
        _log.info("shutting down", waiting=self.long_poll.count)
        if self._settings.run_store == "memory" and (names := [run.name for run in self.runs.own()]):
            lost = "runs lost, as they are only in memory; journal_dir keeps runs"
            _log.warning(lost, count=len(names), runs=names[:_NAMED_RUNS])
        await self._opened.aclose()
        _log.info("closed")

    async def _close_apis(self) -> None:
        grace_s, self._api.not_ready = self._settings.shutdown_grace_s, "shutting down"
        self._grpc.refuse_new_calls(grace_s)
        self._http.refuse_new_calls()
        await self.runs.close(grace_s)
        self.long_poll.close()
        await self._grpc.wait_until_idle()
        await self._http.wait_until_idle()
        if self._probes is not None:
            # Until here they report that the service shuts down.
            self._probes.refuse_new_calls()
            await self._probes.wait_until_idle()
        self._api.gate.flush_log()

    def _run_stats(self) -> Iterator[RunStats]:
        for run in self.runs.own():
            # The run was deleted or taken over in the meantime.
            with suppress(NotFoundError, UnavailableError):
                yield run_stats(run)

    def _room(self) -> Mapping[str, tuple[int, int]]:
        return {"rows": self.runs.row_room, **self._storage.room()}


async def _opened_storage(settings: Settings, opened: AsyncExitStack) -> Storage:
    """Opens the stores in a thread. They are closed at the end, also if this call is cancelled."""
    opening = asyncio.ensure_future(asyncio.to_thread(open_storage, settings))

    async def close() -> None:
        await asyncio.wait([opening])
        if opening.exception() is None:
            await asyncio.to_thread(opening.result().close)

    opened.push_async_callback(close)
    return await asyncio.shield(opening)


def _refuse_taken(grpc_address: str) -> None:
    """Raises UnavailableError for a port in use, before gRPC detects it, because gRPC would also log the failure."""
    if grpc_address.startswith("unix:"):
        return
    with suppress(socket.gaierror):
        addresses = socket.getaddrinfo(*split_address(grpc_address), type=socket.SOCK_STREAM)
        if all(_is_taken(family, where) for family, _, _, _, where in addresses):
            raise UnavailableError(
                f"grpc_address: cannot listen on {grpc_address}: it is in use; stop the program that uses it, or set "
                "another grpc_address (--grpc-address)"
            )


def _is_taken(family: int, where: Any) -> bool:
    try:
        with socket.socket(family) as probe:
            # Allows listening on a port on which earlier connections are still closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
