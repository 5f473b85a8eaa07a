"""Says who calls, by the token that a call shows, what the caller may do, and logs who did what. On the event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from gristmill_service.access.held import ANY, Quota
from gristmill_service.access.passed_on import PeerSecret
from gristmill_service.access.quotas import (
    Runs,
    Usage,
    check_runs,
    most_a_run,
    quota_of,
    usage_of_caller,
    usage_of_runs,
)
from gristmill_service.access.refusal_log import RefusalLog
from gristmill_service.access.roles import AUDITED, OPEN_CALLS
from gristmill_service.access.tokens import Callers, read_callers
from gristmill_service.access.web_tokens import WebTokens
from gristmill_service.settings import Settings

_log = structlog.get_logger("gristmill.audit")
AUTHORIZATION = "authorization"
"""The name in gRPC metadata and among HTTP headers of what a caller shows."""

_BEARER = "bearer "
_MOST_CHARACTERS = 16 << 10
_MOST_KNOWN = 4096


class Gate:
    """Without a file of tokens everyone may do everything."""

    def __init__(self, settings: Settings, runs: Runs) -> None:
        """runs: what callers' quotas are of. Raises InvalidArgumentError for a file that cannot be read."""
        self._runs, self._refusals, self.secret = runs, RefusalLog(), PeerSecret()
        self._most_a_run, self._most_calls_a_run = most_a_run(settings), settings.max_run_requests
        self.counts_calls = settings.tokens_file is not None or settings.max_run_requests is not None
        self._file = None if settings.tokens_file is None else _CallersFile(settings.tokens_file)
        self._proxy = None
        if settings.proxy_user_header is not None:
            networks = [ip_network(address.strip()) for address in settings.proxy_addresses.split(",")]
            self._proxy = settings.proxy_user_header, networks
        self._web_tokens = None
        if settings.jwks is not None:
            self._web_tokens = WebTokens(
                settings.jwks, settings.jwt_issuer or "", settings.jwt_audience or "", settings.jwks_ca_file
            )

    @property
    def is_open(self) -> bool:
        return self._file is None

    def user_of_proxy(self, headers: Mapping[str, str], address: str) -> Caller | None:
        """The caller that a proxy at this address names, where one is to be believed and names any.

        Raises UnauthenticatedError for a user whom the file does not name.
        """
        if self._proxy is None or self._file is None or not (user := headers.get(self._proxy[0], "")):
            return None
        try:
            if not any(ip_address(address) in network for network in self._proxy[1]):
                return None
        except ValueError:
            return None
        if identity := self._file.callers().with_subject(user):
            return identity
        raise UnauthenticatedError(f"no entry of tokens_file is for the user {user[:100]!r}; add one under subjects")

    def came_from(self, shown: Mapping[str, str]) -> str:
        """See `PeerSecret.came_from`."""
        try:
            return self.secret.came_from(shown)
        except UnavailableError as error:
            self._refusals.note("unknown", "pass_on", error.code, None, None)
            raise

    def known(self, authorization: str | None) -> Caller | None:
        """The caller of a call with this header; ANYONE where it has none; None for a web token, which `identify`
        verifies. Raises UnauthenticatedError for a token that is not known."""
        if self._file is None:
            return EVERYONE_IS_ADMIN
        if not authorization:
            return ANYONE
        if (identity := self._file.known(authorization)) is not None:
            return identity
        if self._web_tokens is not None and _is_bearer(authorization) and authorization.count(".") == 2:
            return None
        error = UnauthenticatedError(
            "the token is not known here; ask the service's operator for one"
            if _is_bearer(authorization)
            else "authorization is no bearer token; send 'Bearer TOKEN'"
        )
        self._refusals.note("unknown", "identify", error.code, None, None)
        raise error

    async def identify(self, authorization: str | None) -> Caller:
        """As `known`, also for web tokens, whose issuer may be asked for its keys: that takes seconds where it does not
        answer. Raises UnavailableError where it does not."""
        if (identity := self.known(authorization)) is not None:
            return identity
        assert self._web_tokens is not None
        assert self._file is not None
        assert authorization is not None
        try:
            return await self._web_tokens.caller(_token_of(authorization), self._file.callers())
        except UnauthenticatedError as error:
            self._refusals.note("unknown", "identify", error.code, None, None)
            raise

    def quota(self) -> Callable[[], Quota] | None:
        """What the runs of the current caller hold and may; None where nothing limits it."""
        identity = caller.current()
        return None if identity.most == ANY else quota_of(identity, self._runs)

    def usage(self, calls: Mapping[tuple[str, str], int]) -> Iterator[Usage]:
        """How much is taken of each quota that is set: those of runs, and those of static tokens. calls: how many there
        are of each ("caller" or "run", name)."""
        yield from usage_of_runs(self._most_a_run, self._runs)
        if self._most_calls_a_run is not None:
            for (of, name), count in calls.items():
                if of == "run":
                    yield Usage("max_run_requests", of, name, count, self._most_calls_a_run)
        for entry in () if self._file is None else self._file.callers().tokens:
            yield from usage_of_caller(entry.caller(entry.name), self._runs, calls.get(("caller", entry.name), 0))

    def flush_log(self) -> None:
        """Logs how many lines the audit log left out."""
        self._refusals.flush()

    def check(self, identity: Caller, call: str, run: str | None, rank: int | None) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError where the caller may not make the call."""
        if identity is EVERYONE_IS_ADMIN:
            return
        try:
            if identity is ANYONE and call not in OPEN_CALLS:
                raise UnauthenticatedError(
                    f"{call} needs a token; send it as 'authorization: Bearer TOKEN' (our clients take it from "
                    "GRISTMILL_TOKEN or GRISTMILL_TOKEN_FILE)"
                )
            identity.check(call, run, rank)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            self.note_refusal(call, error, run, rank)
            raise
        if call in AUDITED:
            _log.info("allowed", caller=identity.name, call=call, target=run, rank=rank)

    async def check_runs(self, run: str) -> None:
        """Raises ResourceExhaustedError where the current caller may have no more runs than there are."""
        try:
            await check_runs(caller.current(), run, self._runs)
        except ResourceExhaustedError as error:
            self.note_refusal("create_run", error, run)
            raise

    def note_refusal(self, call: str, error: GristmillError, run: str | None, rank: int | None = None) -> None:
        """Logs that a call of the current caller was refused."""
        self._refusals.note(caller.current().name, call, error.code, run, rank)

    def visible(self, runs: Iterable[str]) -> list[str]:
        """The runs that the current caller may know of."""
        identity = caller.current()
        return [run for run in runs if identity.sees(run)]


class _CallersFile:
    """Read again when it changes. One that became unreadable leaves the callers of before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = self._look()
        self._callers = read_callers(path)
        self._known: dict[str, Caller] = {}

    def callers(self) -> Callers:
        version = self._look()
        if version != self._version:
            self._version = version
            self._read()
        return self._callers

    def known(self, authorization: str) -> Caller | None:
        """The caller whose static token this header shows."""
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
            _log.error("tokens cannot be read; the ones before stay valid", reason=str(error))

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        # Also when its mode was changed, or its content together with its time.
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _is_bearer(authorization: str) -> bool:
    return authorization[: len(_BEARER)].lower() == _BEARER and len(authorization) <= _MOST_CHARACTERS


def _token_of(authorization: str) -> str:
    return authorization[len(_BEARER) :].strip()
