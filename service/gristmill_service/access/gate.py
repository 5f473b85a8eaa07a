"""Says who calls, by the token that a call shows, and logs who did what."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from gristmill_service.access.debts import Debts
from gristmill_service.access.held import Quota
from gristmill_service.access.in_flight import InFlight
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
_MOST_NAMES = 1024


class Gate:
    """Thread-safe. Without a file of tokens everyone may do everything."""

    def __init__(self, settings: Settings, runs: Runs) -> None:
        """runs: what callers' quotas are of. Raises InvalidArgumentError for a file that cannot be read."""
        self._names: dict[str, str] = {}
        self._runs, self.debts, self._refusals = runs, Debts(), RefusalLog()
        self.secret = PeerSecret()
        self._in_flight, self._most_a_run = InFlight(settings.max_run_requests), most_a_run(settings)
        self._counts_calls = settings.tokens_file is not None or settings.max_run_requests is not None
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

    @property
    def asks_issuer(self) -> bool:
        """Whether `identify` may ask the issuer of web tokens for its keys, which takes seconds where that is away."""
        return self._web_tokens is not None

    def user_of_proxy(self, headers: Mapping[str, str], address: str) -> Caller | None:
        """Whom a proxy at this address names, where one is to be believed and names anyone.

        Raises UnauthenticatedError for a user whom the file does not name.
        """
        if self._proxy is None or self._file is None or not (user := headers.get(self._proxy[0], "")):
            return None
        try:
            if not any(ip_address(address) in network for network in self._proxy[1]):
                return None
        except ValueError:
            return None
        if found := self._file.callers().with_subject(user):
            return found
        raise UnauthenticatedError(f"no entry of tokens_file is for the user {user[:100]!r}; add one under subjects")

    def came_from(self, shown: Mapping[str, str]) -> str:
        """See `PeerSecret.came_from`."""
        try:
            return self.secret.came_from(shown)
        except UnavailableError as error:
            self._refusals.note("unknown", "pass_on", error.code, None, None)
            raise

    def identify(self, authorization: str | None) -> Caller:
        """The caller of a call with this header; ANYONE where it has none.

        Raises UnauthenticatedError for a token that is not known.
        """
        if self._file is None:
            return EVERYONE_IS_ADMIN
        if not authorization:
            return ANYONE
        try:
            return self._known(authorization, self._file.callers())
        except UnauthenticatedError as error:
            self._refusals.note("unknown", "identify", error.code, None, None)
            raise

    def _known(self, authorization: str, known: Callers) -> Caller:
        if not authorization[: len(_BEARER)].lower() == _BEARER or len(authorization) > _MOST_CHARACTERS:
            raise UnauthenticatedError("authorization is no bearer token; send 'Bearer TOKEN'")
        token = authorization[len(_BEARER) :].strip()
        if found := known.with_token(token):
            return found
        if self._web_tokens is not None and token.count(".") == 2:
            found = self._web_tokens.caller(token, known)
            self._remember(authorization, found.name)
            return found
        raise UnauthenticatedError("the token is not known here; ask the service's operator for one")

    @property
    def counts_calls(self) -> bool:
        """Whether calls are to be answered within `call`."""
        return self._counts_calls

    @contextmanager
    def call(self, name: str, run: str | None) -> Iterator[None]:
        """Around the answering of a call of the current caller. Raises ResourceExhaustedError where too many are being
        answered."""
        with ExitStack() as held:
            try:
                held.enter_context(self._in_flight.call(caller.current(), run))
            except ResourceExhaustedError as error:
                self._refusals.note(caller.current().name, name, error.code, run, None)
                raise
            yield

    def quota(self) -> Callable[[], Quota] | None:
        """What the runs of the current caller hold and may; None where nothing limits it."""
        return quota_of(caller.current(), self._runs)

    def usage(self) -> Iterator[Usage]:
        """How much is taken of each quota that is set: those of runs, and those of static tokens."""
        calls = self._in_flight.counts()
        yield from usage_of_runs(self._most_a_run, self._runs)
        if most := self._in_flight.most_a_run:
            for (of, name), count in calls.items():
                if of == "run":
                    yield Usage("max_run_requests", of, name, count, most)
        for entry in () if self._file is None else self._file.callers().tokens:
            yield from usage_of_caller(entry.caller(entry.name), self._runs, calls.get(("caller", entry.name), 0))

    def flush_log(self) -> None:
        """Tells of what the audit log left out."""
        self._refusals.flush()

    def name_of(self, authorization: str) -> str | None:
        """Of the caller whose token this header shows, for taking turns alone: a token that was withdrawn or ran out
        since may still be known by it. A web token is known once a call with it was answered: its issuer is not asked
        here."""
        name = self._names.get(authorization)
        if name is None and self._file is not None and len(authorization) <= _MOST_CHARACTERS:
            found = self._file.callers().with_token(authorization[len(_BEARER) :].strip())
            if found is not None:
                self._remember(authorization, name := found.name)
        return name

    def _remember(self, authorization: str, name: str) -> None:
        if len(self._names) >= _MOST_NAMES and authorization not in self._names:
            self._names.clear()
        self._names[authorization] = name

    def check(self, found: Caller, call: str, run: str | None, rank: int | None) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError where the caller may not make the call, and
        ResourceExhaustedError where its quota is used up."""
        try:
            if found is ANYONE and call not in OPEN_CALLS:
                raise UnauthenticatedError(
                    f"{call} needs a token; send it as 'authorization: Bearer TOKEN' (our clients take it from "
                    "GRISTMILL_TOKEN or GRISTMILL_TOKEN_FILE)"
                )
            found.check(call, run, rank)
            if call == "create_run":
                check_runs(found, run, self._runs)
        except (UnauthenticatedError, PermissionDeniedError, ResourceExhaustedError) as error:
            self._refusals.note(found.name, call, error.code, run, rank)
            raise
        if call in AUDITED and not self.is_open:
            _log.info("allowed", caller=found.name, call=call, target=run, rank=rank)

    def visible(self, runs: Iterable[str]) -> list[str]:
        """The runs that the current caller may know of."""
        found = caller.current()
        return [run for run in runs if found.sees(run)]


class _CallersFile:
    """Read again when it changes. One that became unreadable leaves who was known before."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._version = self._look()
        self._callers = read_callers(path)

    def callers(self) -> Callers:
        version = self._look()
        if version != self._version:
            with self._lock:
                if version != self._version:
                    self._version = version
                    self._read()
        return self._callers

    def _read(self) -> None:
        try:
            self._callers = read_callers(self._path)
            _log.info("tokens read", file=str(self._path), tokens=len(self._callers.tokens))
        except GristmillError as error:
            _log.error("tokens cannot be read; the ones before stay valid", reason=str(error))

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        # Also when its mode was changed, or its content together with its time.
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
