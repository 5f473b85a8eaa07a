"""One look at a running service: how its replicas are, and what each run says of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import grpc

from gristmill._client.channels import addresses_of
from gristmill._client.transport import Transport
from gristmill.errors import DeadlineExceededError, GristmillError, NotFoundError, UnavailableError
from gristmill.v1 import run_pb2

CANNOT_BE_REACHED = (UnavailableError, DeadlineExceededError)
TIMEOUT_S = 3.0
"""For how long a look tries again before it says that the service cannot be reached."""


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """is_reached: whether it answered. trouble: why it takes no new work, or does not answer; empty when it is well."""

    address: str
    is_reached: bool
    trouble: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class RunLook:
    """status: None where the run's owner does not answer, with the reason in `trouble`."""

    run: str
    status: run_pb2.RunStatus | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """at: seconds of a clock that only goes forward."""

    at: float
    replicas: list[ReplicaLook]
    runs: list[RunLook]


class Looker:
    """A connection to look through: to each replica for its health, to whichever serves for the runs."""

    def __init__(self, address: str, every: Transport, each: dict[str, Transport]) -> None:
        self.address = address
        self._every, self._each = every, each

    def look(self, run: str | None = None) -> Look:
        """At all runs, or at one. Raises UnavailableError or DeadlineExceededError where no replica answers, and
        NotFoundError where there is no such run."""
        replicas = self._replicas()
        if not any(replica.is_reached for replica in replicas):
            raise UnavailableError("; ".join(replica.trouble for replica in replicas))
        names = [run] if run is not None else sorted(self._names())
        runs = [found for name in names if (found := self._run(name, is_asked_for=run is not None)) is not None]
        return Look(time.monotonic(), replicas, runs)

    def status(self, run: str) -> run_pb2.RunStatus:
        """Raises as `look` does."""
        answer: run_pb2.GetRunResponse = self._every.call(self._every.runs.GetRun, run_pb2.GetRunRequest(run=run))
        return answer.status

    def groups(self, run: str) -> list[run_pb2.GroupStatus]:
        """Every group that was ever admitted, the decided ones first, as they were decided."""
        pages = self._every.call(
            lambda request, timeout: list(self._every.runs.ListGroups(request, timeout=timeout)),
            run_pb2.ListGroupsRequest(run=run),
        )
        return [group for page in pages for group in page.groups]

    def _names(self) -> list[str]:
        answer: run_pb2.ListRunsResponse = self._every.call(self._every.runs.ListRuns, run_pb2.ListRunsRequest())
        return list(answer.runs)

    def _run(self, name: str, *, is_asked_for: bool) -> RunLook | None:
        """None for one that was deleted since its name was listed."""
        try:
            return RunLook(name, self.status(name))
        except NotFoundError:
            if is_asked_for:
                raise
            return None
        except CANNOT_BE_REACHED as error:
            return RunLook(name, None, why(error))

    def _replicas(self) -> list[ReplicaLook]:
        """All at once: one that hangs delays the others' answers by no more than its own."""
        with ThreadPoolExecutor(len(self._each)) as pool:
            return list(pool.map(_health, self._each, self._each.values()))


def _health(address: str, transport: Transport) -> ReplicaLook:
    try:
        answer: run_pb2.GetHealthResponse = transport.call(transport.runs.GetHealth, run_pb2.GetHealthRequest())
    except CANNOT_BE_REACHED as error:
        return ReplicaLook(address, False, why(error))
    except GristmillError as error:
        if grpc.StatusCode.UNIMPLEMENTED.name in str(error):
            # An older version, in a rolling upgrade.
            return ReplicaLook(address, True)
        raise
    return ReplicaLook(address, True, answer.not_ready, answer.version)


def why(error: GristmillError) -> str:
    """Without what the client says of its attempts, of which who looks chose nothing."""
    return str(error).partition(" (gave up after ")[0].partition(" (request ")[0]


@contextmanager
def looking(address: str, owner: str) -> Iterator[Looker]:
    """Raises InvalidArgumentError for an address that is none."""
    with ExitStack() as opened:
        every = opened.enter_context(closing(Transport(address, TIMEOUT_S, owner)))
        names = addresses_of(address)
        alone = {name: opened.enter_context(closing(Transport(name, TIMEOUT_S, owner))) for name in names[1:]}
        # One address needs one connection.
        first = every if len(names) == 1 else opened.enter_context(closing(Transport(names[0], TIMEOUT_S, owner)))
        yield Looker(address, every, {names[0]: first, **alone})
