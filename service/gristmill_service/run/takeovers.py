"""Opens runs in the background: at the start of the service, after their owner failed, and after their log was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial

import structlog

from gristmill.errors import GristmillError, NotFoundError
from gristmill_service.storage.run_store import OwnedElsewhereError

_log = structlog.get_logger(__name__)

# Each replay needs the memory of its log, and a thread.
_AT_ONCE = 8


class Takeovers:
    """Opens several runs at a time, so that a run with a long replay delays neither the others nor the next look.

    open_run: opens a run. elsewhere, nobodys: the runs that other processes own, and that no process owns, when this
    process last tried to open them.
    """

    def __init__(self, open_run: Callable[[str], Awaitable[object]]) -> None:
        self.elsewhere, self.nobodys = set[str](), set[str]()
        self._open_run, self._slots = open_run, asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def look(self, names: Collection[str], timeout_s: float) -> None:
        """Opens these runs, as far as that is possible. Returns after `timeout_s`, or when all attempts have ended; the
        other attempts continue."""
        self.elsewhere.intersection_update(names)
        self.nobodys.intersection_update(names)
        for name in names:
            if name not in self._tasks:
                task = self._tasks[name] = asyncio.create_task(self._open(name))
                task.add_done_callback(partial(self._ended, name))
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=timeout_s)

    async def close(self) -> None:
        """Returns when no attempt is under way."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, name: str) -> None:
        async with self._slots:
            try:
                await self._open_run(name)
                owners = None
            except OwnedElsewhereError:
                owners = self.elsewhere
            except NotFoundError:
                owners = None
            except GristmillError:
                owners = self.nobodys
            except Exception:  # noqa: BLE001 - a defect that concerns one run is no reason to stop
                owners = self.nobodys
                _log.exception("run not opened", run=name)
        self.elsewhere.discard(name)
        self.nobodys.discard(name)
        if owners is not None:
            owners.add(name)

    def _ended(self, name: str, _: object) -> None:
        del self._tasks[name]
