"""A running service at one moment: its replicas, and what each run reports of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import grpc

from gristmill._client.connection.channels import addresses_of
from gristmill._client.connection.transport import Transport
from gristmill.errors import DeadlineExceededError, GristmillError, NotFoundError, UnavailableError
from gristmill.v1 import run_pb2

CANNOT_BE_REACHED = (UnavailableError, DeadlineExceededError)
TIMEOUT_S = 3.0
"""A call is tried again for so long before the service counts as unreachable."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """is_reached: whether it answered. problem: why it takes no new work, or does not answer; empty when it is well."""

    address: str
    is_reached: bool
    problem: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """status: None where the run's owner does not answer, for `unreachable_reason`."""

    run: str
    status: run_pb2.RunStatus | None
    unreachable_reason: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """at: seconds of a clock that only goes forward."""

    at: float
    replicas: list[ReplicaSnapshot]
    runs: list[RunSnapshot]


class ServiceClient:
    """Connections to each replica for its health, and to whichever serves for the runs."""

    def __init__(self, any_replica: Transport, replicas: dict[str, Transport]) -> None:
        self._any, self._replicas = any_replica, replicas

    def snapshot(self, run: str | None = None) -> Snapshot:
        """All runs, or one. Raises UnavailableError or DeadlineExceededError where no replica answers, and
        NotFoundError where there is no such run."""
        replicas = self.replicas()
        if not any(replica.is_reached for replica in replicas):
            raise UnavailableError("; ".join(replica.problem for replica in replicas))
        names = [run] if run is not None else sorted(self.names())
        runs = [found for name in names if (found := self._run(name, is_asked_for=run is not None)) is not None]
        return Snapshot(time.monotonic(), replicas, runs)

    def status(self, run: str) -> run_pb2.RunStatus:
        """Raises as `snapshot` does."""
        answer: run_pb2.GetRunResponse = self._any.call(self._any.runs.GetRun, run_pb2.GetRunRequest(run=run))
        return answer.status

    def create(self, run: str, config_json: str) -> run_pb2.CreateRunResponse:
        """Raises InvalidArgumentError naming the setting, and AlreadyExistsError where the run has other settings."""
        request = run_pb2.CreateRunRequest(run=run, config_json=config_json)
        answer: run_pb2.CreateRunResponse = self._any.call(self._any.runs.CreateRun, request)
        return answer

    def delete(self, run: str) -> None:
        """Raises NotFoundError where there is no such run."""
        self._any.call(self._any.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    def names(self) -> list[str]:
        """The runs that the caller may see."""
        answer: run_pb2.ListRunsResponse = self._any.call(self._any.runs.ListRuns, run_pb2.ListRunsRequest())
        return list(answer.runs)

    def groups(self, run: str) -> list[run_pb2.GroupStatus]:
        """Every group that was ever admitted, the decided ones first, as they were decided."""
        pages = self._any.call(
            lambda request, timeout: list(self._any.runs.ListGroups(request, timeout=timeout)),
            run_pb2.ListGroupsRequest(run=run),
        )
        return [group for page in pages for group in page.groups]

    def _run(self, name: str, *, is_asked_for: bool) -> RunSnapshot | None:
        """None for one that was deleted since its name was listed."""
        try:
            return RunSnapshot(name, self.status(name))
        except NotFoundError:
            if is_asked_for:
                raise
            return None
        except CANNOT_BE_REACHED as error:
            return RunSnapshot(name, None, reason_of(error))

    def replicas(self) -> list[ReplicaSnapshot]:
        """Each replica of the address, asked all at once: one that hangs delays the others' answers by no more than
        its own."""
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            return list(pool.map(_read_replica, self._replicas, self._replicas.values()))


def _read_replica(address: str, transport: Transport) -> ReplicaSnapshot:
    try:
        answer: run_pb2.GetHealthResponse = transport.call(transport.runs.GetHealth, run_pb2.GetHealthRequest())
    except CANNOT_BE_REACHED as error:
        return ReplicaSnapshot(address, False, reason_of(error))
    except GristmillError as error:
        if grpc.StatusCode.UNIMPLEMENTED.name in str(error):
            # An older version, in a rolling upgrade.
            return ReplicaSnapshot(address, True)
        raise
    return ReplicaSnapshot(address, True, answer.not_ready, answer.version)


def reason_of(error: GristmillError) -> str:
    """The error's message without the client's own remarks on its attempts and the request."""
    return str(error).partition(" (gave up after ")[0].partition(" (request ")[0]


@contextmanager
def connect(address: str, owner: str) -> Iterator[ServiceClient]:
    """Raises InvalidArgumentError for an address that is none."""
    with ExitStack() as opened:
        any_replica = opened.enter_context(closing(Transport(address, TIMEOUT_S, owner)))
        names = addresses_of(address)
        others = {name: opened.enter_context(closing(Transport(name, TIMEOUT_S, owner))) for name in names[1:]}
        # One address needs one connection.
        first = any_replica if len(names) == 1 else opened.enter_context(closing(Transport(names[0], TIMEOUT_S, owner)))
        yield ServiceClient(any_replica, {names[0]: first, **others})
