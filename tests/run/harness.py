"""A run without threads: batches are made when the test says so, the clock moves when the test moves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from gristmill_service.pipeline.figures import Figures
from gristmill_service.pipeline.layout.iovec import Iovec, Region, join
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.pipeline.plan_document import MiniBatchDocument, PlanDocument
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.pipeline.stage_timer import StageTimer
from gristmill_service.pipeline.written import ShardForm, Written, WrittenRows
from gristmill_service.run.batch_builder import BuildBatch as Pipeline
from gristmill_service.run.machine.answers import ColumnPlace, RewardUpdate
from gristmill_service.run.machine.codec import decode_events
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.run.run import Run, Shared
from gristmill_service.run.shard_room import ShardRoom
from gristmill_service.run.workers import Task, TaskQueue
from gristmill_service.run.writing.row_budget import RowBudget
from gristmill_service.storage.memory_runs import MemoryRunLog
from gristmill_service.storage.run_store import CheckTable, Replay
from gristmill_service.storage.shard_store import ShardLocation, ShardSource, ShardStore
from tests.run.deltas import Sender
from tests.strategies import Row

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 1},
    "dp_size": 1,
    "step_wise": True,
}


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
    return {
        "uid": uid,
        "sample": sample,
        "step": step,
        "is_last_step": last,
        "prompt_token_ids": [1, 2],
        "response_ids": response,
        "loss_mask": [1] * len(response),
        "reward": reward,
    } | more


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
    """A store of such shards that can be full: it takes at most `places` batches; below 0 it could never take
    one. `tried` is set with every refusal."""

    def __init__(self, places: int = 1000) -> None:
        self.places, self.tried = places, threading.Event()
        self.batches: dict[tuple[str, int], tuple[bytes, dict[ShardAddress, bytes]]] = {}
        self._lock = threading.Lock()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        with self._lock:
            if self.places < 0:
                raise FailedPreconditionError("the shelf is too small")
            if len(self.batches) >= self.places and (run, batch) not in self.batches:
                self.tried.set()
                raise ResourceExhaustedError("the shelf is full")
            self.batches[run, batch] = plan, {shard.address: join(shard.iovec()) for shard in shards}
        return len(plan)

    def plan(self, run: str, batch: int) -> bytes:
        return self._get(run, batch)[0]

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

    def sweep(self, run: str) -> None:
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

    def stats(self) -> Figures:
        """Nothing is counted of a batch that the pipeline did not make."""
        return Figures(first=self.plan.batch, last=self.plan.batch)


_ONE = np.ones(1, np.int64)
_ONE_ROW = ShardForm(
    [], 0 * _ONE, _ONE, 0 * _ONE, _ONE == 1, WrittenRows(["a"], 0 * _ONE, 0 * _ONE, _ONE, np.empty(0, np.bool_), {})
)


class BuildBatch:
    """Stands for the pipeline: keeps what it was given. One policy mini-batch a prompt group (and critic's, if any), of
    one row a rank.

    fails: batches that cannot be made. misaligned: those that cannot be aligned, each with a dp_size for which that is
    so. When `gate` is given, it waits there, having set `entered`.
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
        begun: Mapping[tuple[int, str], int] | None = None,
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


class RecordingLog(MemoryRunLog):
    """Keeps the events. `refuses`: how many of the next appends fail."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[bytes] = []
        self.refuses = self.generation = 0

    def of(self, config: bytes) -> RecordingLog:
        self.config = config
        return self

    @property
    def events(self) -> list[Event]:
        return [event for record in self.records for event in decode_events(record)]

    def note_generation(self, generation: int) -> None:
        self.generation = generation

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        if self.refuses:
            self.refuses -= 1
            raise UnavailableError("the book is full")
        self.records.append(record)


class LastingLog(RecordingLog):
    """One that the next process finds: it keeps the tables, too."""

    reads_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Steps] = {}

    def replay(self) -> Replay:
        return Replay(None, list(self.records))

    def put(self, table: Steps) -> tuple[int, Steps]:
        number, _ = super().put(table)
        self.tables[number] = table
        return number, table

    def get(self, number: int) -> Steps:
        return self.tables[number]

    def remove(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self.tables[number]

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        self.tables = {number: table for number, table in self.tables.items() if number in numbers}
        return {number for number in numbers if number not in self.tables or not check(number, self.tables[number])}


class InlineTasks:
    """Runs tasks in the thread that gives them; builds of batches wait until they are asked for."""

    def __init__(self) -> None:
        self.builds: list[Task] = []

    def submit(self, key: Hashable, task: Task) -> None:
        assert isinstance(key, tuple)
        if key[0] != "build":
            task()
        elif not self.builds:
            self.builds.append(task)

    def build(self) -> None:
        while self.builds:
            self.builds.pop()()


def shared_by(
    store: ShardStore,
    *,
    build_batch: Pipeline,
    clock: Callable[[], float],
    tasks: TaskQueue,
    budget: RowBudget | None = None,
    room: ShardRoom | None = None,
) -> Shared:
    """What runs share in a service, without its threads."""
    return Shared(store, room or ShardRoom(), budget or RowBudget(8 << 30), build_batch, Monitor, clock, tasks, tasks)


class Bench:
    """A run on the bench. `make_batches` does what the service's threads do.

    wrote: by batch and incarnation, what was written first in each place.
    """

    def __init__(
        self,
        *,
        build_batch: Pipeline | None = None,
        store: ShardStore | None = None,
        budget: RowBudget | None = None,
        log: RecordingLog | None = None,
        name: str = "run",
        **settings: Any,
    ) -> None:
        self.config, self.log = parse_config(CONFIG | settings), log or RecordingLog()
        # A test knows which it gave.
        self.build_batch: Any = build_batch or BuildBatch()
        self.store: Any = store or Shelf()
        self.now, self.name, self.budget = 0.0, name, budget
        self.wrote: dict[tuple[int, int], dict[ColumnPlace, float]] = {}
        self.sender = Sender()
        self.reopen()

    def reopen(self) -> None:
        """Opens the run from its log, as another process would."""
        self.tasks = InlineTasks()
        clock = lambda: self.now  # noqa: E731
        shared = shared_by(self.store, build_batch=self.build_batch, clock=clock, tasks=self.tasks, budget=self.budget)
        self.run = Run(self.name, self.config, self.log, shared)
        self.run.start()

    @property
    def state(self) -> State:
        return self.run.read(lambda state, room: state)

    @property
    def sealed(self) -> list[int]:
        """Batches that are sealed and not published."""
        return [number for number, batch in self.state.batches.items() if not batch.is_published]

    @property
    def rows(self) -> RowBuffer:
        """The rows that are held."""
        return self.run._writer.rows

    def submit(self, *rows: Row) -> list[str]:
        return [outcome.name for outcome in self.sender.submit(self.run, table(*rows))]

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
        found = self.build_batch.written[batch] or {}
        return {
            ColumnPlace(address.mini_batch, address.rank, name): float(values[0])
            for address, columns in found.items()
            for name, values in columns.items()
        }

    def make_batches(self) -> None:
        self.tasks.build()

    def uids(self, batch: int) -> list[str]:
        """The groups of a batch that was made, in order."""
        return list(dict.fromkeys(self.build_batch.batches[batch].uids))

    def replayed(self) -> State:
        state = State.initial(self.config)
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
