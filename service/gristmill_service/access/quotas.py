"""What a caller's runs may be and hold in all, as the caller's token says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.caller import Caller
from gristmill_service.access.held import ANY, NOTHING, Held, Most, Quota
from gristmill_service.settings import Settings


class Usage(NamedTuple):
    """How much of a quota is taken. of: "run" or "caller"; name: whose."""

    quota: str
    of: str
    name: str
    used: int
    most: int


class Runs(Protocol):
    """The runs that there are. With Redis, `held` is about those that this process owns."""

    async def names(self) -> Iterable[str]: ...

    def held(self) -> Mapping[str, Held]: ...


def most_a_run(settings: Settings) -> Most:
    """What the service lets any one run hold."""
    return Most(settings.max_run_groups, settings.max_run_rows, settings.max_run_row_bytes)


async def check_runs(identity: Caller, run: str, runs: Runs) -> None:
    """Raises ResourceExhaustedError where the caller would create a run more than its token lets there be: of those
    whose names it is for."""
    if identity.max_runs is None:
        return
    own = [name for name in await runs.names() if identity.sees(name)]
    if run not in own and len(own) >= identity.max_runs:
        raise ResourceExhaustedError(
            f"{identity.name} may have {identity.max_runs} runs of the names {', '.join(identity.runs)}, and there are "
            f"{len(own)}; delete one, or raise max_runs of the token"
        )


def quota_of(identity: Caller, runs: Runs) -> Callable[[], Quota]:
    """What all runs hold that the caller's token is for, asked whenever something is to be added to them."""
    whose = f"the runs of {identity.name} ({', '.join(identity.runs)}) hold"

    return lambda: Quota(_held(identity, runs), identity.most, whose, "max_{} of the token", is_of_run=False)


def _held(identity: Caller, runs: Runs) -> Held:
    held = NOTHING
    for name, of_run in runs.held().items():
        if identity.sees(name):
            held = held.with_more(of_run)
    return held


def usage_of_caller(identity: Caller, runs: Runs, in_flight: int) -> Iterator[Usage]:
    """How much is taken of the caller's quotas."""
    if identity.max_runs is not None:
        yield Usage("max_runs", "caller", identity.name, sum(map(identity.sees, runs.held())), identity.max_runs)
    if identity.max_requests is not None:
        yield Usage("max_requests", "caller", identity.name, in_flight, identity.max_requests)
    if identity.most != ANY:
        yield from _usage("max_", "caller", identity.name, _held(identity, runs), identity.most)


def usage_of_runs(most: Most, runs: Runs) -> Iterator[Usage]:
    """How much is taken of what each run may hold, where that is limited."""
    if most != ANY:
        for name, held in runs.held().items():
            yield from _usage("max_run_", "run", name, held, most)


def _usage(prefix: str, of: str, name: str, held: Held, most: Most) -> Iterator[Usage]:
    for kind, used, limit in zip(Most._fields, held, most, strict=True):
        if limit is not None:
            yield Usage(prefix + kind, of, name, used, limit)
