"""When things happened in a run, for people: what its state does not say, for it holds no clock.

Looks at every run twice a second from the service's start on, so that who opens the page when training stands still is
told since when. It is memory only, bounded, and no part of the run: a run that was read anew is watched anew.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from gristmill_service.config import Model
from gristmill_service.run.machine import progress
from gristmill_service.run.machine.admission import Room
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run

_log = structlog.get_logger(__name__)

LOOK_S = 0.5
KEPT_BATCHES = 256
_KEPT_STEPS = 16_384
"""Of all ranks of a model together."""


@dataclass(slots=True)
class RankHistory:
    """next: what it has to acknowledge, since when. passed: when it acknowledged what, the last ones. pulled: when it
    was last told where a shard is, None where it never was; pulls: how often."""

    next: Position
    since: float
    passed: deque[tuple[float, Position]]
    pulls: int = 0
    pulled: float | None = None


@dataclass(slots=True)
class BatchHistory:
    """When it was found sealed, published, and freed or failed; None where it is not, or was so before."""

    sealed: float | None = None
    published: float | None = None
    ended: float | None = None


@dataclass(slots=True)
class History:
    """Wall-clock seconds, each found at most `LOOK_S` late. began: when watching began; nothing is known before.

    rows_since: when a row was last accepted. full_since: since when there is no room, None where there is.
    run_offset: what makes wall-clock time of the run's own.
    """

    began: float
    run_offset: float
    ranks: dict[Model, list[RankHistory]] = field(default_factory=dict)
    incarnations: dict[Model, int] = field(default_factory=dict)
    batches: dict[int, BatchHistory] = field(default_factory=dict)
    rows: int = -1
    rows_since: float = 0.0
    full_since: float | None = None
    steps: int = 0
    """How often a rank was seen to move on: what tells a page that its time line is old."""


class HistoryRecorder:
    """Thread-safe. Its thread ends with it."""

    def __init__(self, own: Callable[[], Iterable[Run]], clock: Callable[[], float] = time.time) -> None:
        self._own, self._clock = own, clock
        self._lock = threading.Lock()
        self._seen: weakref.WeakKeyDictionary[Run, History] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        threading.Thread(target=_keep_looking, args=(weakref.ref(self),), name="gristmill-watch", daemon=True).start()

    def look(self) -> None:
        for run in self._own():
            self.seen(run)

    def seen(self, run: Run) -> History:
        """What is known of the run, up to now. Changes at each look: read it at once."""
        with self._lock:
            now = self._clock()
            seen = self._seen.get(run)
            if seen is None:
                seen = self._seen[run] = History(now, now - run_time(run))
            _look(run, seen, now)
            return seen


@contextmanager
def reading(run: Run) -> Iterator[tuple[State, Room]]:
    """The run's state, for a moment: its lock is held. Also that of a closed run; nothing is made safe and nothing that
    is due is done, which could take a while: who looks decides nothing."""
    yield run.read(lambda state, room: (state, room))


def run_time(run: Run) -> float:
    """The run's own time, in seconds."""
    return run.monitor.metrics.now()  # type: ignore


def _keep_looking(watch: weakref.ref[HistoryRecorder]) -> None:
    while (found := watch()) is not None:
        try:
            found.look()
        except Exception:  # noqa: BLE001 - looking is for people; the next look may do better
            _log.exception("runs could not be looked at")
        del found
        time.sleep(LOOK_S)


def _look(run: Run, seen: History, now: float) -> None:
    with reading(run) as (state, room):
        places = {
            model: [progress.settle(state, model, position) for position in own.next]
            for model, own in state.models.items()
        }
        pulls = {key: meter.pulls for key, meter in run.monitor.metrics.ranks.found.items()}  # type: ignore
        incarnations = {model: own.incarnation for model, own in state.models.items()}
        published = {number: batch.is_published for number, batch in state.batches.items()}
        sealed, rows = state.batches_sealed, state.rows_accepted
    for model, found in places.items():
        if len(found) != len(seen.ranks.get(model, ())) or incarnations[model] != seen.incarnations.get(model):
            _begin(seen, model, found, now)
            seen.incarnations[model] = incarnations[model]
        else:
            _follow(seen, model, found, now)
    _note_pulls(seen, pulls, now)
    _note_batches(seen, published, sealed, now)
    if rows != seen.rows:
        seen.rows, seen.rows_since = rows, now
    seen.full_since = None if room.groups else seen.full_since or now


def _begin(seen: History, model: Model, places: list[Position], now: float) -> None:
    """The first look, or the trainer was started again, maybe with other ranks."""
    kept = max(8, _KEPT_STEPS // len(places))
    seen.ranks[model] = [RankHistory(position, now, deque(maxlen=kept)) for position in places]


def _follow(seen: History, model: Model, places: list[Position], now: float) -> None:
    for rank, position in zip(seen.ranks[model], places, strict=True):
        if position != rank.next:
            rank.passed.append((now, rank.next))
            rank.next, rank.since = position, now
            seen.steps += 1


def _note_pulls(seen: History, pulls: dict[tuple[Model, int], int], now: float) -> None:
    for (model, rank), count in pulls.items():
        # A rank that is there no more may still be counted.
        if rank < len(seen.ranks[model]) and count != seen.ranks[model][rank].pulls:
            found = seen.ranks[model][rank]
            found.pulls, found.pulled = count, now


def _note_batches(seen: History, published: dict[int, bool], sealed: int, now: float) -> None:
    first = now > seen.began
    for number, is_published in published.items():
        batch = seen.batches.setdefault(number, BatchHistory(now if first else None))
        if is_published and batch.published is None:
            batch.published = now
        elif not is_published:
            batch.published = None
    for number, batch in seen.batches.items():
        if batch.ended is None and number < sealed and number not in published:
            batch.ended = now
    while len(seen.batches) > KEPT_BATCHES:
        del seen.batches[min(seen.batches)]
