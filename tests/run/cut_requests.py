"""Random runs, and the same with their requests cut at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Any

from gristmill.errors import FailedPreconditionError, ResourceExhaustedError
from gristmill_service.run.machine.answers import Position, RewardUpdate
from gristmill_service.run.machine.decisions import sealing
from gristmill_service.run.machine.events import BatchSealed, GroupDropped, GroupKey, RowsStored, TrajectoryAborted
from tests.run.harness import key, row
from tests.run.machine import Machine
from tests.strategies import Row

Command = tuple[str, Any]
Results = tuple[list[Any], dict[GroupKey, str]]

_TAGS = ["", "", "x", "y"]


def drawn(random: Random) -> tuple[dict[str, Any], list[Command]]:
    """Settings with any of the filters, and commands that they accept."""
    shares = random.choice([{}, {}, {"x": {"min": 0.5}}, {"x": {"min": 1.0}}])
    config = {
        "train_batch_size": random.randint(1, 3),
        "n_samples_per_prompt": random.randint(1, 3),
        "surplus": random.randint(0, 2),
        "seal_order": random.choice(["completion", "admission"]),
        "seal_by": "count" if shares else random.choice(["count", "count", "call"]),
        "max_buffered_batches": random.randint(1, 4),
        "group_timeout_s": random.choice([None, 7.0]),
        "zero_variance_filter": random.choice([None, "mask", "replace", "replace"]),
        "trajectory_score": random.choice(["last_step", "sum"]),
        "episode_agents": random.choice([[], ["solver"]]),
        "tag_shares": shares,
    }
    config |= {"tag_timeout_s": 6.0} if shares else {}
    config |= {"stale": "drop", "max_staleness": random.randint(0, 2)} if random.random() < 0.6 else {}
    return config, list(_commands(random, config))


def _commands(random: Random, config: dict[str, Any]) -> Iterator[Command]:
    """Every row is sent once, and after it its reward, if it came without one."""
    uids = "abcdefgh"[: random.randint(2, 8)]
    tags = {uid: random.choice(_TAGS) for uid in uids}
    if begun := random.sample(uids, random.randint(0, len(uids))):
        yield "begin", [(uid, random.choice(["", tags[uid]])) for uid in begun]
    rows = [one for uid in uids for one in _rows_of(random, config, uid, tags[uid])]
    random.shuffle(rows)
    # Groups that others are sampled with finish about then, too.
    nearness = random.choice([0, 3, 9])
    rows.sort(key=lambda one: uids.index(one["uid"]) + nearness * random.random())
    version, unpaid = 0, list[Row]()
    while rows or unpaid:
        size = random.randint(1, 9)
        match random.choices(
            ["submit", "set_rewards", "abort", "announce", "let_pass", "train", "seal"], [8, 4, 1, 1, 1, 2, 1]
        ):
            case ["submit"] if rows:
                sent, rows = rows[:size], rows[size:]
                yield "submit", sent
                unpaid += [one for one in sent if one["reward"] is None]
            case ["set_rewards"] if unpaid:
                paid, unpaid = unpaid[:size], unpaid[size:]
                yield "set_rewards", [_reward_of(random, one) for one in paid]
            case ["abort"] if config["seal_by"] == "count" and rows:
                # Of trajectories of which no row was sent.
                begun_now = {(one["uid"], one["sample"]) for one in rows}
                yield "abort", [key(*one) for one in sorted(begun_now)[: random.randint(1, 4)]]
            case ["announce"]:
                version += random.randint(1, 2)
                yield "announce", version
            case ["let_pass"]:
                yield "let_pass", random.choice([1.0, 4.0, 8.0])
            case [other] if other in ("train", "seal"):
                yield other, None
    yield "finish", None


def _rows_of(random: Random, config: dict[str, Any], uid: str, tag: str) -> Iterator[Row]:
    equal, old = random.random() < 0.4, random.random() < 0.4
    for sample in range(config["n_samples_per_prompt"] + config["surplus"]):
        last = random.randint(0, 1)
        agent = {"agent": random.choice(["solver", "judge"]), "episode": random.choice("12")}
        for step in range(last + 1):
            reward = 1.0 if equal else float(random.randint(0, 2))
            more: dict[str, Any] = {"policy_version": random.randint(0, 1) if old else 9, "tag": tag, **agent}
            reward_now = None if random.random() < 0.3 else reward
            yield row(uid, sample, step, last=step == last, reward=reward_now, **more)


def _reward_of(random: Random, sent: Row) -> RewardUpdate:
    return RewardUpdate(key(sent["uid"], sent["sample"]), sent["step"], float(random.randint(0, 1)))


def cut(random: Random, commands: Sequence[Command]) -> Iterator[Command]:
    """The commands with their requests in pieces. A request that aborts several trajectories of a group is whole for
    this group: in two, the group could be complete and sealed in between."""
    for name, content in commands:
        match name:
            case "submit" | "set_rewards":
                atoms = [[one] for one in content]
            case "abort":
                atoms = [list(same) for _, same in groupby(content, lambda trajectory: trajectory[:2])]
            case _:
                yield name, content
                continue
        piece: list[Any] = []
        for atom in atoms:
            if piece and random.random() < 0.5:
                yield name, piece
                piece = []
            piece += atom
        yield name, piece


def run(config: dict[str, Any], commands: Sequence[Command]) -> Machine:
    machine = Machine(**config)
    for name, content in commands:
        match name:
            case "begin":
                machine.begin(dict(content))
            case "submit":
                machine.submit(content)
            case "set_rewards":
                machine.set_rewards(content)
            case "abort":
                machine.abort([one for one in content if (0, one.uid) in machine.state.open])
            case "announce":
                machine.announce(content)
            case "let_pass":
                machine.let_pass(content)
            case "train":
                _train(machine)
            case "seal":
                try:
                    machine.execute(lambda view: sealing.seal_batch(view.state, view.config, None))
                except (FailedPreconditionError, ResourceExhaustedError):
                    pass
            case "finish":
                machine.execute(lambda view: sealing.finish(view.state, view.config))
    while machine.state.batches:
        _train(machine)
    return machine


def _train(machine: Machine) -> None:
    """Trains the oldest batch."""
    machine.publish()
    for number in list(machine.state.batches)[:1]:
        for mini_batch in range(machine.state.prompts[number]):
            machine.acknowledge(0, Position(number, 0, mini_batch))


def results(machine: Machine) -> Results:
    """The batches in order, with the rows of which each is made, and why other groups were dropped."""
    rows: dict[GroupKey, set[tuple[int, int]]] = {}
    batches, dropped = list[Any](), dict[GroupKey, str]()
    for event in machine.events:
        match event:
            case RowsStored(stored):
                for one in stored:
                    rows.setdefault(one.group, set()).add((one.trajectory.sample, one.step))
            case TrajectoryAborted(trajectory):
                group = GroupKey(trajectory.round, trajectory.uid)
                rows[group] = {name for name in rows.get(group, set()) if name[0] != trajectory.sample}
            case BatchSealed(number, groups, version, short):
                batches.append((number, [(group, rows[group]) for group in groups], version, short))
            case GroupDropped(group, reason):
                dropped[group] = reason
    return batches, dropped


def of_both(seed: int) -> tuple[Results, Results]:
    """Draws a run. Returns its results, and those with its requests cut."""
    random = Random(seed)
    config, commands = drawn(random)
    return results(run(config, commands)), results(run(config, list(cut(random, commands))))
