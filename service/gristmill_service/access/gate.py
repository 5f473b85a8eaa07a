"""Identifies callers by their tokens, checks their permissions, and writes the audit log. Runs on the event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path

import structlog

from gristmill.errors import (
    GristmillError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN, Caller
from gristmill_service.access.passed_on import PeerSecret
from gristmill_service.access.quotas import NO_LIMITS, NO_USAGE, Limits, Quota, QuotaUsage, Runs, Usage
from gristmill_service.access.roles import AUDITED, OPEN_CALLS
from gristmill_service.access.tokens import Callers, read_callers, version_of
from gristmill_service.access.web_tokens import WebTokens
from gristmill_service.settings import Settings

_log = structlog.get_logger("gristmill.audit")
AUTHORIZATION = "authorization"
"""The gRPC metadata key and HTTP header of a caller's token."""

_BEARER = "bearer "
_MOST_CHARACTERS = 16 << 10
_MOST_KNOWN = 4096

_EACH_S = 1.0
_MOST_KINDS = 256
_OTHERS = ("others", "various", "various")
_MOST_OF_A_NAME = 200


def limits_of_each_run(settings: Settings) -> Limits:
    """Returns the limits of what each run may store."""
    return Limits(settings.max_run_groups, settings.max_run_rows, settings.max_run_row_bytes)


class Gate:
    """Checks callers. Without a file of tokens, every caller may do everything.

    is_open: whether there is no file of tokens. counts_calls: whether concurrent calls are limited per token or run.
    """

    def __init__(self, settings: Settings, runs: Runs) -> None:
        """Reads the tokens. runs: the runs that quotas apply to. Raises InvalidArgumentError."""
        self._runs, self._refusals, self.secret = runs, RefusalLog(), PeerSecret()
        self._limits_of_run, self._most_calls_of_run = limits_of_each_run(settings), settings.max_run_requests
        self.counts_calls = settings.tokens_file is not None or settings.max_run_requests is not None
        self._file = None if settings.tokens_file is None else _CallersFile(settings.tokens_file)
        self.is_open = self._file is None
        self._proxy = None
        if settings.proxy_user_header is not None:
            networks = [ip_network(address.strip()) for address in settings.proxy_addresses.split(",")]
            self._proxy = settings.proxy_user_header.lower(), networks
        self._web_tokens = None
        if settings.jwks is not None:
            self._web_tokens = WebTokens(
                settings.jwks, settings.jwt_issuer or "", settings.jwt_audience or "", settings.jwks_ca_file
            )

    def user_of_proxy(self, headers: Mapping[str, str], address: str) -> Caller | None:
        """Returns the caller named by a trusted proxy at this address; None if there is none.

        Raises UnauthenticatedError for a user that is not in the file of tokens, and for several users, of which the
        client may have named the first.
        """
        if self._proxy is None or self._file is None:
            return None
        users = [user for name, user in headers.items() if name == self._proxy[0]]
        if not any(users):
            return None
        try:
            if not any(ip_address(address) in network for network in self._proxy[1]):
                return None
        except ValueError:
            return None
        with self._noted():
            if len(users) > 1:
                raise UnauthenticatedError(
                    f"the request has {len(users)} headers {self._proxy[0]}; let the proxy remove those of clients"
                )
            if identity := self._file.callers().with_user(users[0]):
                return identity
            raise UnauthenticatedError(
                f"the user {users[0][:100]!r} is not in tokens_file; add an entry under proxy_users"
            )

    def came_from(self, shown: Mapping[str, str]) -> str:
        """See `PeerSecret.came_from`."""
        try:
            return self.secret.came_from(shown)
        except UnavailableError as error:
            self._refusals.note("unknown", "pass_on", error.code, None, None)
            raise

    def known(self, authorization: str | None) -> Caller | None:
        """Returns the caller with this header; ANYONE without the header; None for a web token that `identify` has to
        verify. Raises UnauthenticatedError for an unknown token."""
        if self._file is None:
            return EVERYONE_IS_ADMIN
        if not authorization:
            return ANYONE
        if (identity := self._file.known(authorization)) is not None:
            return identity
        with self._noted():
            if not _is_bearer(authorization):
                raise UnauthenticatedError("the authorization header is not a bearer token; send 'Bearer TOKEN'")
            if self._web_tokens is None or authorization.count(".") != 2:
                raise UnauthenticatedError("the token is unknown; request one from the service's operator")
            return self._web_tokens.known(_token_of(authorization), self._file.callers())

    async def identify(self, authorization: str | None, pace: Callable[[], Awaitable[None]]) -> Caller:
        """Returns the caller with this header. Verifies a web token, which may need a request to its issuer, after
        awaiting `pace`. Raises UnavailableError if the issuer does not answer within seconds."""
        if (identity := self.known(authorization)) is not None:
            return identity
        assert self._web_tokens is not None
        assert self._file is not None
        assert authorization is not None
        await pace()
        with self._noted():
            return await self._web_tokens.caller(_token_of(authorization), self._file.callers())

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Logs that a token is refused."""
        try:
            yield
        except UnauthenticatedError as error:
            self._refusals.note("unknown", "identify", error.code, None, None)
            raise

    def quota(self) -> Callable[[], Quota] | None:
        """Returns a function that computes the quota of the current caller's runs; None if they have no limit."""
        if self._file is None:
            return None
        identity = caller.current()
        if identity.limits == NO_LIMITS:
            return None
        whose = f"the runs of {identity.name} ({', '.join(identity.runs)}) store"
        return lambda: Quota(self._usage(identity), identity.limits, whose, "max_{} of the token", is_of_run=False)

    def usage(self, calls: Mapping[tuple[str, str], int]) -> Iterator[QuotaUsage]:
        """Yields the usage of each quota of runs and static tokens. calls: the number of concurrent calls by ("caller"
        or "run", name)."""
        if self._limits_of_run != NO_LIMITS:
            for name, usage in self._runs.usage().items():
                yield from _taken("max_run_", "run", name, usage, self._limits_of_run)
        if self._most_calls_of_run is not None:
            for (of, name), count in calls.items():
                if of == "run":
                    yield QuotaUsage("max_run_requests", of, name, count, self._most_calls_of_run)
        for entry in () if self._file is None else self._file.callers().tokens:
            identity = entry.caller(entry.name)
            if identity.max_runs is not None:
                count = sum(map(identity.sees, [*self._runs.usage(), *self._runs.dormant()]))
                yield QuotaUsage("max_runs", "caller", entry.name, count, identity.max_runs)
            if identity.max_requests is not None:
                count = calls.get(("caller", entry.name), 0)
                yield QuotaUsage("max_requests", "caller", entry.name, count, identity.max_requests)
            if identity.limits != NO_LIMITS:
                yield from _taken("max_", "caller", entry.name, self._usage(identity), identity.limits)

    def _usage(self, identity: Caller) -> Usage:
        """Returns the amounts that all runs of the caller store."""
        total = NO_USAGE
        for name, usage in self._runs.usage().items():
            if identity.sees(name):
                total = total.plus(usage)
        return total

    def flush_log(self) -> None:
        """Logs how many lines the audit log has omitted."""
        self._refusals.flush()

    def check(self, identity: Caller, call: str, run: str | None, rank: int | None) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError unless the caller may make the call."""
        if identity is EVERYONE_IS_ADMIN:
            return
        try:
            if identity is ANYONE and call not in OPEN_CALLS:
                raise UnauthenticatedError(
                    f"{call} requires a token; send it as 'authorization: Bearer TOKEN' (our clients read it from "
                    "GRISTMILL_TOKEN or GRISTMILL_TOKEN_FILE)"
                )
            identity.check(call, run, rank)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            self.note_refusal(call, error, run, rank)
            raise
        if call in AUDITED:
            _log.info("allowed", caller=identity.name, call=call, target=run, rank=rank)

    def check_runs(self, names: Collection[str]) -> None:
        """Raises ResourceExhaustedError if the current caller may have no run in addition to those with these names."""
        identity = caller.current()
        if identity.max_runs is not None and (count := sum(map(identity.sees, names))) >= identity.max_runs:
            raise ResourceExhaustedError(
                f"{count} runs named {', '.join(identity.runs)} exist, and max_runs of the token {identity.name} is "
                f"{identity.max_runs}; delete a run, or raise max_runs of the token"
            )

    def note_refusal(self, call: str, error: GristmillError, run: str | None, rank: int | None = None) -> None:
        """Logs a refused call of the current caller."""
        self._refusals.note(caller.current().name, call, error.code, run, rank)

    def sees_labels(self) -> Callable[[Mapping[str, str]], bool]:
        """Returns a function that tells whether the current caller may see a metric with these labels: if they name no
        run that it may not see, and no caller that may see more runs."""
        identity = caller.current()
        entries = () if self._file is None else self._file.callers().tokens
        sees_all, runs = "*" in identity.runs, set(identity.runs)
        # By their patterns alone: a user of a proxy may have the name of a token.
        callers = {entry.name for entry in entries if sees_all or runs.issuperset(entry.runs)}

        def sees(labels: Mapping[str, str]) -> bool:
            run, name = labels.get("run"), labels.get("caller")
            return (run is None or identity.sees(run)) and (name is None or name in callers)

        return sees

    def visible(self, runs: Iterable[str]) -> list[str]:
        """Returns the runs that the current caller may see."""
        identity = caller.current()
        return [run for run in runs if identity.sees(run)]


def _taken(prefix: str, of: str, name: str, usage: Usage, limits: Limits) -> Iterator[QuotaUsage]:
    for kind, used, limit in zip(Limits._fields, usage, limits, strict=True):
        if limit is not None:
            yield QuotaUsage(prefix + kind, of, name, used, limit)


class RefusalLog:
    """Logs refused calls: at most one line per second for each caller, call and status, with the number of omitted
    lines, so that refusals cannot fill a disk. If there are too many kinds, the remaining kinds share a line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[tuple[str, str, str], float] = {}
        self._left_out: dict[tuple[str, str, str], int] = {}
        self._swept = 0.0

    def note(self, caller: str, call: str, code: str, run: str | None, rank: int | None) -> None:
        now = self._clock()
        if now >= self._swept + _EACH_S:
            self._swept = now
            self.flush()
            self._due = {kind: due for kind, due in self._due.items() if due > now}
        kind = (caller, call, code)
        if kind not in self._due and len(self._due) >= _MOST_KINDS:
            kind = _OTHERS
        if now < self._due.get(kind, 0.0):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._due[kind] = now + _EACH_S
        # The name is shortened, because a refused caller may send names of megabytes.
        _log.warning("refused", caller=caller, call=call, code=code, target=run and run[:_MOST_OF_A_NAME], rank=rank)

    def flush(self) -> None:
        """Logs how many lines were omitted."""
        for (name, call, code), count in self._left_out.items():
            _log.warning("refused, lines omitted", caller=name, call=call, code=code, count=count)
        self._left_out = {}


class _CallersFile:
    """The file of tokens, reloaded when it changes. While it is unreadable, the previous tokens stay valid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = version_of(self._path)
        self._callers = read_callers(path)
        self._known: dict[str, Caller] = {}

    def callers(self) -> Callers:
        version = version_of(self._path)
        if version != self._version:
            self._version = version
            self._read()
        return self._callers

    def known(self, authorization: str) -> Caller | None:
        """Returns the caller with the static token in this header; None for an unknown token."""
        callers = self.callers()
        if (identity := self._known.get(authorization)) is not None:
            return identity
        if not _is_bearer(authorization) or (identity := callers.with_token(_token_of(authorization))) is None:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[authorization] = identity
        return identity

    def _read(self) -> None:
        try:
            self._callers = read_callers(self._path)
            self._known.clear()
            _log.info("tokens read", file=str(self._path), tokens=len(self._callers.tokens))
        except GristmillError as error:
            _log.error("tokens cannot be read; previous tokens stay valid", reason=str(error))


def check_alone(count: int) -> None:
    """Raises UnauthenticatedError for a call with several Authorization headers: a proxy may have checked a different
    header than the service reads."""
    if count > 1:
        raise UnauthenticatedError(f"the call has {count} authorization headers; send one")


def _is_bearer(authorization: str) -> bool:
    return authorization[: len(_BEARER)].lower() == _BEARER and len(authorization) <= _MOST_CHARACTERS


def _token_of(authorization: str) -> str:
    return authorization[len(_BEARER) :].strip()
