"""Admission of calls over gRPC and HTTP: limits the resources that a caller may occupy at a time, and the number of
invalid calls that it may make.

An API takes a `Slot` before it reads any part of a call, and closes it when the answer is sent. Slots, large requests,
unsent answers and waits are limited per caller and in total. No caller can occupy a whole total. Use this module only
on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

from gristmill.errors import GristmillError, ResourceExhaustedError
from gristmill_service.access.caller import Caller
from gristmill_service.api.allowance import CALL_S, Allowance
from gristmill_service.settings import Settings

Kind = Literal["call", "stream", "probe", "stranger"]
"""The kinds of slots. probe: health and reflection, which need no token. stranger: calls without a known token."""

SMALL_BYTES = 256 << 10
"""A request larger than this counts as large."""
REQUEST_S, SEND_S = 20.0, 60.0
"""Seconds within which a request must arrive or get capacity, and within which an answer must make progress."""
LEAST_BYTES_PER_S = 64 << 10
"""The minimum rate of a request that is known to be large. It determines the additional time."""

_SHARE = 0.75
_RETRY_S = 1.0
_LOOK_S = 0.5

# The cost of what is not measured of a call, and of each byte of a large one, in seconds.
_UNMEASURED_S, _BYTE_S = 0.2e-3, 1.2e-9
# Refusals that also happen to correct callers are free up to this cost.
_FREE_CALL_S = 5e-3
_LARGE_BYTES = 64 << 10
_LONGEST_DELAY_S = 5.0
_MOST_WAITING = 4096
_WRONG = frozenset(["INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"])
_NOT_THE_CALLERS = frozenset(["INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])


class Limits(NamedTuple):
    """Limits of concurrent use. One caller may have three quarters of each, except `waits` and `run_calls`.

    calls, streams, probes, strangers: slots. waits: waiting calls of one caller; twice as many in total. requests:
        large requests that are read or answered. small_requests: requests that are read of calls that are never large.
        answer_bytes: bytes of unsent answers. run_calls: calls for one run; None: no limit. request_s: seconds after
        which an incomplete large request is cancelled. message_bytes: the size of the largest message.
    """

    calls: int = 4096
    streams: int = 256
    probes: int = 64
    strangers: int = 512
    waits: int = 512
    requests: int = 32
    small_requests: int = 32
    answer_bytes: int = 128 << 20
    run_calls: int | None = None
    request_s: float = 1044.0
    message_bytes: int = 64 << 20

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        return cls(
            calls=cls().calls + 2 * settings.max_waiters,
            streams=settings.max_streams,
            waits=settings.max_waiters,
            run_calls=settings.max_run_requests,
            request_s=REQUEST_S + settings.max_message_bytes / LEAST_BYTES_PER_S,
            message_bytes=int(settings.max_message_bytes),
        )


class _Shared:
    """A limited resource that callers share, counted in units.

    what, rule: parts of the error message for a caller that gets none. most_each: how many units one caller may have.
    """

    def __init__(self, most: int, what: str, rule: str, most_each: int | None = None) -> None:
        self.most, self._what, self._rule = most, what, rule
        self._most_each = max(1, int(_SHARE * most)) if most_each is None else most_each
        self.total, self.by_caller = 0, dict[str, int]()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def take(self, caller: str, n: int = 1, *, is_next: bool = False) -> bool:
        """Takes n units if they are free and no other call of the caller waits for units. Returns whether it took them.
        A caller that has none may exceed its share. is_next: whether the call is the next of the waiting calls."""
        taken = self.by_caller.get(caller, 0)
        if (taken and taken + n > self._most_each) or self.total + min(n, self._most_each) > self.most:
            return False
        if self._waiting and not is_next and caller in self._waiting:
            return False
        self.by_caller[caller] = taken + n
        self.total += n
        return True

    @property
    def is_wanted(self) -> bool:
        """Whether calls are waiting."""
        return bool(self._waiting)

    def error(self, caller: str) -> ResourceExhaustedError:
        taken = self.by_caller.get(caller, 0)
        return ResourceExhaustedError(f"{self.total} {self._what} ({taken} of this caller), {self._rule}", _RETRY_S)

    @property
    def is_crowded(self) -> bool:
        """Whether so many calls are waiting that no more may wait."""
        return sum(map(len, self._waiting.values())) >= _MOST_WAITING

    async def wait(self, caller: str, n: int = 1) -> None:
        """Waits until n units are free, and takes them. Callers that have fewer units are served first."""
        granted = asyncio.get_running_loop().create_future()
        entry = n, granted
        self._waiting.setdefault(caller, deque()).append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(caller, n)
            elif entry in (queue := self._waiting.get(caller, deque())):
                queue.remove(entry)
                if not queue:
                    del self._waiting[caller]
            raise

    def give(self, caller: str, n: int = 1) -> None:
        """Releases n units, and grants units to waiting calls."""
        self.total -= n
        left = self.by_caller[caller] - n
        if left:
            self.by_caller[caller] = left
        else:
            del self.by_caller[caller]
        if self._waiting:
            self._grant()

    def _grant(self) -> None:
        for caller in sorted(self._waiting, key=lambda caller: self.by_caller.get(caller, 0)):
            queue = self._waiting[caller]
            while queue and (queue[0][1].done() or self.take(caller, queue[0][0], is_next=True)):
                _, granted = queue.popleft()
                if not granted.done():
                    granted.set_result(None)
            if not queue:
                del self._waiting[caller]


class Admission:
    """All slots. Callers are identified by name; without tokens, by machine."""

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits or Limits(), clock
        most, no_more = self.limits, "which is the limit; retry"
        self.slots: set[Slot] = set()
        self.by_kind = {
            "call": _Shared(most.calls, "calls are being answered", no_more),
            "stream": _Shared(
                most.streams, "streams are open", "which is the limit max_streams; retry, or raise max_streams"
            ),
            "probe": _Shared(most.probes, "health and reflection calls are open", no_more),
            "stranger": _Shared(most.strangers, "calls without a known token are open", no_more),
        }
        self.waits = _Shared(2 * most.waits, "calls wait", no_more, most.waits)
        none_ended = f"and none finished within {REQUEST_S:g} s; retry"
        self.requests = _Shared(most.requests, "large requests are being read or answered", none_ended)
        self.small_requests = _Shared(most.small_requests, "requests are being read", none_ended)
        # A check of many rows computes in a thread for long, and several such threads delay the event loop.
        self.row_checks = _Shared(2, "requests are being checked row by row", none_ended, 1)
        self.answers = _Shared(most.answer_bytes, "bytes of answers are unsent", no_more)
        self.limited: Counter[tuple[str, str]] = Counter()
        self.coming: set[Slot] = set()
        self.large_messages = 0
        # A caller may have many connections, so their refusals together have a limit, too.
        self._wrong_of_connection = Allowance(1 / 200, free_s=0.25, most_s=0.6, longest_s=_LONGEST_DELAY_S)
        self._wrong_of_caller = Allowance(1 / 50, free_s=0.5, most_s=4.0)
        self._crowding = Allowance(1 / 50, free_s=0.05, most_s=4.0)
        # 10 at once, and 2 per second.
        self._probing = Allowance(1 / 1000, free_s=0.005, most_s=0.1)

    async def enter(self, caller: str, kind: Kind, end: Callable[[], object] | None = None) -> Slot:
        """Takes a slot. If the caller has too many, or all callers together, waits for one, and raises
        ResourceExhaustedError after a second or more: a caller with many such calls waits longer.

        end: ends the call, which then closes the slot. Called when the call is overdue, or when another caller needs
        its capacity. It may be set later, as `Slot.end`.
        """
        await self.take(self.by_kind[kind], caller, _RETRY_S)
        slot = Slot(self, caller, kind, end)
        self.slots.add(slot)
        return slot

    async def take(self, shared: _Shared, caller: str, wait_s: float, n: int = 1) -> None:
        """Takes n units for the caller. Waits for them at most this long, and longer if other calls of the caller wait,
        so that they are refused one after another. Raises ResourceExhaustedError."""
        if shared.take(caller, n):
            return
        delay_s = self._crowding.charge(caller, CALL_S, self.clock())
        if shared.is_crowded:
            raise shared.error(caller)
        try:
            async with asyncio.timeout(wait_s + delay_s):
                await shared.wait(caller, n)
        except TimeoutError:
            raise shared.error(caller) from None

    async def pace_probe(self, connection: str) -> None:
        """Delays a call of health or reflection over a connection with many such calls."""
        if delay_s := self._probing.charge(connection, CALL_S, self.clock()):
            await asyncio.sleep(delay_s)

    async def pace(self, name: str) -> None:
        """Delays work for an unknown caller of this name if its allowance for invalid calls is exhausted. A caller that
        leaves meanwhile costs no work."""
        if wait_s := self._wrong_of_connection.wait_s(name, self.clock()):
            await asyncio.sleep(min(wait_s, _LONGEST_DELAY_S))

    def refused(self, caller: str, connection: str, code: str, nbytes: int, spent_s: float) -> float:
        """Records that a call was refused with this status. Returns by how many seconds to delay the refusal, which
        keeps its slot meanwhile. Usually 0.

        Invalid calls use an allowance of the connection and one of its caller, which refill over time. Other refused
        calls use them only if they are costly. nbytes: the size of the request. spent_s: the processor time of the
        call. An unknown caller has the same name as its connection.
        """
        cost_s, now = 0.0, self.clock()
        if code not in _NOT_THE_CALLERS:
            cost_s = _UNMEASURED_S + spent_s + max(0, nbytes - _LARGE_BYTES) * _BYTE_S
            cost_s = cost_s if code in _WRONG else max(0.0, cost_s - _FREE_CALL_S)
        delay_s = max(
            self._wrong_of_connection.charge(connection, cost_s, now), self._wrong_of_caller.charge(caller, cost_s, now)
        )
        # Unknown callers of a machine, whose slots limit their refusals, may have nothing to do with each other.
        return min(delay_s, _LONGEST_DELAY_S) if caller == connection else delay_s

    def check(self, connection: str) -> None:
        """Raises ResourceExhaustedError if the connection's allowance for invalid calls is exhausted. Call it before
        the request is read."""
        if (wait_s := self._wrong_of_connection.wait_s(connection, self.clock())) > _LONGEST_DELAY_S:
            raise ResourceExhaustedError(
                "too many recent calls of this caller were refused, so the service did not read this one; fix the "
                f"cause in their errors, and retry in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )

    def note(self, nbytes: int) -> None:
        """Counts large messages, whose memory the process retains after they are freed."""
        self.large_messages += nbytes > SMALL_BYTES

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Returns the number of concurrent calls by ("caller" or "run", name), for callers and runs with a limit."""
        return self.limited

    async def end_overdue(self) -> None:
        """Ends overdue calls, twice a second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self.clock()
            for slot, due in [(slot, slot.due) for slot in self.slots if slot.due is not None and slot.due <= now]:
                # A large request may take longer if no other request waits for capacity.
                is_left = slot in self.coming and slot.is_large and not self.requests.is_wanted
                if slot.due == due and (not is_left or now >= due - REQUEST_S + self.limits.request_s):
                    slot.end_now()
                    # Calls that end together must not delay others.
                    await asyncio.sleep(0)


class Slot:
    """The slot of a call.

    caller: the name for which the slot is counted. end: see `Admission.enter`. due: when the call is ended unless it
        makes progress; None while the service works on it, or while the API limits the time of its request. is_wrong:
        whether a part of the request was refused as invalid.
    """

    __slots__ = (
        "_admission",
        "_held",
        "_is_open",
        "_kind",
        "_limits",
        "_place",
        "_units",
        "_waits",
        "caller",
        "due",
        "end",
        "is_wrong",
    )

    def __init__(self, admission: Admission, caller: str, kind: Kind, end: Callable[[], object] | None) -> None:
        self._admission, self.caller, self._kind, self.end = admission, caller, kind, end
        self.due: float | None = admission.clock() + REQUEST_S
        self._held = 0
        self._limits: tuple[tuple[str, str], ...] = ()
        # The capacity that the request occupies, of large requests or of small ones, and how much of it.
        self._place: _Shared | None = None
        self._units = 1
        self._waits = False
        self._is_open, self.is_wrong = True, False

    def note_wrong(self, errors: Iterable[GristmillError]) -> None:
        """Records the errors of parts of the request: the call is paid for as invalid if one of them is."""
        self.is_wrong = any(error.code in _WRONG for error in errors)

    @property
    def is_large(self) -> bool:
        """Whether the call has capacity for a large request."""
        return self._place is self._admission.requests

    async def move(self, caller: str, kind: Kind) -> None:
        """Counts the slot for another caller, after it is identified. Waits and raises like `Admission.enter`."""
        by_kind = self._admission.by_kind
        await self._admission.take(by_kind[kind], caller, _RETRY_S)
        by_kind[self._kind].give(self.caller)
        self.caller, self._kind = caller, kind

    def count(self, caller: Caller, run: str | None) -> None:
        """Counts the call for its token and its run until it closes. Raises ResourceExhaustedError if `max_requests` of
        the token or `max_run_requests` is reached."""
        limited, most_of_run = self._admission.limited, self._admission.limits.run_calls
        keys: list[tuple[str, str]] = []
        for key, most, setting in (
            (("caller", caller.name), caller.max_requests, "max_requests of the token"),
            (("run", run or ""), None if run is None else most_of_run, "the service's max_run_requests"),
        ):
            if most is None:
                continue
            if limited[key] >= most:
                raise ResourceExhaustedError(
                    f"{limited[key]} calls of {key[0]} {key[1]!r} are in progress, and {setting} is {most}; wait for "
                    f"their answers, or raise {setting}",
                    _RETRY_S,
                )
            keys.append(key)
        limited.update(keys)
        self._limits = tuple(keys)

    async def place(self, *, is_large: bool = True) -> None:
        """Takes capacity for a request before its bytes are read. If there is none, ends the oldest incomplete request
        of a caller with more such requests, and waits for capacity. A request of a call that is never large needs none
        of the capacity of large ones, so that it does not wait for them.

        Raises ResourceExhaustedError after 20 s or more. Does nothing if the slot already has the capacity.
        """
        admission, is_timed, before = self._admission, self.due is not None, self._place
        shared = admission.requests if is_large else admission.small_requests
        if before is shared:
            return
        await self._occupy(shared)
        if before is not None:
            before.give(self.caller)
        if is_timed:
            self._expect()

    async def place_parts(self, nbytes: int) -> None:
        """Takes capacity for a request of n bytes in parts, as for requests of `max_message_bytes`, before they are
        read. Waits and raises like `place`, and has none meanwhile, so that such calls never wait for each other."""
        self._vacate()
        await self._occupy(self._admission.requests, -(-nbytes // self._admission.limits.message_bytes))
        self._expect()

    def came_part(self, nbytes: int) -> None:
        """Records that a part of n bytes has arrived, which extends the time of the request."""
        if self.due is not None:
            self.due += REQUEST_S * nbytes / self._admission.limits.message_bytes

    async def _occupy(self, shared: _Shared, n: int = 1) -> None:
        if not shared.take(self.caller, n):
            self.due = None
            self._take_back(shared)
            await self._admission.take(shared, self.caller, REQUEST_S, n)
        self._place, self._units = shared, n

    def _vacate(self) -> None:
        if self._place is not None:
            place, self._place = self._place, None
            place.give(self.caller, self._units)

    def _expect(self) -> None:
        """Limits the time of the request."""
        self._admission.coming.add(self)
        self.due = self._admission.clock() + REQUEST_S

    def _take_back(self, shared: _Shared) -> None:
        taken = shared.by_caller
        ending = (slot for slot in self._admission.coming if slot.due is not None and slot._place is shared)
        longest = min(ending, key=lambda slot: (-taken[slot.caller], slot.due), default=None)
        if longest is not None and taken[longest.caller] > taken.get(self.caller, 0) + 1:
            longest.end_now()

    async def came(self, nbytes: int) -> None:
        """Records that the whole request, of n bytes, has arrived. A small request releases its capacity now; a large
        request takes capacity as in `place`, and releases it when the slot is closed."""
        self.due = None
        self._admission.coming.discard(self)
        self._admission.note(nbytes)
        if nbytes > SMALL_BYTES:
            await self.place()
        else:
            self._vacate()

    @asynccontextmanager
    async def check_rows(self) -> AsyncIterator[None]:
        """Waits until the request may be checked row by row: one request of each caller at a time, and two in total.
        Raises ResourceExhaustedError after 20 s or more."""
        shared, caller = self._admission.row_checks, self.caller
        await self._admission.take(shared, caller, REQUEST_S)
        try:
            yield
        finally:
            shared.give(caller)

    def wait(self) -> bool:
        """Counts the call as waiting. Returns False if too many calls wait; then answer the call at once."""
        self._waits = self._waits or self._admission.waits.take(self.caller)
        return self._waits

    def stop_waiting(self) -> None:
        """Ends `wait`."""
        if self._waits:
            self._waits = False
            self._admission.waits.give(self.caller)

    async def hold(self, nbytes: int) -> None:
        """Sets the number of unsent bytes of the answer to n. Waits while the unsent answers of the caller, or of all
        callers, are too large. The call is ended unless `hold` or `close` is called again within 60 s."""
        answers, before = self._admission.answers, self._held
        self.due = self._admission.clock() + SEND_S
        self._admission.note(nbytes)
        if nbytes < before:
            answers.give(self.caller, before - nbytes)
        elif nbytes > before:
            self._held = 0
            if before:
                answers.give(self.caller, before)
            if not answers.take(self.caller, nbytes):
                await answers.wait(self.caller, nbytes)
                self.due = self._admission.clock() + SEND_S
        self._held = nbytes

    def end_now(self) -> None:
        """Ends the call."""
        self.due = None
        if self.end is not None:
            self.end()

    def close(self, _: object = None) -> None:
        """Releases the slot and all its capacity. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open, self.end, admission = False, None, self._admission
        # What a large call had in memory is freed now. The request of a call that ends early may have been large.
        admission.large_messages += self.is_large or self._held > SMALL_BYTES or self in admission.coming
        admission.slots.discard(self)
        admission.coming.discard(self)
        admission.by_kind[self._kind].give(self.caller)
        self._vacate()
        if self._held:
            admission.answers.give(self.caller, self._held)
        if self._waits:
            admission.waits.give(self.caller)
        for key in self._limits:
            admission.limited[key] -= 1
            if not admission.limited[key]:
                del admission.limited[key]
