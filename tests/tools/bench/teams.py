"""Clients in a few processes, a thread for each: orders go in a line each, and answers come back a line each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

PROCESSES = 4

Member = TypeVar("Member")


class Team:
    """The processes, which stay from one order to the next."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def order(self, order: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps(order), file=process.stdin, flush=True)

    def answers(self) -> list[Any]:
        """Returns every member's answers to the last order. Raises RuntimeError where one has failed."""
        values: list[Any] = []
        for process in self._processes:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise RuntimeError("a process of clients has ended; its standard error says why")
            values += json.loads(line)
        return values


@contextmanager
def team(module: str, count: int) -> Iterator[Team]:
    """module: what `lead` runs in each process."""
    share = count // PROCESSES
    with ExitStack() as opened:
        processes = []
        for number in range(PROCESSES):
            command = [sys.executable, "-m", module, str(share), str(number * share)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            opened.enter_context(process)
            assert process.stdin is not None
            opened.callback(process.stdin.close)
            processes.append(process)
        yield Team(processes)


def lead(
    make: Callable[[int], Member], carry_out: Callable[[list[Member], ThreadPoolExecutor, Any], list[Any]]
) -> None:
    """Runs one of the processes: members make(FIRST) to make(FIRST + COUNT - 1), and a thread for each."""
    count, first = map(int, sys.argv[1:])
    members = [make(first + number) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for line in sys.stdin:
            print(json.dumps(carry_out(members, pool, json.loads(line))), flush=True)
