"""Random runs of trainers with different habits, paced by the run: who waits for ever, and what begins too early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.trl._async_settings import async_run_settings
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions import aborts, admission, pacing, progress, sealing
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.decisions.pacing import UNBOUNDED
from gristmill_service.run.machine.decisions.resume import Checkpoint, resume
from gristmill_service.run.machine.events import BatchFailed, Event, GroupKey, ModelResumed, RanksBegan, Resized
from tests.run.harness import row
from tests.run.machine import Machine

BATCHES = 12
"""How many batches a run trains."""
_Turn = Iterator[bool]
"""What an actor does, in turns: whether it did something, or waits."""


class Habits(NamedTuple):
    """A trainer's habits.

    every: announces a version with every so many batches; 0: with every optimizer step, None: never. first: announces
    before it acknowledges. ahead: asks for the next batch before it trains this one. held: how many batches it collects
    for a step, and acknowledges with the step after; its reader asks for nothing. begins: begins the groups of a batch
    itself, before it asks for it. version: that it begins with. saves: commits every so many batches; None: with each
    acknowledgement.
    """

    every: int | None = 1
    first: bool = False
    ahead: bool = False
    held: int = 0
    begins: bool = False
    version: int = 0
    saves: int | None = None


class PacedMachine(Machine):
    """A run that knows what its ranks ask for, as its writer does."""

    def __init__(self, **settings: Any) -> None:
        self.asked: dict[int, int] = {}
        super().__init__(**settings)

    def room(self) -> Room:
        return admission.room(self.state, self.config, UNBOUNDED, self.asked)

    def happened(self, event: Event) -> None:
        if isinstance(event, (RanksBegan, ModelResumed, Resized)):
            pacing.forget(self.asked, event)

    def ask(self, rank: int, batch: int) -> BatchState:
        self.asked[rank] = max(batch, self.asked.get(rank, 0))
        return progress.batch_state(self.state, batch)


@dataclass
class Outcome:
    """trained: batches. deadlock: why nobody goes on; empty where the run was trained to its end. beyond: groups that
    began beyond the window. replaced: groups that began with weights that the trainer was about to replace."""

    trained: int = 0
    deadlock: str = ""
    begun: int = 0
    beyond: int = 0
    replaced: int = 0


@dataclass
class Observed:
    """What happened, kept apart from the run: by batch the ranks that acknowledged it; what each rank asked for; the
    batches after which a version was announced, and those for which it is still to be."""

    acknowledged: dict[int, set[int]] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    renewed: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)

    def done(self, batch: int, ranks: int) -> bool:
        return len(self.acknowledged.get(batch, ())) == ranks

    def is_trained(self, batch: int, ranks: int) -> bool:
        later = all(self.asked.get(rank, -1) > batch for rank in range(ranks))
        return self.done(batch, ranks) and (batch in self.renewed or later)


class PacedRun:
    """One run: workers, a trainer of several ranks that may restart, and a service that may."""

    def __init__(self, random: Random, config: dict[str, Any], habits: Habits) -> None:
        self._random, self._habits = random, habits
        self._machine = PacedMachine(**config)
        self._ranks = self._machine.config.dp_size
        self._observed, self._outcome = Observed(), Outcome()
        self._running: dict[str, int] = {}
        self._version = self._launch = self._finished = 0
        self._committed = 0
        self._fails = random.random() < 0.2
        self._crashes = random.choice([0, 0, 2]) if not habits.held else 0
        self._actors: list[_Turn] = []

    def run(self) -> Outcome:
        self._start()
        outcome, idle = self._outcome, 0
        while min(self._positions()).batch < BATCHES + 3 * self._habits.held:
            actor = self._random.choice(self._actors)
            idle = 0 if next(actor) else idle + 1
            self._make()
            # A restart of the service forgets what was asked, and ranks ask again.
            if self._random.random() < 0.01:
                self._machine.asked.clear()
            if self._crashes and self._random.random() < 0.01:
                self._crashes -= 1
                self._start()
            if idle > 40 * len(self._actors):
                outcome.deadlock = self._machine.room().reason or "no reason"
                break
        outcome.trained = min(self._positions()).batch
        return outcome

    def _start(self) -> None:
        """Starts the trainer's ranks, at the last checkpoint, and the workers."""
        self._launch += 1
        checkpoint, launch = Checkpoint(None), str(self._launch)
        self._machine.execute(lambda view: resume(view.state, view.config, "policy", checkpoint, launch, 0, "run"))
        if self._habits.begins:
            # It samples again what is in no batch.
            self._running.clear()
            machine = self._machine
            machine.execute(lambda view: aborts.abort_groups(view.state, list(view.state.open), "restarted"))
        begins, observed = min(self._positions()).batch, self._observed
        for kept in (observed.acknowledged, dict.fromkeys(observed.renewed), dict.fromkeys(observed.pending)):
            for batch in [batch for batch in kept if batch >= begins]:
                kept.pop(batch)
        observed.renewed = {batch for batch in observed.renewed if batch < begins}
        observed.pending, observed.asked = set(), dict.fromkeys(range(self._ranks), begins - 1)
        self._stepped = dict.fromkeys(range(self._ranks), begins)
        ranks = [self._holding()] if self._habits.held else [self._rank(rank) for rank in range(self._ranks)]
        self._actors = [*ranks, *([] if self._habits.begins else [self._worker()]), self._sampler()]
        if self._habits.version or self._launch > 1:
            self._announce(max(self._version, self._habits.version))

    # Workers.

    def _worker(self) -> _Turn:
        while True:
            yield self._begin()

    def _begin(self) -> bool:
        machine, uid = self._machine, f"u{self._outcome.begun}"
        if machine.begin({uid: ""}) != ["ADMITTED"]:
            return False
        self._outcome.begun += 1
        self._running[uid] = machine.state.policy_version
        most = machine.config.train_batch_size * (1 + (machine.config.batches_ahead or 0))
        observed, counts = self._observed, machine.state.prompts
        built = [number for number in range(len(counts)) if number not in machine.state.failed]
        waiting = [number for number in built if not observed.is_trained(number, self._ranks)]
        if machine.config.batches_ahead is None:
            return True
        if machine.config.seal_by == "call":
            used, most = len(waiting) + 1, 1 + machine.config.batches_ahead
            replaced = len({*waiting, *observed.pending}) + 1
        else:
            used = len(machine.state.open) + sum(counts[number] for number in waiting)
            replaced = len(machine.state.open) + sum(counts[number] for number in {*waiting, *observed.pending})
        self._outcome.beyond += used > most
        self._outcome.replaced += replaced > most
        return True

    def _sampler(self) -> _Turn:
        while True:
            machine = self._machine
            if not self._running or self._random.random() < 0.1:
                yield self._seals()
                continue
            uid = self._random.choice(list(self._running))
            version = self._running.pop(uid)
            if self._random.random() < 0.1 and not self._habits.begins:
                self._aborts(uid)
            else:
                machine.submit([row(uid, policy_version=version)])
            yield True

    def _aborts(self, uid: str) -> None:
        self._machine.execute(lambda view: aborts.abort_groups(view.state, [GroupKey(0, uid)], ""))

    def _seals(self) -> bool:
        machine = self._machine
        if machine.config.seal_by != "call" or not machine.state.complete:
            return False
        if len(machine.state.batches) >= machine.config.max_buffered_batches:
            return False
        machine.execute(lambda view: sealing.seal_batch(view.state, view.config, None))
        return True

    def _make(self) -> None:
        machine = self._machine
        for number in machine.state.batches_to_build:
            if self._fails and self._random.random() < 0.1:
                self._failed(number, keeps_rows=self._random.random() < 0.5)
        machine.publish()

    def _failed(self, number: int, keeps_rows: bool) -> None:
        event = BatchFailed(number, "cannot be aligned", keeps_rows)
        self._machine.execute(lambda view: sealing.record_batch(view.state, event, view.state.dp_size, None))

    # The trainer.

    def _rank(self, rank: int) -> _Turn:
        """A rank that trains batch after batch."""
        machine, habits = self._machine, self._habits
        while True:
            number = progress.next_of(machine.state, "policy", rank).batch
            if habits.begins and not rank and number == machine.state.batches_sealed:
                yield from self._begins_batch()
            yield from self._waits(rank, number)
            if number in machine.state.failed:
                continue
            if habits.ahead:
                self._asks(rank, number + 1)
            for mini_batch in range(machine.state.prompts[number]):
                if progress.next_of(machine.state, "policy", rank) > Position(number, 0, mini_batch):
                    continue
                yield True
                is_last = mini_batch + 1 == machine.state.prompts[number]
                if habits.first and not rank and is_last:
                    # What every rank has done before is announced with it, the batch itself is not acknowledged.
                    self._announces(number)
                machine.acknowledge(rank, Position(number, 0, mini_batch), commit=habits.saves is None)
                if is_last:
                    self._acknowledged(rank, number)
                if habits.every == 0 and not rank and not is_last:
                    self._announce(self._version + 1)
            # Ranks go on together.
            self._stepped[rank] = number + 1
            if not rank:
                while min(self._stepped.values()) <= number:
                    yield False
                if not habits.first:
                    yield True
                    self._announces(number)
                if habits.saves and number % habits.saves == habits.saves - 1:
                    self._commit(number + 1)

    def _waits(self, rank: int, number: int) -> _Turn:
        while number not in self._machine.state.failed and self._asks(rank, number) is not BatchState.PUBLISHED:
            yield False

    def _asks(self, rank: int, number: int) -> BatchState | None:
        self._observed.asked[rank] = max(number, self._observed.asked.get(rank, -1))
        if number in self._machine.state.failed:
            return None
        return self._machine.ask(rank, number)

    def _acknowledged(self, rank: int, number: int) -> None:
        self._observed.acknowledged.setdefault(number, set()).add(rank)
        self._observed.asked[rank] = max(number, self._observed.asked.get(rank, -1))
        habits = self._habits
        if habits.first or habits.ahead or habits.held or not self._is_announced(number):
            return
        if self._observed.done(number, self._ranks):
            self._observed.pending.add(number)

    def _is_announced(self, number: int) -> bool:
        every = self._habits.every
        return every is not None and (every == 0 or number % every == every - 1)

    def _announces(self, number: int) -> None:
        if self._is_announced(number):
            self._announce(self._version + 1)

    def _announce(self, version: int) -> None:
        self._version = version
        self._machine.announce(version)
        self._observed.renewed |= {one for one in self._observed.acknowledged if self._observed.done(one, self._ranks)}
        self._observed.pending -= self._observed.renewed

    def _commit(self, batch: int) -> None:
        position = Position(batch)
        self._machine.execute(lambda view: progress.commit(view.state, "policy", position, 0))

    def _begins_batch(self) -> _Turn:
        left = self._machine.config.train_batch_size
        while left:
            has_begun = self._begin()
            left -= has_begun
            yield has_begun

    def _holding(self) -> _Turn:
        """As AsyncGRPOTrainer with our worker: a step reads several batches, one step ahead; each is acknowledged with
        the step after, and the last of them later, as it may be read in part."""
        machine, held, done, step = self._machine, self._habits.held, 0, 0
        while True:
            # A micro-batch is a whole step here.
            for number in range(done, (step + 2) * held):
                while not self._is_there(number):
                    yield False
            yield True
            if self._random.random() < 0.5:
                self._announces(step)
            for number in range(done, max(0, (step + 1) * held - 1)):
                if number not in machine.state.failed:
                    machine.acknowledge(0, Position(number))
                    self._acknowledged(0, number)
                done = number + 1
                yield True
            self._announces(step)
            step += 1

    def _is_there(self, number: int) -> bool:
        state = self._machine.state
        batch = state.batches.get(number)
        return number in state.failed or number < state.freed or (batch is not None and batch.is_published)

    def _positions(self) -> list[Position]:
        return self._machine.state.models["policy"].next


def async_grpo(groups: int, max_staleness: int) -> dict[str, Any]:
    """The settings of the adapter of AsyncGRPOTrainer, with steps of so many groups."""
    args = SimpleNamespace(
        per_device_train_batch_size=groups * 2,
        gradient_accumulation_steps=1,
        world_size=1,
        num_generations=2,
        max_staleness=max_staleness,
    )
    return async_run_settings(args, Gristmill("here:1", "run"))


def drawn(random: Random) -> tuple[str, dict[str, Any], Habits]:
    """Settings and habits, and what they stand for."""
    config: dict[str, Any] = {
        "train_batch_size": random.randint(1, 4),
        "n_samples_per_prompt": 1,
        "dp_size": random.randint(1, 3),
        "max_staleness": random.choice([0, 0, 1, 2, 4]),
        "max_buffered_batches": random.choice([30, 60]),
        "seal_by": random.choice(["count", "count", "call"]),
        "seal_order": random.choice(["completion", "admission"]),
    }
    config |= {"max_batches_ahead": random.randint(0, 3)} if random.random() < 0.3 else {}
    kind = random.choice(["own", "own", "own", "verl", "trl", "skyrl", "slime", "async grpo"])
    match kind:
        case "verl":
            freq = random.choice([1, 3, 20])
            return kind, config | {"seal_by": "count", "max_buffered_batches": freq + 2}, Habits(freq, saves=freq)
        case "trl":
            saves = random.choice([None, 2])
            samples = random.random() < 0.5
            announced = 1 if samples else random.choice([1, None])
            return kind, config | {"seal_by": "count"}, Habits(announced, saves=saves, begins=samples)
        case "skyrl":
            return kind, config | {"seal_by": "count", "seal_order": "admission"}, Habits(1, begins=True, saves=3)
        case "slime":
            slime = Habits(1, saves=random.choice([None, 2]), version=random.choice([0, 7]))
            return kind, config | {"seal_by": "count"}, slime
        case "async grpo":
            groups, most = random.choice([1, 2, 8]), random.choice([0, 1, 4])
            held = Habits(random.choice([1, 3, None]), held=groups)
            return kind, {**async_grpo(groups, most), "n_samples_per_prompt": 1, "max_staleness": most}, held
    every = random.choice([0, 1, 3, 20, None])
    first, ahead = random.random() < 0.5, random.random() < 0.3
    version = random.choice([0, 0, 50])
    saves = random.choice([None, None, 1, 4]) if config["seal_by"] == "count" else None
    return kind, config, Habits(every, first, ahead, version=version, saves=saves)


def outcome_of(seed: int) -> tuple[str, Outcome]:
    """Draws a run. Returns whose habits its trainer has, and what became of it."""
    random = Random(seed)
    kind, config, habits = drawn(random)
    return kind, PacedRun(random, config, habits).run()
