"""A caller: its name, its roles, and the runs that it may use."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gristmill.errors import PermissionDeniedError
from gristmill_service.access.quotas import NO_LIMITS, Limits
from gristmill_service.access.roles import CALLS, OPEN_CALLS, Role


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller and its permissions.

    runs: shell patterns of run names. rank: the only rank that a trainer with this token may have; None: any.
    max_runs: how many runs with these names may exist. limits: what these runs may store in total before the caller's
    calls that add more are refused. max_requests: the number of its concurrent calls. None: no limit.
    """

    name: str
    roles: frozenset[Role]
    runs: tuple[str, ...] = ("*",)
    rank: int | None = None
    max_runs: int | None = None
    limits: Limits = NO_LIMITS
    max_requests: int | None = None

    def sees(self, run: str) -> bool:
        return any(fnmatchcase(run, pattern) for pattern in self.runs)

    def check(self, call: str, run: str | None, rank: int | None) -> None:
        """Raises PermissionDeniedError unless the caller may make the call for this run and rank."""
        if call in OPEN_CALLS:
            return
        allowed = CALLS[call]
        if not self.roles & (allowed | {"admin"}):
            has, needs = ", ".join(sorted(self.roles)) or "none", " or ".join(sorted(allowed | {"admin"}))
            raise PermissionDeniedError(
                f"{self.name} may not call {call}: it has the roles {has}, and the call requires {needs}; use a token "
                "with that role"
            )
        if run is not None and not self.sees(run):
            raise PermissionDeniedError(
                f"{self.name} may not call {call} for run {run!r}: its token is for {', '.join(self.runs)}; use a "
                "token for that run"
            )
        if rank is not None and self.rank is not None and rank != self.rank:
            raise PermissionDeniedError(
                f"{self.name} may not call {call} for rank {rank}: its token is for rank {self.rank}; use a token for "
                "that rank"
            )


ANYONE = Caller("anyone", frozenset())
EVERYONE_IS_ADMIN = Caller("anyone", frozenset(["admin"]))

_current: ContextVar[Caller] = ContextVar("gristmill_caller", default=EVERYONE_IS_ADMIN)


def begin(caller: Caller) -> None:
    """Sets the current caller of this task."""
    _current.set(caller)


def current() -> Caller:
    """Returns the current caller of this task."""
    return _current.get()
