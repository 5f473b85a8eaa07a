"""The gRPC server: its address, threads, limits, health and reflection."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gristmill._client.connection.transport import SUBMIT_ROWS, WRITE_COLUMNS
from gristmill._wire.codecs.columns_codec import ColumnsRequest
from gristmill._wire.codecs.submit_codec import Submission
from gristmill.errors import UnavailableError
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc, run_pb2, run_pb2_grpc, trainer_pb2
from gristmill_service.access.certificates import Certificates, PeerCertificates, grpc_credentials
from gristmill_service.access.gate import Gate
from gristmill_service.api.context import ApiContext
from gristmill_service.api.rpc import trainers
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.api.rpc.intake import AT_ONCE, Intake
from gristmill_service.api.rpc.interceptor import Interceptor
from gristmill_service.api.rpc.peers import queue_of
from gristmill_service.api.rpc.rollouts import RolloutServicer
from gristmill_service.api.rpc.runs import RunServicer
from gristmill_service.api.rpc.streams import Streams
from gristmill_service.api.rpc.trainers import TrainerServicer
from gristmill_service.call_threads import CallThreads
from gristmill_service.process_tuning import most_connections
from gristmill_service.settings import Settings

_SERVICES = tuple(
    contract.DESCRIPTOR.services_by_name[name].full_name
    for contract, name in ((run_pb2, "RunService"), (rollout_pb2, "RolloutService"), (trainer_pb2, "TrainerService"))
)

# Python runs one at a time; the second goes on while the first copies or hashes. More contend for the interpreter.
_AT_WORK = 2
# Beyond the places of what is read at once, a thread for each call that waits for one: later ones queue in gRPC.
_WORKERS = 2 * AT_ONCE
# Of one connection: more wait at the caller.
_CALLS_A_CONNECTION = 2048
_IDLE_CONNECTION_MS = 15 * 60 * 1000


def call_threads(gate: Gate, settings: Settings) -> CallThreads:
    """The threads of a server."""
    # One is started only when none is idle, so that many cost nothing until they are needed; with a place for every
    # waiter and stream, those can never take a thread that a short call needs.
    return CallThreads(_AT_WORK, _WORKERS + settings.max_waiters + settings.max_streams, queue_of(gate))


class GrpcServer:
    """Listens from `start` on. Raises UnavailableError from the constructor where the address cannot be had."""

    def __init__(
        self,
        context: ApiContext,
        settings: Settings,
        certificates: Certificates | None,
        peers: PeerCertificates | None,
        threads: CallThreads,
    ) -> None:
        self._threads = threads
        self._forwarding = Forwarding(
            settings.max_waiters, context.runs.is_owner, None if peers is None else peers.credentials
        )
        self._intake = Intake(context.gate)
        limit = int(settings.max_message_bytes)
        options = (
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            # Otherwise two services would share a port, each with half of the calls.
            ("grpc.so_reuseport", 0),
            # A caller that died without a word gives back the place of its stream; callers may ask in the same way.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            # What newer versions of gRPC heed in place of the one above.
            ("grpc.http2.ping_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_concurrent_streams", _CALLS_A_CONNECTION),
            ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
            ("grpc.max_allowed_incoming_connections", most_connections()),
        )
        guard = Interceptor(
            context.metrics,
            context.gate,
            self._forwarding,
            self._intake,
            {SUBMIT_ROWS: partial(Submission, most_bytes=limit), WRITE_COLUMNS: ColumnsRequest},
        )
        self._server = grpc.server(self._threads, interceptors=(guard,), options=options)
        self._health = health.HealthServicer()
        servicers: tuple[tuple[Callable[[Any, Any], None], object], ...] = (
            (run_pb2_grpc.add_RunServiceServicer_to_server, RunServicer(context)),
            (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(context)),
            (trainers.add_to_server, TrainerServicer(context, Streams(settings.max_streams))),
            (health_pb2_grpc.add_HealthServicer_to_server, self._health),
        )
        for add, servicer in servicers:
            add(servicer, self._server)
        if context.gate.is_open:
            names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.address = self._bind(settings.grpc_address, certificates)

    def _bind(self, address: str, certificates: Certificates | None) -> str:
        path = Path(address.removeprefix("unix:")) if address.startswith("unix:") else None
        if path is not None:
            _clear_stale_socket(path)
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, grpc_credentials(certificates))
        except RuntimeError:
            port = 0
        if not port:
            raise UnavailableError(
                f"grpc_address: cannot listen on {address}: it is in use, not of this machine, or not permitted; stop "
                "the program that listens there, or choose another"
            )
        if path is not None:
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            return address
        return f"{address.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        self._server.start()
        for service in ("", *_SERVICES):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def refuse_new_calls(self, grace_s: float) -> None:
        """Calls being answered go on for at most `grace_s`. Returns at once."""
        self._health.enter_graceful_shutdown()
        self._stopped = self._server.stop(grace_s)

    def wait_until_idle(self) -> None:
        """After `refuse_new_calls`: returns when the last call is answered, or cut off after the grace."""
        self._stopped.wait()
        self._forwarding.close()
        self._threads.shutdown()


def _clear_stale_socket(path: Path) -> None:
    """gRPC takes over any existing socket file; one that somebody listens on must stay theirs."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink()
            return
    raise UnavailableError(
        f"grpc_address: unix:{path} is in use; stop the program that uses it, or give another grpc_address "
        "(--grpc-address)"
    )
