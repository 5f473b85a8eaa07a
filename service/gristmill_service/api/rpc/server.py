"""The gRPC server: its address, limits and methods, and its start and stop."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import grpc

from gristmill.errors import UnavailableError
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.access.certificates import Certificates, PeerCertificates, grpc_credentials
from gristmill_service.api.context import ApiContext
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.api.rpc.handling import Handling, follow_calls, leave_out_gone_callers
from gristmill_service.api.rpc.methods import methods
from gristmill_service.api.rpc.probes import REFLECTION, Health, reflection_handler
from gristmill_service.process_tuning import most_connections
from gristmill_service.settings import Settings

_SERVICES = tuple(
    service.full_name
    for contract in (run_pb2, rollout_pb2, trainer_pb2)
    for service in contract.DESCRIPTOR.services_by_name.values()
)

# The limit per connection. Further calls wait in the client.
_CALLS_PER_CONNECTION = 1024
_IDLE_CONNECTION_MS = 15 * 60 * 1000


def _options(settings: Settings) -> tuple[tuple[str, int], ...]:
    limit = int(settings.max_message_bytes)
    return (
        ("grpc.max_receive_message_length", limit),
        # Disables gRPC's compression, which would expand messages before a call has its slot. Rows use zstd.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_send_message_length", limit),
        # Otherwise two services could share a port, and each would receive half of the calls.
        ("grpc.so_reuseport", 0),
        # Pings detect dead callers, so that their slots are released. Callers may also ping the service.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Newer versions of gRPC read this instead of the option above.
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        ("grpc.server_handshake_timeout_ms", 20_000),
        ("grpc.http2.max_requests_per_read", 1),
        ("grpc.http2.ping_on_rst_stream_percent", 100),
    )


class GrpcServer:
    """Serves gRPC after `start`. Create it on the event loop. Raises UnavailableError if the address is in use."""

    def __init__(
        self, api: ApiContext, settings: Settings, certificates: Certificates | None, peers: PeerCertificates | None
    ) -> None:
        self._forwarding = Forwarding(api.runs.is_owner, None if peers is None else peers.credentials)
        self._health, handling = Health(_SERVICES), Handling(api, self._forwarding)
        handlers = {method.path: handling.handler(method) for method in (*methods(api), *self._health.methods())}
        if api.gate.is_open:
            handlers[f"/{REFLECTION}/ServerReflectionInfo"] = reflection_handler(api.admission, _SERVICES)
        follow_calls(asyncio.get_running_loop())
        leave_out_gone_callers()
        self._server = grpc.aio.server(options=_options(settings))
        # Each registered method has its own queue, so that a flood of calls of one method does not delay others.
        for path, handler in handlers.items():
            _, service, method = path.split("/")
            self._server.add_registered_method_handlers(service, {method: handler})
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
                f"grpc_address: cannot listen on {address}: it is in use, not an address of this machine, or not "
                "permitted; stop the program that listens there, or set another grpc_address"
            )
        if path is not None:
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            return address
        return f"{address.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        await self._server.start()

    def refuse_new_calls(self, grace_s: float) -> None:
        """Refuses new calls. Running calls may continue for `grace_s`. Returns at once."""
        self._health.end()
        self._stopped = asyncio.ensure_future(self._server.stop(grace_s))

    async def wait_until_idle(self) -> None:
        """After `refuse_new_calls`, returns when the last call has been answered, or cancelled after `grace_s`."""
        await self._stopped
        await self._forwarding.close()


def _clear_stale_socket(path: Path) -> None:
    """Removes a stale socket file. Raises UnavailableError if a process listens on it, which gRPC would not check."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink()
            return
    raise UnavailableError(
        f"grpc_address: unix:{path} is in use; stop the program that uses it, or set another grpc_address "
        "(--grpc-address)"
    )
