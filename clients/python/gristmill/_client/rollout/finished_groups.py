"""Warns of requests for groups that are all finished, and slows down a worker that repeats them."""

from __future__ import annotations

import logging

from gristmill.v1 import rollout_pb2

_log = logging.getLogger("gristmill")

_FINISHED = {rollout_pb2.GROUP_ADMISSION_SEALED, rollout_pb2.GROUP_ADMISSION_DROPPED}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
# The most requests that are recorded, so that a client that begins groups for days stays small.
_LIMIT = 10_000


class FinishedGroups:
    """The requests of one client whose groups were all finished."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._has_warned = False
        self._repetitions: dict[tuple[int, str], int] = {}

    def pause_s(self, request: rollout_pb2.BeginGroupsRequest, answer: rollout_pb2.BeginGroupsResponse) -> float:
        """Returns the seconds to wait before the answer is returned: 0, unless the client requested these groups before
        and all of them are finished. Logs a warning for the client's first such answer."""
        if not answer.admissions or not _FINISHED.issuperset(answer.admissions):
            return 0.0
        if not self._has_warned:
            self._has_warned = True
            self._warn(request, answer)
        if len(self._repetitions) >= _LIMIT:
            self._repetitions.clear()
        key = request.round, request.uids[0]
        repetitions = self._repetitions.get(key, 0)
        self._repetitions[key] = repetitions + 1
        # An endless loop over finished groups would otherwise make thousands of calls per second.
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(repetitions - 1, 16)) if repetitions else 0.0

    def _warn(self, request: rollout_pb2.BeginGroupsRequest, answer: rollout_pb2.BeginGroupsResponse) -> None:
        sealed = sum(state == rollout_pb2.GROUP_ADMISSION_SEALED for state in answer.admissions)
        _log.warning(
            "run %r: no group was begun of %d requested (first uid %r): %d already in batches, %d dropped; the service "
            "does not accept their rows again; end the loop over begin_groups when it returns "
            "[]; pass other uids; or, for another pass over the same uids in a run that is not finished, pass round=%d "
            "to begin_groups and trajectory; or delete the run (delete_run) and create it again",
            self._run,
            len(request.uids),
            request.uids[0],
            sealed,
            len(request.uids) - sealed,
            request.round + 1,
        )

    def clear(self) -> None:
        self._has_warned = False
        self._repetitions.clear()
