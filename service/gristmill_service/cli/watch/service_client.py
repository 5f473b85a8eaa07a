"""Reads a running service: its replicas, and each run's state as the service reports it."""

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
from gristmill_service.cli.terminal import reason_of

CANNOT_BE_REACHED = (UnavailableError, DeadlineExceededError)
TIMEOUT_S = 3.0
"""Seconds for which calls are retried before the service counts as unreachable."""
_NEEDS_PERSON = ("unreachable", "stuck", "failed")


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica. problem: why it accepts no new work or does not answer; empty if it is ready. started: when it
    started, in seconds since 1970; 0 if it does not answer. run_store: where it stores runs."""

    address: str
    is_reached: bool
    problem: str = ""
    version: str = ""
    started: float = 0.0
    run_store: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A run. health: as reported by the service; `unreachable` if its owner does not answer. status: then None."""

    name: str
    health: run_pb2.RunHealth
    status: run_pb2.RunStatus | None

    @property
    def needs_person(self) -> bool:
        """Whether the run cannot continue without intervention."""
        return self.health.state in _NEEDS_PERSON


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a service at one time. at: seconds of a monotonic clock."""

    at: float
    replicas: list[Replica]
    runs: list[Run]

    @property
    def needs_person(self) -> bool:
        """Whether a run cannot continue without intervention, or a replica is not ready or unreachable."""
        return any(replica.problem for replica in self.replicas) or any(run.needs_person for run in self.runs)


class ServiceClient:
    """Reads each replica's health over a connection to that replica, and runs over a connection to any replica."""

    def __init__(self, any_replica: Transport, replicas: dict[str, Transport]) -> None:
        self._any, self._replicas = any_replica, replicas

    def snapshot(self, run: str | None = None, stuck_after_s: float = 0.0) -> Snapshot:
        """Reads all runs, or one.

        stuck_after_s: an unfinished run also counts as stuck after this number of seconds without an event; 0: only if
        the service reports it as stuck.

        Raises UnavailableError or DeadlineExceededError if no replica answers, and NotFoundError if the run does not
        exist.
        """
        replicas = self.replicas()
        if not any(replica.is_reached for replica in replicas):
            raise UnavailableError("; ".join(replica.problem for replica in replicas))
        names = [run] if run is not None else sorted(self.names())
        runs = [self._run(name, stuck_after_s, is_required=run is not None) for name in names]
        return Snapshot(time.monotonic(), replicas, [run for run in runs if run is not None])

    def status(self, run: str) -> run_pb2.RunStatus:
        """Returns a run's status. Raises like `snapshot`."""
        answer: run_pb2.GetRunResponse = self._any.call(self._any.runs.GetRun, run_pb2.GetRunRequest(run=run))
        return answer.status

    def create(self, run: str, config_json: str) -> run_pb2.CreateRunResponse:
        """Creates a run. Raises InvalidArgumentError, and AlreadyExistsError if it has other settings."""
        request = run_pb2.CreateRunRequest(run=run, config_json=config_json)
        answer: run_pb2.CreateRunResponse = self._any.call(self._any.runs.CreateRun, request)
        return answer

    def delete(self, run: str) -> None:
        """Deletes a run. Raises NotFoundError if it does not exist."""
        self._any.call(self._any.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    def names(self) -> list[str]:
        """Returns the names of the runs that the caller may see."""
        answer: run_pb2.ListRunsResponse = self._any.call(self._any.runs.ListRuns, run_pb2.ListRunsRequest())
        return list(answer.runs)

    def groups(self, run: str) -> list[run_pb2.GroupStatus]:
        """Returns the groups that are not archived: first sealed and dropped groups, in the order in which they closed,
        then others."""
        pages = self._any.call(
            lambda request, timeout: list(self._any.runs.ListGroups(request, timeout=timeout)),
            run_pb2.ListGroupsRequest(run=run),
        )
        return [group for page in pages for group in page.groups]

    def replicas(self) -> list[Replica]:
        """Calls all replicas of the address concurrently, so that a replica that hangs does not delay the others."""
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            return list(pool.map(_read_replica, self._replicas, self._replicas.values()))

    def _run(self, name: str, stuck_after_s: float, *, is_required: bool) -> Run | None:
        """Reads a run. Returns None if it was deleted after its name was listed."""
        try:
            status = self.status(name)
        except NotFoundError:
            if is_required:
                raise
            return None
        except CANNOT_BE_REACHED as error:
            return Run(name, run_pb2.RunHealth(state="unreachable", summary=reason_of(error)), None)
        health = status.health
        if stuck_after_s and health.still_s >= stuck_after_s and health.state not in ("finished", *_NEEDS_PERSON):
            health.summary = f"no event for {health.still_s:.0f} s: {health.summary}"
            health.state = "stuck"
        return Run(name, health, status)


def _read_replica(address: str, transport: Transport) -> Replica:
    try:
        answer: run_pb2.GetHealthResponse = transport.call(transport.runs.GetHealth, run_pb2.GetHealthRequest())
    except CANNOT_BE_REACHED as error:
        return Replica(address, False, reason_of(error))
    except GristmillError as error:
        if grpc.StatusCode.UNIMPLEMENTED.name in str(error):
            # The replica runs an older version, during a rolling upgrade.
            return Replica(address, True)
        raise
    return Replica(address, True, answer.not_ready, answer.version, answer.started, answer.run_store)


@contextmanager
def connect(address: str, owner: str) -> Iterator[ServiceClient]:
    """Connects to each address. Raises InvalidArgumentError for an invalid address."""
    with ExitStack() as opened:
        any_replica = opened.enter_context(closing(Transport(address, TIMEOUT_S, owner)))
        names = addresses_of(address)
        others = {name: opened.enter_context(closing(Transport(name, TIMEOUT_S, owner))) for name in names[1:]}
        # A single replica needs only one connection.
        first = any_replica if len(names) == 1 else opened.enter_context(closing(Transport(names[0], TIMEOUT_S, owner)))
        yield ServiceClient(any_replica, {names[0]: first, **others})
