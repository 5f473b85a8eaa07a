"""The service's addresses: whether its replicas answer over gRPC and HTTP, their versions, and their clocks."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

import gristmill
from gristmill import Credentials
from gristmill._client.connection.channels import addresses_of
from gristmill.errors import GristmillError
from gristmill_service.cli.checks.check import Check
from gristmill_service.cli.counted import counted
from gristmill_service.cli.watch.snapshot import ReplicaSnapshot, connect
from gristmill_service.settings import split_address

_HTTP_TIMEOUT_S = 3.0
# A Date header has whole seconds.
_CLOCK_S = 2.0
_START = "start it with `gristmill serve`, give where it is by --address, or let this machine through to the port"


def check_replicas(address: str, http_port: int) -> Iterator[Check]:
    """Each replica of the address over gRPC, and over HTTP on the same host.

    Raises InvalidArgumentError for an address that is none.
    """
    with connect(address, "gristmill doctor") as client:
        replicas = client.replicas()
        for replica in replicas:
            yield from over_grpc(replica)
        if any(replica.is_reached for replica in replicas):
            try:
                yield Check("credentials", f"accepted, {counted(len(client.names()), 'run is', 'runs are')} visible")
            except GristmillError as error:
                yield Check("credentials", str(error), "see docs/security.md")
    for name in addresses_of(address):
        host = "127.0.0.1" if name.startswith("unix:") else split_address(name)[0]
        yield from _over_http(f"[{host}]:{http_port}" if ":" in host else f"{host}:{http_port}")


def over_grpc(replica: ReplicaSnapshot) -> Iterator[Check]:
    what = f"gRPC at {replica.address}"
    if not replica.is_reached:
        reason = replica.problem.removeprefix(f"{replica.address}: ").rpartition("; ")[0]
        yield Check(what, reason or replica.problem, _START)
        return
    if replica.problem:
        yield Check(what, "answers, and takes no new work", f"see to it that {replica.problem!r} is over")
    else:
        yield Check(what, "answers, and is ready")
    ours, theirs = gristmill.__version__, replica.version or "older than this command"
    if theirs == ours:
        yield Check(f"version of {replica.address}", f"{theirs}, as this command's")
    else:
        yield Check(
            f"version of {replica.address}", f"{theirs}, this command's is {ours}", "install one version everywhere"
        )


def _over_http(place: str) -> Iterator[Check]:
    credentials = Credentials()
    url = f"{'https' if credentials.is_encrypted else 'http'}://{place}/readyz"
    try:
        with httpx.Client(verify=_trust(credentials), timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            before = time.time()
            answer = client.get(url)
            half_s = (time.time() - before) / 2
    except (httpx.HTTPError, OSError) as error:
        yield Check(f"HTTP at {place}", f"no answer ({error})", f"{_START}, which --http-address names")
        return
    if answer.is_success:
        yield Check(f"HTTP at {place}", "answers, and is ready")
    else:
        yield Check(f"HTTP at {place}", f"{answer.status_code} to {url}", f"see to what it says: {answer.text[:200]!r}")
    if "date" in answer.headers:
        yield clock(place, parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5 - before - half_s, half_s)


def clock(place: str, ahead_s: float, unsure_s: float = 0.0) -> Check:
    """ahead_s: by how much that place's clock is ahead of this machine's. unsure_s: how wrong that may be, since nobody
    knows when within the call it was told."""
    if abs(ahead_s) <= _CLOCK_S + unsure_s:
        return Check(f"clock at {place}", "as this machine's, to the second")
    shown = datetime.now(UTC).isoformat(timespec="seconds")
    return Check(
        f"clock at {place}",
        f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's, which shows {shown}",
        "set both by NTP: tokens and certificates expire by them",
    )


def _trust(credentials: Credentials) -> ssl.SSLContext | bool:
    if not credentials.is_encrypted:
        return False
    context = ssl.create_default_context(cafile=None if credentials.ca_file is None else str(credentials.ca_file))
    if credentials.cert_file is not None:
        context.load_cert_chain(str(credentials.cert_file), str(credentials.key_file))
    return context
