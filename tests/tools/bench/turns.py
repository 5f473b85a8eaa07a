"""Turns of 64 workers, as fast as they are answered: in memory, on Redis and on a journal, compared with bare gRPC.

`python -m tests.tools.bench.turns --quick [memory|redis|journal]` prints them after two short rounds and writes
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.redis.servers import RedisServer
from tests.tools.bench import formats
from tests.tools.bench.bare import DISCARD, bare
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import served
from tests.tools.bench.submissions import run_of_its_own
from tests.tools.bench.workers import SUBMIT, Load, Workers, workers

WORKERS = 64
ROUNDS, ROUND_S = 5, 1.5
QUICK_ROUNDS, QUICK_S = 2, 0.8
KINDS = ("memory", "redis", "journal")
_REACH = {"memory": 0.5, "redis": 0.9, "journal": 0.6}
_BOUND = {"memory": "bare gRPC", "redis": "in memory", "journal": "in memory"}


class Side(NamedTuple):
    """One of the servers that are compared; the bare one takes the same bytes and knows no runs."""

    name: str
    address: str


def figures(kinds: Sequence[str] = KINDS, rounds: int = ROUNDS, seconds: float = ROUND_S) -> Iterator[Figure]:
    """A round sends to each server once, the first of them another one each time; one round more warms up."""
    with ExitStack() as opened:
        sides = list(_sides(opened, kinds))
        team = opened.enter_context(workers(WORKERS))
        for side in sides:
            _rate(team, side, f"warm-{side.name}", seconds / 2)
        measured = [_round(team, sides, number, seconds) for number in range(rounds)]
    for kind in kinds:
        bound = "bare" if kind == "memory" else "memory"
        ratio = statistics.median(rates[kind] / rates[bound] for rates in measured)
        rate = statistics.median(rates[bound] for rates in measured)
        name, unit = f"turns.{kind}_ratio", f"turns/s, {_BOUND[kind]}"
        yield Figure(name, ratio, f"x {_BOUND[kind]}", _REACH[kind], rate, unit, at_most=False)


def _sides(opened: ExitStack, kinds: Sequence[str]) -> Iterator[Side]:
    """The journal and Redis's log are where temporary files are, which has to be a disk for their figures to hold."""
    yield Side("bare", opened.enter_context(bare()).address)
    yield Side("memory", opened.enter_context(served(["--store", "memory"])).grpc_address)
    directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    if "redis" in kinds:
        server = opened.enter_context(RedisServer(directory / "redis", appendonly="always"))
        flags = ["--store", "redis", "--redis-url", server.url]
        yield Side("redis", opened.enter_context(served(flags)).grpc_address)
    if "journal" in kinds:
        flags = ["--store", "memory", "--journal-dir", str(directory / "journal"), "--journal-fsync", "always"]
        yield Side("journal", opened.enter_context(served(flags)).grpc_address)


def _round(team: Workers, sides: list[Side], number: int, seconds: float) -> dict[str, float]:
    first = number % len(sides)
    return {side.name: _rate(team, side, f"round-{number}", seconds) for side in sides[first:] + sides[:first]}


def _rate(team: Workers, side: Side, run: str, seconds: float) -> float:
    if side.name == "bare":
        return team.send(Load(side.address, DISCARD, run, seconds)).rate
    with run_of_its_own(side.address, run):
        return team.send(Load(side.address, SUBMIT, run, seconds)).rate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench.turns", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="which of them (default: all)")
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    asked = parser.parse_args()
    rounds, seconds = (QUICK_ROUNDS, QUICK_S) if asked.quick else (ROUNDS, ROUND_S)
    for figure in figures(asked.kinds or KINDS, rounds, seconds):
        line = (figure.name, formats.ours(figure), formats.bound(figure), formats.ratio(figure), formats.reach(figure))
        print(*line, formats.verdict(figure), sep="  ", flush=True)


if __name__ == "__main__":
    main()
