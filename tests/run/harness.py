"""A run on the bench: batches are made when the test says so, and the clock moves when the test moves it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.batch_table import BatchTable
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.figures import Figures
from gristmill_service.pipeline.layout.iovec import Iovec, Region, join
from gristmill_service.pipeline.plan_document import MiniBatchDocument, PlanDocument
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.pipeline.stages import StageTimer
from gristmill_service.pipeline.written import ShardForm, Written, WrittenRows
from gristmill_service.run.capacity import RowBudget, ShardRoom
from gristmill_service.run.machine.answers import ColumnPlace, RewardUpdate
from gristmill_service.run.machine.codec import decode_state
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.recent_tables import RecentTables
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.run.run import Run
from gristmill_service.run.shared import Shared
from gristmill_service.storage.shard_store import ShardLocation, ShardSource, ShardStore
from tests.on_loop import Run as OnLoopRun
from tests.on_loop import on_loop
from tests.rows import make_config, make_row
from tests.run.deltas import Sender
from tests.run.logs import RecordingLog
from tests.strategies import Row

CONFIG = make_config(train_batch_size=2, n_samples_per_prompt=2, dp_size=1)


# One of the step, one of each of its tokens, or None: it comes later.
Reward = float | Sequence[float] | NDArray[np.floating[Any]] | None


def row(
    uid: str,
    sample: int = 0,
    step: int = 0,
    *,
    last: bool = True,
    reward: Reward = 1.0,
    response: Iterable[int] = (7,),
    **more: Any,
) -> Row:
    """One step; reward None: it comes later."""
    response = list(response)
    return make_row(uid=uid, sample=sample, step=step, last=last, response=response, reward=reward) | more


def group_rows(uid: str, samples: int = 2, **more: Any) -> list[Row]:
    """A whole group of one-step trajectories whose scores differ."""
    return [row(uid, sample, reward=float(sample), **more) for sample in range(samples)]


def table(*rows: Row) -> Steps:
    return from_rows(rows, step_wise=True)


def key(uid: str, sample: int = 0, round_: int = 0) -> TrajectoryKey:
    return TrajectoryKey(round_, uid, sample)


def reward_of(sent: Row) -> RewardUpdate:
    """The reward that a row was made with, for one that was sent without it."""
    reward, name = sent["reward"], key(sent["uid"], sent["sample"])
    if isinstance(reward, list):
        return RewardUpdate(name, sent["step"], None, np.array(reward, np.float64))
    return RewardUpdate(name, sent["step"], reward)


@dataclass
class Shard:
    address: ShardAddress
    data: bytes

    def __post_init__(self) -> None:
        self._region = Region(self.data)

    @property
    def size(self) -> int:
        return len(self.data)

    def iovec(self) -> Iovec:
        return self._region.whole()


class Shelf:
    """A store of such shards that can be full: it takes at most `places` batches; below 0 it refuses every call.
    `tried` is set with every refusal."""

    is_remote = False

    def __init__(self, places: int = 1000) -> None:
        self.places, self.tried = places, threading.Event()
        self.batches: dict[tuple[str, int], tuple[bytes, dict[ShardAddress, bytes]]] = {}
        self._lock = threading.Lock()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource], table: bytes = b"") -> int:
        with self._lock:
            if self.places < 0:
                self.tried.set()
                raise FailedPreconditionError("the shelf refuses this user")
            if len(self.batches) >= self.places and (run, batch) not in self.batches:
                self.tried.set()
                raise ResourceExhaustedError("the shelf is full")
            self.batches[run, batch] = plan, {shard.address: join(shard.iovec()) for shard in shards}
        return len(plan)

    def plan(self, run: str, batch: int) -> bytes:
        return self._get(run, batch)[0]

    def table(self, run: str, batch: int) -> bytes:
        raise NotImplementedError("no test asks for it")

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        return ShardLocation(len(self._get(run, batch)[1][address]), None)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        return iter([self._get(run, batch)[1][address]])

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> None:
        """It has whole files."""

    def free(self, run: str, batch: int) -> None:
        self.batches.pop((run, batch), None)

    def delete_run(self, run: str) -> None:
        for name in [name for name in list(self.batches) if name[0] == run]:
            self.batches.pop(name, None)

    def sweep(self, runs: Collection[str]) -> None:
        """Nothing is left half published."""

    def close(self) -> None:
        self.batches.clear()

    def _get(self, run: str, batch: int) -> tuple[bytes, dict[ShardAddress, bytes]]:
        if (run, batch) not in self.batches:
            raise NotFoundError(f"run {run!r}: batch {batch} is not on the shelf")
        return self.batches[run, batch]


@dataclass
class Built:
    plan: PlanDocument
    shards: list[Shard]
    awaits: frozenset[str] = frozenset()
    forms: Mapping[ShardAddress, ShardForm] = field(default_factory=dict)
    table: BatchTable = field(default_factory=lambda: BatchTable({}, {}, {}, {}, {}, {}))

    def stats(self) -> Figures:
        """Nothing is counted of a batch that the pipeline did not make."""
        return Figures(first=self.plan.batch, last=self.plan.batch)


_ONE = np.ones(1, np.int64)
_ONE_ROW = ShardForm(
    [],
    0 * _ONE,
    _ONE,
    0 * _ONE,
    0 * _ONE,
    _ONE == 1,
    WrittenRows(["a"], 0 * _ONE, 0 * _ONE, _ONE, np.empty(0, np.bool_), {}),
)


class BuildBatch:
    """Replaces the pipeline: stores its arguments. One policy mini-batch a prompt group (and critic's, if any), of
    one row a rank.

    fails: batches that cannot be made. misaligned: batches that cannot be aligned, each with a dp_size for which it
    cannot. When `gate` is given, it waits there, having set `entered`.
    """

    def __init__(
        self,
        fails: Collection[int] = (),
        gate: threading.Event | None = None,
        misaligned: Collection[tuple[int, int]] = (),
    ) -> None:
        self.batches: dict[int, Steps] = {}
        self.versions: dict[int, int | None] = {}
        self.written: dict[int, Written | None] = {}
        self._fails, self._misaligned = fails, misaligned
        self._gate, self.entered = gate, threading.Event()

    def __call__(
        self,
        steps: Steps,
        config: RunConfig,
        *,
        run: str,
        batch: int,
        policy_version: int | None,
        timed: StageTimer,
        written: Written | None = None,
        written_ranks: int = 0,
        begun: Mapping[tuple[int, str], int] | None = None,
        baselines: Baselines = NO_BASELINES,
    ) -> Built:
        self.entered.set()
        if self._gate is not None:
            self._gate.wait(30)
        if batch in self._fails:
            raise InvalidArgumentError("cannot be aligned")
        if (batch, config.dp_size) in self._misaligned:
            raise MisalignedError(f"cannot be aligned for dp_size = {config.dp_size}")
        self.batches[batch], self.versions[batch], self.written[batch] = steps, policy_version, written
        prompts = len(dict.fromkeys(zip(steps.rounds.tolist(), steps.uids, strict=True)))
        parts = [
            MiniBatchDocument(model, index, 0, 0, 0, 0, 0, 0, 0, [])
            for model in config.models
            for index in range(-(-prompts // config.mini_batch_size(model)))
        ]
        shards = [
            Shard(ShardAddress(part.model, part.index, rank), f"{run} {batch} {part} {rank}".encode())
            for part in parts
            for rank in range(config.dp_size)
        ]
        plan = PlanDocument(batch, len(steps), len(steps), prompts, 0, config.dp_size, [], parts, {}, {}, [], [], {})
        if written is not None or not config.written_columns:
            return Built(plan, shards)
        forms = {shard.address: _ONE_ROW for shard in shards if shard.address.model == "policy"}
        return Built(plan, shards, frozenset(column.name for column in config.written_columns), forms)


class HeldBuilders(Executor):
    """Builds batches when asked to, in the thread that asks. is_building: which may call the run meanwhile."""

    def __init__(self) -> None:
        self.is_building = False
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, partial(function, *args, **kwargs)))
        return future

    def build(self) -> None:
        """Builds the one that waits longest. Who waited for it may have gone meanwhile."""
        future, build = self.waiting.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        self.is_building = True
        try:
            future.set_result(build())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        finally:
            self.is_building = False


_log_threads = ThreadPoolExecutor(8, "tests-log")
_snapshot_thread = ThreadPoolExecutor(1, "tests-snapshot")


def shared_by(
    store: ShardStore,
    *,
    build_batch: Any,
    clock: Callable[[], float],
    builders: Executor,
    budget: RowBudget | None = None,
    room: ShardRoom | None = None,
) -> Shared:
    """What runs share in a service."""
    room, budget = room or ShardRoom(), budget or RowBudget(8 << 30)
    threads = (builders, _log_threads, _snapshot_thread)
    return Shared(store, room, budget, build_batch, Monitor, clock, *threads, asyncio.Lock(), RecentTables())


async def settle(run: Any, builders: HeldBuilders) -> None:
    """Returns when the run's background tasks are done, but for builds that wait to be asked for."""
    while len(run._background._tasks) > len(builders.waiting) + builders.is_building or run._writer.compaction._writing:
        await asyncio.sleep(0.0005)


class SettledRun(OnLoopRun):
    """A run whose calls return when their background tasks are done, too, but for the building of batches."""

    def __init__(self, run: Any, builders: HeldBuilders) -> None:
        super().__init__(run)
        self._builders = builders

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return attribute(*args, **kwargs)
            finally:
                on_loop(settle, self._target, self._builders)

        return call


def open_run(
    log: Any, config: RunConfig, *, store: Any, build_batch: Any, clock: Callable[[], float] = lambda: 0.0, **more: Any
) -> tuple[Any, HeldBuilders]:
    """Opens a run from its log, as a process does that finds it. Its batches are built when the test says so."""
    builders, name = HeldBuilders(), more.pop("name", "run")
    shared = shared_by(store, build_batch=build_batch, clock=clock, builders=builders, **more)
    run = SettledRun(on_loop(Run.open, name, config, log, shared), builders)
    on_loop(settle, run, builders)
    return run, builders


def build_all(run: Any, builders: HeldBuilders) -> None:
    """Builds the batches that wait, one after the other."""
    on_loop(settle, run, builders)
    while builders.waiting:
        builders.build()
        on_loop(settle, run, builders)


class Bench:
    """A run on the bench: batches are made when the test says so (`make_batches`), and the clock moves when it says so.

    wrote: by batch and incarnation, what was written first in each place.
    """

    def __init__(
        self,
        *,
        build_batch: Any = None,
        store: Any = None,
        budget: RowBudget | None = None,
        log: Any = None,
        name: str = "run",
        **settings: Any,
    ) -> None:
        self.config = parse_config(CONFIG | settings)
        # A test knows which it gave.
        self.log: Any = log or RecordingLog()
        self.build_batch: Any = build_batch or BuildBatch()
        self.store: Any = store or Shelf()
        self.now, self.name, self.budget = 0.0, name, budget
        self.wrote: dict[tuple[int, int], dict[ColumnPlace, float]] = {}
        self.sender = Sender()
        # A proxy, which is given to what asks for a run.
        self.run: Any
        self.reopen()

    def reopen(self) -> None:
        """Opens the run from its log, as another process would."""
        self.run, self.builders = open_run(
            self.log,
            self.config,
            store=self.store,
            build_batch=self.build_batch,
            clock=lambda: self.now,
            budget=self.budget,
            name=self.name,
        )

    @property
    def state(self) -> State:
        state: State = self.run.read(lambda state, room: state)
        return state

    @property
    def sealed(self) -> list[int]:
        """Batches that are sealed and not published."""
        return [number for number, batch in self.state.batches.items() if not batch.is_published]

    @property
    def rows(self) -> RowBuffer:
        """The rows that are stored."""
        rows: RowBuffer = self.run._writer.rows
        return rows

    def submit(self, *rows: Row) -> list[str]:
        return [outcome.name for outcome in self.sender.submit(self.run, table(*rows))]

    def let_pass(self, seconds: float) -> None:
        """Moves the clock. What follows from it is in the log when this returns: nobody else waits for that."""
        self.now += seconds
        self.run.tick()
        with suppress(UnavailableError):
            on_loop(self.run._writer.commits.safe)

    def begin(self, *uids: str, round_: int = 0) -> list[str]:
        return [admission.name for admission in self.run.begin_groups(round_, uids).admissions]

    def write(self, batch: int, mini_batch: int, rank: int, values: Mapping[str, float], later: int = 0) -> None:
        """Writes numbers of the one row that a shard has. later: than the current, the incarnation of the caller."""
        incarnation = self.state.models["policy"].incarnation + later
        tensors = {name: np.array([value], np.float32) for name, value in values.items()}
        self.run.write(batch, mini_batch, rank, incarnation, tensors)
        for name, value in values.items():
            self.wrote.setdefault((batch, incarnation), {}).setdefault(ColumnPlace(mini_batch, rank, name), value)

    def write_rest(self, batch: int, value: float) -> None:
        """Writes this for whatever a batch awaits yet."""
        for mini_batch, rank, name in self.state.missing(batch) if batch in self.state.batches_awaiting else ():
            self.write(batch, mini_batch, rank, {name: value})

    def written(self, batch: int) -> dict[ColumnPlace, float]:
        """What a batch was made of last, of what was written for it."""
        by_address = self.build_batch.written[batch] or {}
        return {
            ColumnPlace(address.mini_batch, address.rank, name): float(values[0])
            for address, columns in by_address.items()
            for name, values in columns.items()
        }

    def make_batches(self) -> None:
        build_all(self.run, self.builders)

    def uids(self, batch: int) -> list[str]:
        """The groups of a batch that was made, in order."""
        return list(dict.fromkeys(self.build_batch.batches[batch].uids))

    def replayed(self) -> State:
        """The state as the log has it."""
        state = State.initial(self.config, self.log.run_id)
        if self.log.snapshot is not None:
            state = decode_state(self.log.snapshot)
        for event in self.log.events:
            apply(state, event)
        return state


def wait_until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    """Returns when `ready()` is true."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.002)


def contents(steps: Steps) -> dict[str, Any]:
    """All that a batch's rows carry, to compare batches by."""
    rewards = None if steps.token_rewards is None else [values.tolist() for values in steps.token_rewards.arrays()]
    return {
        "keys": [(str(steps.key(index)), int(step)) for index, step in enumerate(steps.steps)],
        "tokens": [values.tolist() for values in steps.tokens.arrays()],
        "loss_mask": [values.tolist() for values in steps.loss_mask.arrays()],
        "rewards": steps.rewards.tolist(),
        "token_rewards": rewards,
        "pending": bool(np.any(steps.rewards_pending)),
        "versions": steps.policy_versions.tolist(),
        "stop_reasons": list(steps.stop_reasons),
    }
