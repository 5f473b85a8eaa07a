"""Runs that are opened in the background: some at a time, and one that takes long delays no other."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.run.takeovers import Takeovers
from gristmill_service.storage.run_store import OwnedElsewhereError

PATIENCE_S = 60.0


def test_a_run_that_takes_long_delays_neither_the_others_nor_the_next_look() -> None:
    async def test() -> None:
        may_end, opened = asyncio.Event(), list[str]()

        async def open_run(name: str) -> None:
            opened.append(name)
            if name == "long":
                await may_end.wait()

        takeovers, names = Takeovers(open_run), ["long", *(f"run-{number}" for number in range(30))]
        await takeovers.look(names, 0.05)
        assert sorted(opened) == sorted(names)
        await takeovers.look([*names, "new"], 0.05)
        assert opened.count("long") == 1
        assert opened[-1] == "new"
        may_end.set()
        await takeovers.look(["long"], PATIENCE_S)
        assert opened.count("long") == 1, "this attempt was still under way"
        await takeovers.close()

    asyncio.run(test())


def test_eight_are_opened_at_a_time() -> None:
    async def test() -> None:
        now, most = 0, 0

        async def open_run(name: str) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            for _ in range(10):
                await asyncio.sleep(0)
            now -= 1

        await Takeovers(open_run).look([f"run-{number}" for number in range(40)], PATIENCE_S)
        assert most == 8

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "elsewhere", "nobodys", "logged"),
    [
        (OwnedElsewhereError("owned"), {"run"}, set(), 0),
        (UnavailableError("away"), set(), {"run"}, 0),
        (NotFoundError("deleted"), set(), set(), 0),
        (ZeroDivisionError("a defect"), set(), {"run"}, 1),
        (None, set(), set(), 0),
    ],
)
def test_it_is_counted_whose_the_runs_are(
    error: Exception | None, elsewhere: set[str], nobodys: set[str], logged: int
) -> None:
    async def test() -> None:
        errors = [error]

        async def open_run(name: str) -> None:
            if errors and (raised := errors.pop()):
                raise raised

        takeovers = Takeovers(open_run)
        await takeovers.look(["run"], PATIENCE_S)
        assert (takeovers.elsewhere, takeovers.nobodys) == (elsewhere, nobodys)
        await takeovers.look(["run"], PATIENCE_S)
        assert (takeovers.elsewhere, takeovers.nobodys) == (set(), set())

    with capture_logs() as logs:
        asyncio.run(test())
    assert [line["event"] for line in logs] == ["run not opened"] * logged
