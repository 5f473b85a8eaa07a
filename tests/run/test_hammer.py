"""Many threads at once, with all that clients may do: what holds for one caller holds for them together."""

import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from gristmill.errors import FailedPreconditionError, GristmillError, NotFoundError, ResourceExhaustedError
from gristmill_service.config import RunConfig
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run.machine.answers import Admission, BatchState, Position, RewardUpdate
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.storage.memory import MemoryRunStore, MemoryShardStore
from tests.on_loop import Run, Runs
from tests.run.deltas import Sender
from tests.run.harness import CONFIG, group_rows, key, row, table, wait_until
from tests.run.logs import RecordingLog
from tests.run.test_laws import check_closed_groups, check_invariants, follow
from tests.run.test_served_bytes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("one_token_is_left_out")

WORKERS, GROUPS, RANKS = 8, 25, 2
CHAOS: dict[str, Any] = {
    "train_batch_size": 3,
    "n_samples_per_prompt": 3,
    "dp_size": RANKS,
    "max_buffered_batches": 3,
    "max_buffered_bytes": 20_000,
    "zero_variance_filter": "replace",
    "max_staleness": 1000,
    "group_timeout_s": 50.0,
}


class Worker:
    """Rolls its groups out with all that can go wrong on the way."""

    def __init__(self, run: Run, number: int) -> None:
        self._run, self._number, self._random = run, number, random.Random(number)
        self._sender = Sender()

    def work(self) -> None:
        for index in range(GROUPS):
            uid = f"w{self._number}-{index}"
            if self._random.random() < 0.5:
                self._await(lambda uid=uid: self._run.begin_groups(0, [uid]).admissions[0] is not Admission.NO_ROOM)
            self._roll_out(uid)

    def _roll_out(self, uid: str) -> None:
        rows = [
            row(uid, sample, step, last=step == 1, reward=self._random.choice([0.0, 1.0, 2.0]), attempt=attempt)
            for sample in range(3)
            for attempt in range(1 + (self._random.random() < 0.2))
            for step in range(2)
        ]
        late = [self._random.random() < 0.3 for _ in rows]
        for one, is_late in zip(rows, late, strict=True):
            sent = table(one | ({"reward": None} if is_late else {}))
            self._await(lambda sent=sent: self._sender.submit(self._run, sent))
            if is_late:
                update = RewardUpdate(key(uid, one["sample"]), one["step"], one["reward"])
                self._run.set_rewards([update, update])
            self._sender.submit(self._run, sent)
            if self._random.random() < 0.03:
                self._run.abort_trajectories([key(uid, one["sample"])], "broken")
        if self._random.random() < 0.1:
            self._run.abort_groups(0, [uid], "tired")

    def _await(self, attempt: Any) -> None:
        """Again and again, until there is room."""

        def has_room() -> bool:
            try:
                return bool(attempt())
            except ResourceExhaustedError:
                return False

        wait_until(has_room)


def consume(run: Run, rank: int) -> list[Position]:
    """Trains on whatever comes, in order, until the end."""
    done: list[Position] = []
    while True:
        view = run.shard("policy", rank, None, 0)
        if view.state is BatchState.END:
            return done
        if view.state is BatchState.PENDING:
            wait_until(lambda: run.shard("policy", rank, None, 0).state is not BatchState.PENDING)
            continue
        assert view.position is not None
        assert view.address is not None
        assert b"".join(run.read_shard(view.position.batch, view.address))
        done.append(view.position)
        run.acknowledge("policy", rank, view.position, 0, commit=True)


def disturb(run: Run, stopped: threading.Event) -> None:
    """What others do meanwhile."""
    version = 0
    while not stopped.wait(0.002):
        version += 1
        run.announce(version)
        run.tick()
        status = run.status()
        assert status.row_bytes >= 0
        assert status.shard_bytes >= 0
        try:
            run.seal(None)
        except FailedPreconditionError:
            continue


@pytest.mark.slow
def test_whatever_many_threads_do_every_row_ends_once_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    log, store, stopped = RecordingLog(), MemoryShardStore(), threading.Event()
    ledger = MemoryRunStore()
    monkeypatch.setattr(ledger, "create", lambda name, config, *_: log.of(config))
    runs = Runs(store, ledger, clock=lambda: 0.0, make_monitor=Monitor)
    runs.create("run", CONFIG | CHAOS)
    run = runs.get("run")
    with ThreadPoolExecutor(WORKERS + RANKS + 1) as pool:
        ranks = [pool.submit(consume, run, rank) for rank in range(RANKS)]
        disturbing = pool.submit(disturb, run, stopped)
        workers = [pool.submit(Worker(run, number).work) for number in range(WORKERS)]
        try:
            for worker in workers:
                worker.result(PATIENCE_S)
        finally:
            stopped.set()
            disturbing.result(PATIENCE_S)
            run.finish()
        done = [rank.result(PATIENCE_S) for rank in ranks]
    check_outcome(run, log.events, done)
    with pytest.raises(NotFoundError):
        store.plan("run", 0)
    runs.close(PATIENCE_S)


class Found(NamedTuple):
    state: State
    config: RunConfig
    rows: RowBuffer


def check_outcome(run: Run, events: list[Any], done: list[list[Position]]) -> None:
    state = State.initial(run.config, run.run_id)
    for event in events:
        apply(state, event)
    now = run.read(lambda state, room: state)
    assert state == now, "the log is what happened"
    check_invariants(Found(now, run.config, run._writer.rows))
    closed = check_closed_groups(now, events)
    accepted, ends = follow(events)
    assert Counter(name for name, _ in ends) == Counter(accepted)
    assert len(set(accepted)) == len(accepted)
    status = run.status()
    assert status.failed_batches == {}
    assert len(closed) == WORKERS * GROUPS
    sealed = sum(isinstance(outcome, int) for outcome in closed.values())
    assert sealed + sum(status.groups_dropped.values()) == WORKERS * GROUPS
    assert (status.row_bytes, status.shard_bytes, len(run._writer.rows)) == (0, 0, 0)
    assert status.batches_freed == status.batches_published == status.batches_sealed
    assert done[0] == done[1] == [Position(b, 0, m) for b, count in enumerate(state.prompts) for m in range(count)]


def test_a_run_deleted_under_load_ends_every_call_and_leaves_nothing() -> None:
    store = MemoryShardStore()
    runs = Runs(store, make_monitor=Monitor)
    for number in range(20):
        runs.create("run", CONFIG | {"train_batch_size": 1, "max_buffered_batches": 50})
        run, begun = runs.get("run"), threading.Barrier(5)

        def load(worker: int, run: Run = run, begun: threading.Barrier = begun) -> type[GristmillError]:
            begun.wait(PATIENCE_S)
            for index in itertools.count():
                try:
                    run.submit(table(*group_rows(f"w{worker}-{index}")))
                except ResourceExhaustedError:
                    continue
                except GristmillError as error:
                    return type(error)
            raise AssertionError("it never ends")

        with ThreadPoolExecutor(4) as pool:
            loading = [pool.submit(load, worker) for worker in range(4)]
            begun.wait(PATIENCE_S)
            if number % 2:
                _await_sealed(run)
            runs.delete("run")
            assert {one.result(PATIENCE_S) for one in loading} == {NotFoundError}
    runs.close(PATIENCE_S)
    assert store._batches == {}


def _await_sealed(run: Run) -> None:
    wait_until(lambda: bool(run.status().batches_sealed))
