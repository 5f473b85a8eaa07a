"""Quotas: limits of what a run, or all runs of a caller, may store, and the amounts in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol


class Usage(NamedTuple):
    """The amounts that one or several runs store.

    groups: prompt groups that are open or in a batch that is not freed. rows: their rows. row_bytes: these rows' bytes.
    """

    groups: int = 0
    rows: int = 0
    row_bytes: int = 0

    def plus(self, other: Usage) -> Usage:
        return Usage(self.groups + other.groups, self.rows + other.rows, self.row_bytes + other.row_bytes)


class Limits(NamedTuple):
    """Limits of a `Usage`; None: no limit."""

    groups: int | None = None
    rows: int | None = None
    row_bytes: int | None = None


NO_USAGE, NO_LIMITS = Usage(), Limits()


class Quota(NamedTuple):
    """A quota with its current usage.

    whose: the start of an error message. is_of_run: whether the quota applies to a single run. setting: the name of the
    setting, with {} in place of `groups`, `rows` or `row_bytes`.
    """

    usage: Usage
    limits: Limits
    whose: str
    setting: str
    is_of_run: bool


class QuotaUsage(NamedTuple):
    """The usage of a quota, for metrics. of: "run" or "caller". name: the name of that run or caller."""

    quota: str
    of: str
    name: str
    used: int
    most: int


class Runs(Protocol):
    """The runs that quotas apply to. With Redis, `usage` covers only the runs that this process owns. Dormant runs use
    nothing."""

    def usage(self) -> Mapping[str, Usage]: ...

    def dormant(self) -> Iterable[str]: ...
