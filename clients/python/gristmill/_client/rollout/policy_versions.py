"""Knows the policy version that the trainer announced last when a trajectory begins.

`begin_groups` returns it. If that was long ago, the client asks for it in the background when a trajectory begins, and
reads the answer with the first step: a version that is asked for after the tokens were sampled may be too new.
"""

from __future__ import annotations

import time
from math import inf

import grpc

from gristmill._client.connection.drivers import Join
from gristmill._client.connection.transport import Connection
from gristmill.errors import GristmillError
from gristmill.v1 import run_pb2

# Trajectories that begin within this time share an answer. Engines take as long to load announced weights.
_FRESH_S = 5.0
_ATTEMPT_S = 2.0


class PolicyVersions:
    """The announced versions of a run, as far as one client knows them. As thread-safe as the connection's driver."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection, self._run = connection, run
        self._version: int | None = None
        self._as_of = -inf
        self._question: _Question | None = None

    def learned(self, version: int) -> None:
        """Records the version that the service has just returned."""
        self._version, self._as_of, self._question = version, time.monotonic(), None

    def forget(self) -> None:
        self._version, self._as_of, self._question = None, -inf, None

    def at_begin(self) -> PendingVersion:
        """Returns the version of a trajectory that begins now. Does not block."""
        driver, now = self._connection.driver, time.monotonic()
        if now - self._as_of > _FRESH_S and driver.can_start and self._connection.fork_guard.is_here():
            self._as_of, self._question = now, _Question(self)
        return PendingVersion(self, self._version, self._question)


class _Question:
    """A call in the background, without retries. version: the answer; None if there is none (yet)."""

    def __init__(self, versions: PolicyVersions) -> None:
        self._versions = versions
        self.version: int | None = None
        self.join: Join = versions._connection.driver.start(self._ask, "gristmill-version")

    async def _ask(self) -> None:
        connection = self._versions._connection
        request = run_pb2.WaitPolicyVersionRequest(run=self._versions._run)
        try:
            answer = await connection.driver.call(connection.runs.WaitPolicyVersion, request, timeout=_ATTEMPT_S)
        except (grpc.RpcError, GristmillError, ValueError):
            # gRPC raises ValueError in a client that is closed.
            return
        self.version = int(answer.version)
        if self._versions._question is self:
            self._versions._version = self.version


class PendingVersion:
    """The version of a trajectory: known when it began, or the answer to a question that was asked then."""

    def __init__(self, versions: PolicyVersions, known: int | None, question: _Question | None) -> None:
        self._versions, self._known, self._question = versions, known, question

    async def value(self) -> int:
        """Returns the version. If the service could not be reached, returns the one that the client learned before, or
        0: older than it is, so that a run that excludes stale rows trains none by mistake."""
        question = self._question
        if question is None and self._known is None:
            # The trajectory was created outside of the event loop.
            question = _Question(self._versions)
        if question is not None:
            await question.join()
            self._known, self._question = self._known if question.version is None else question.version, None
        return self._known or 0
