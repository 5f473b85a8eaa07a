"""Attempts and their pauses, and long waits that are cut into several calls."""

from __future__ import annotations

import logging
import random
import time

from gristmill._client.connection.failures import Failure, with_message

LONGEST_WAIT_S = 20.0
"""One call asks the service to wait so long at most; a longer wait is several calls, so that a dead connection is
noticed."""

# One attempt that gets no answer for so long is given up and made again; sooner where there are replicas that were not
# asked yet. Once all were, it is the service that is slow, and hurrying it would not help.
_ATTEMPT_S, _ATTEMPT_AMONG_OTHERS_S = 20.0, 8.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
# Who waits at a terminal should not have to guess for longer.
_SILENT_S = 5.0
# The service answers a wait early when too many wait already.
_EARLY_ANSWER_PAUSE_S = 0.25
# Of its own: who seeds the module's numbers draws the same ones again, whatever pauses here.
JITTER = random.Random()

_log = logging.getLogger("gristmill")


class Backoff:
    """Pauses between attempts: exponential with full jitter, after what the service asks for. With several replicas the
    pauses grow, and what one of them asks for counts, once all were tried in a round."""

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
        """The time that the next attempt gets, of what is left for all."""
        are_others_left = self.attempts < self._replicas - 1
        return max(0.05, min(_ATTEMPT_AMONG_OTHERS_S if are_others_left else _ATTEMPT_S, left_s))


class Retry:
    """The attempts at one call, until `timeout_s` is over; 0 is one attempt, which gets the time that it needs."""

    def __init__(self, timeout_s: float, replicas: int = 1) -> None:
        self._is_only_one = timeout_s == 0
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._backoff = Backoff(replicas)
        self._has_told = False

    def attempt_s(self, wait_s: float) -> float:
        """The time that the next attempt gets, of which the service may wait `wait_s`."""
        if self._is_only_one:
            return wait_s + _ATTEMPT_S
        return wait_s + self._backoff.attempt_s(self._deadline - time.monotonic())

    def pause_s(self, failure: Failure) -> float:
        """Seconds until the next attempt. Raises the failure's error where there is to be none. A warning says once why
        a call takes so long."""
        if not failure.may_retry:
            # The error says what gRPC raised.
            raise failure.error from None
        pause_s = self._backoff.pause_s(failure.pushback_s, is_of_replica=failure.is_of_replica)
        now = time.monotonic()
        if now + pause_s >= self._deadline:
            tried = f"gave up after {self._backoff.attempts} attempts in {now - self._began:.1f} s"
            message = f"{failure.error} ({tried}; a larger timeout_s tries longer)"
            raise with_message(failure.error, message) from None
        if not self._has_told and now - self._began >= _SILENT_S:
            self._has_told = True
            _log.warning("%s; trying again for %.0f s more", failure.error, self._deadline - now)
        return pause_s


class WaitBudget:
    """One wait that is made of several calls, each of which lets the service wait a part."""

    def __init__(self, wait_s: float) -> None:
        self._deadline = time.monotonic() + wait_s

    def next_wait_s(self) -> float:
        self._asked = time.monotonic()
        self._slice_s = max(0.0, min(LONGEST_WAIT_S, self._deadline - self._asked))
        return self._slice_s

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def pause_s(self) -> float:
        """After an answer that is not final: a service that answers at once must not be asked without pause."""
        came_early = time.monotonic() - self._asked < self._slice_s
        return _EARLY_ANSWER_PAUSE_S * (0.5 + JITTER.random()) if came_early else 0.0
