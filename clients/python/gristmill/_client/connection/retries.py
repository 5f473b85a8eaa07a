"""Decide when a call is repeated, and split long waits into several calls."""

from __future__ import annotations

import logging
import random
import time

from gristmill._client.connection.failures import Failure, with_message
from gristmill.errors import DeadlineExceededError, GristmillError

LONGEST_WAIT_S = 20.0
"""The longest wait that one call requests. A longer wait is split into several calls, so that a dead connection is
detected."""

# The timeout of an attempt; it is shorter while another replica was not tried yet. After all were tried, the service as
# a whole is slow, and an early retry would not help.
_ATTEMPT_S, _ATTEMPT_AMONG_OTHERS_S = 20.0, 8.0
# The last attempt begins when the time is over, and must be able to succeed.
_SHORTEST_ATTEMPT_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
# After this time, a warning says why a call takes so long.
_SILENT_S = 5.0
# The service answers a long poll early if too many callers wait already.
_EARLY_ANSWER_PAUSE_S = 0.25
# Separate from Python's global generator, so that pauses do not change the random numbers of a program that seeds it.
JITTER = random.Random()

_log = logging.getLogger("gristmill")


class Backoff:
    """Computes the pauses between attempts: exponential with full jitter, plus the delay that the service requests.
    With several replicas, the pause grows only after all of them were tried.
    """

    def __init__(self, replicas: int = 1) -> None:
        self.attempts = 0
        self._rounds = 0
        self._replicas = replicas

    def pause_s(self, pushback_s: float | None, *, is_of_replica: bool = False) -> float:
        self.attempts += 1
        if is_of_replica and self.attempts % self._replicas:
            return JITTER.random() * _FIRST_PAUSE_S
        ceiling: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._rounds, 16))
        self._rounds += 1
        return max(0.0, pushback_s or 0.0) + JITTER.random() * ceiling

    def attempt_s(self, left_s: float) -> float:
        """Returns the timeout of the next attempt. left_s: the time that is left for all attempts."""
        are_others_left = self.attempts < self._replicas - 1
        return max(_SHORTEST_ATTEMPT_S, min(_ATTEMPT_AMONG_OTHERS_S if are_others_left else _ATTEMPT_S, left_s))


class Retry:
    """Schedules the attempts at one call until `timeout_s` is over, the last one at its end. `timeout_s=0` allows one
    attempt.

    wait_s: how long the service may wait before it answers. This time, and that of a stream until its last message,
    counts once in addition to `timeout_s`, because the service is reachable meanwhile.
    """

    def __init__(self, timeout_s: float, replicas: int = 1, wait_s: float = 0.0) -> None:
        self._is_only_one = timeout_s == 0
        self._wait_s = wait_s
        self._began = self._attempt_began = time.monotonic()
        self._end = self._began + timeout_s
        self._progress_s = 0.0
        self._backoff = Backoff(replicas)
        self._reason: GristmillError | None = None
        self._has_warned = False

    def attempt_s(self) -> float:
        """Returns the timeout of the attempt that begins now."""
        self._attempt_began = time.monotonic()
        if self._is_only_one:
            return self._wait_s + _ATTEMPT_S
        return self._wait_s + self._backoff.attempt_s(self._deadline - self._attempt_began)

    @property
    def _deadline(self) -> float:
        return self._end + self._progress_s

    def pause_s(self, failure: Failure) -> float:
        """Returns the seconds until the next attempt. Raises the failure's error if there is none. Logs one warning if
        the call takes long."""
        if not failure.may_retry:
            # The error contains the text of gRPC's error, so hide the latter.
            raise failure.error from None
        pause_s = self._backoff.pause_s(failure.pushback_s, is_of_replica=failure.is_of_replica)
        now = time.monotonic()
        waited_s = min(now - self._attempt_began, self._wait_s)
        self._progress_s = max(self._progress_s, waited_s, failure.progress_s)
        if self._reason is None or not isinstance(failure.error, DeadlineExceededError):
            # The end of `timeout_s` cuts the last attempt short. The error of an earlier one says more.
            self._reason = failure.error
        if now >= self._deadline:
            tried = f"gave up after {self._backoff.attempts} attempts in {now - self._began:.1f} s"
            message = f"{self._reason} ({tried}; raise timeout_s to retry for longer)"
            raise with_message(self._reason, message) from None
        if not self._has_warned and now - self._began >= _SILENT_S:
            self._has_warned = True
            _log.warning("%s; retrying for %.0f s more", failure.error, self._deadline - now)
        return min(pause_s, self._deadline - now)


class WaitBudget:
    """Splits a long wait into several calls. The service waits for a part of the time in each call."""

    def __init__(self, wait_s: float) -> None:
        self._deadline = time.monotonic() + wait_s

    def next_wait_s(self) -> float:
        self._asked = time.monotonic()
        self._slice_s = max(0.0, min(LONGEST_WAIT_S, self._deadline - self._asked))
        return self._slice_s

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def pause_s(self) -> float:
        """Returns the pause after an answer that is not final, so that the client does not call a service that answers
        early in a busy loop."""
        came_early = time.monotonic() - self._asked < self._slice_s
        return _EARLY_ANSWER_PAUSE_S * (0.5 + JITTER.random()) if came_early else 0.0
