"""The checks of `gristmill doctor`: this machine, Redis, and the service's addresses."""

from __future__ import annotations

import os
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from rich.filesize import decimal

import gristmill
from gristmill import Credentials
from gristmill._client.connection.channels import addresses_of
from gristmill.errors import GristmillError
from gristmill_service.cli.terminal import counted
from gristmill_service.cli.watch.service_client import Replica, connect
from gristmill_service.settings import Settings, split_address

_LEAST_BYTES = 1_000_000_000
# By default, containers have 64 MB of shared memory.
_LARGER = (
    "enlarge it to the size computed as in docs/operations.md, 'Sizing' (docker run --shm-size, in Kubernetes an "
    "emptyDir of medium Memory), or set --shared-memory-dir to another tmpfs"
)
_HTTP_TIMEOUT_S = 3.0
# The tolerance: a Date header has a resolution of one second.
_CLOCK_S = 2.0
_DATE_S = 1.5
"""Longer than a server uses one date."""
_START = "start it with `gristmill serve`, set its {}, or open the port to this machine"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check. subject: what was checked. state: what was observed. remedy: empty if the check passed."""

    subject: str
    state: str
    remedy: str = ""

    @property
    def is_well(self) -> bool:
        return not self.remedy

    def __str__(self) -> str:
        if self.is_well:
            return f"ok     {self.subject}: {self.state}"
        return f"WRONG  {self.subject}: {self.state}; {self.remedy}"


def check_machine(settings: Settings) -> Iterator[Check]:
    """Checks the directories in the settings: write access, size and free space."""
    for store, directory in settings.store_directories.items():
        if store == "shared_memory":
            yield _check_directory("shared memory", directory, _LARGER)
            continue
        # The service creates the directory when it starts.
        whole = directory.absolute()
        existing = next(path for path in (whole, *whole.parents) if path.exists())
        yield _check_directory(store, existing, "free space on the disk, or set another directory")


def _check_directory(subject: str, directory: Path, remedy: str) -> Check:
    subject = f"{subject} in {directory}"
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
        system = os.statvfs(directory)
    except OSError as error:
        return Check(subject, f"cannot be written to: {error.strerror}", f"grant the service write access, or {remedy}")
    size, room = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    free = f"{decimal(room)} free of {decimal(size)}"
    if room >= _LEAST_BYTES:
        return Check(subject, free)
    return Check(subject, f"{free}, and real batches need at least {decimal(_LEAST_BYTES)}", remedy)


def check_redis(settings: Settings) -> Iterator[Check]:
    """Checks the configuration of Redis, if the settings name one, against docs/operations.md. Skips a parameter that
    Redis does not report."""
    if settings.run_store != "redis":
        return
    from gristmill_service.storage.backends import redis_address
    from gristmill_service.storage.redis.connection import connect as connect_redis
    from gristmill_service.storage.redis.scripts import Durability
    from gristmill_service.storage.redis.servers import check_server

    address = redis_address(settings)
    subject = f"Redis at {address}"
    try:
        client = connect_redis(address)
        try:
            durability = Durability(settings.redis_min_replicas, settings.redis_wait_aof)
            findings = check_server(client, durability, is_thorough=True)
        finally:
            client.close()
    except GristmillError as error:
        yield Check(subject, "cannot be used", str(error))
        return
    for finding in findings:
        where, _, text = finding.partition(": ")
        state, _, remedy = text.rpartition("; ")
        yield Check(where, state or text, remedy if state else "see docs/operations.md, 'Redis'")
    if not findings:
        yield Check(subject, "answers, and is configured as in docs/operations.md")


def check_replicas(address: str, http_port: int, probe_port: int | None = None) -> Iterator[Check]:
    """Checks each replica of the address over gRPC, and on the same host over HTTP and, if there is one, at the probes'
    port.

    Raises InvalidArgumentError for an invalid address.
    """
    names = addresses_of(address)
    try:
        credentials = Credentials()
    except GristmillError as error:
        yield _wrong_credentials(error)
        return
    try:
        with connect(address, "gristmill doctor") as client:
            replicas = client.replicas()
            for replica in replicas:
                yield from over_grpc(replica)
            if any(replica.is_reached for replica in replicas):
                yield Check("credentials", f"accepted, {counted(len(client.names()), 'run is', 'runs are')} visible")
    except GristmillError as error:
        yield _wrong_credentials(error)
    for name in names:
        host = "127.0.0.1" if name.startswith("unix:") else split_address(name)[0]
        host = f"[{host}]" if ":" in host else host
        yield from over_http(f"{host}:{http_port}", credentials)
        if probe_port is not None:
            yield next(over_http(f"{host}:{probe_port}", credentials, "--probe-address"))


def _wrong_credentials(error: GristmillError) -> Check:
    return Check("credentials", str(error), "see docs/security.md")


def over_grpc(replica: Replica) -> Iterator[Check]:
    subject = f"gRPC at {replica.address}"
    if not replica.is_reached:
        reason = replica.problem.removeprefix(f"{replica.address}: ").rpartition("; ")[0]
        yield Check(subject, reason or replica.problem, _START.format("address with --address"))
        return
    if replica.problem:
        yield Check(subject, "answers, but accepts no new work", f"resolve {replica.problem!r}")
    else:
        yield Check(subject, "answers, and is ready")
    ours, theirs = gristmill.__version__, replica.version or "older than this command"
    if theirs == ours:
        yield Check(f"version of {replica.address}", f"{theirs}, the same as this command")
    else:
        yield Check(
            f"version of {replica.address}",
            f"{theirs}, this command has {ours}",
            "install the same version everywhere",
        )


def over_http(place: str, credentials: Credentials, setting: str = "--http-address") -> Iterator[Check]:
    url = f"{'https' if credentials.is_encrypted else 'http'}://{place}/readyz"
    try:
        with httpx.Client(verify=trust(credentials), timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            answer, difference = _with_clock(client, place, url)
            if difference is not None and not difference.is_well:
                # A busy server sends the time of an earlier second.
                time.sleep(_DATE_S)
                answer, difference = _with_clock(client, place, url)
    except (httpx.HTTPError, OSError) as error:
        yield Check(f"HTTP at {place}", f"no answer ({error})", _START.format(f"port with {setting}"))
        return
    if answer.is_success:
        yield Check(f"HTTP at {place}", "answers, and is ready")
    else:
        yield Check(
            f"HTTP at {place}", f"{answer.status_code} to {url}", f"resolve what it reports: {answer.text[:200]!r}"
        )
    if difference is not None:
        yield difference


def _with_clock(client: httpx.Client, place: str, url: str) -> tuple[httpx.Response, Check | None]:
    """Returns the answer, and the check of the server's clock, if the answer has a date."""
    before = time.time()
    answer = client.get(url)
    half_s = (time.time() - before) / 2
    if "date" not in answer.headers:
        return answer, None
    date = parsedate_to_datetime(answer.headers["date"]).timestamp()
    return answer, clock(place, date + 0.5 - before - half_s, half_s)


def clock(place: str, ahead_s: float, unsure_s: float = 0.0) -> Check:
    """Checks a clock. ahead_s: how far it is ahead of this machine's clock. unsure_s: the error of `ahead_s`, because
    the clock was read at an unknown time within the call."""
    if abs(ahead_s) <= _CLOCK_S + unsure_s:
        return Check(f"clock at {place}", "equals this machine's clock to the second")
    shown = datetime.now(UTC).isoformat(timespec="seconds")
    return Check(
        f"clock at {place}",
        f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's, which shows {shown}",
        "synchronize both with NTP, because tokens and certificates expire by the clock",
    )


def trust(credentials: Credentials) -> ssl.SSLContext:
    """Returns how httpx verifies a service."""
    context = ssl.create_default_context(cafile=None if credentials.ca_file is None else str(credentials.ca_file))
    if credentials.cert_file is not None:
        context.load_cert_chain(str(credentials.cert_file), str(credentials.key_file))
    return context
