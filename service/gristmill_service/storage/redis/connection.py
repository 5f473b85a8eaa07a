"""Connects to Redis or Valkey: a single server, sentinels or a cluster, plain or over TLS.

Defines the form of `redis_url`, the timeouts, and the conversion of Redis' errors. Commands are not retried here: a
caller that appends to a log must know that an outcome is unknown (`outcome_unknown`), and retry safely. Redirects
within a cluster are followed, because a node that redirects has not executed the command.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from gristmill.errors import FailedPreconditionError, GristmillError, InvalidArgumentError, UnavailableError
from gristmill_service.settings import split_address

Address = tuple[str, int]


class Sentinels(Sentinel):
    """Finds the master. Queries all sentinels and uses the newest configuration, because an isolated sentinel may still
    name a former master. Thread-safe.

    nodes: for each sentinel, the clients to try in order until a login succeeds.
    """

    def __init__(self, nodes: Sequence[Sequence[redis.Redis]], **options: Any) -> None:
        cast(Any, super()).__init__([], sentinel_kwargs={}, **options)
        self.sentinels = [client for clients in nodes for client in clients]
        self._nodes = [list(clients) for clients in nodes]
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._found: Address | redis.RedisError

    def discover_master(self, service_name: str) -> Address:
        """Returns the master's address. Raises MasterNotFoundError if no sentinel knows a master that is up, and
        AuthenticationError if all sentinels reject the login."""
        called_at = time.monotonic()
        with self._lock:
            # Concurrent new connections share an answer that was requested after all of them started.
            if self._asked_at < called_at:
                self._asked_at = time.monotonic()
                self._found = self._ask_all(service_name)
            if isinstance(self._found, redis.RedisError):
                raise type(self._found)(*self._found.args)
            return self._found

    def _ask_all(self, service_name: str) -> Address | redis.RedisError:
        answers, errors = list[tuple[int, Address | None]](), list[redis.RedisError]()
        for clients in self._nodes:
            try:
                answers.append(_ask(clients, service_name))
            except redis.RedisError as error:
                errors.append(error)
        newest = max((epoch for epoch, _ in answers), default=0)
        for epoch, address in answers:
            if epoch == newest and address is not None:
                return address
        if errors and not answers and all(isinstance(error, redis.AuthenticationError) for error in errors):
            return redis.AuthenticationError(f"by its sentinels: {errors[0]}")
        reasons = "; ".join(map(str, errors)) or "it is down"
        return MasterNotFoundError(f"No master found for {service_name!r}: {reasons}")


def _ask(clients: list[redis.Redis], service_name: str) -> tuple[int, Address | None]:
    """Returns the epoch and the master's address from one sentinel; the address is None if the master is down."""
    for client in clients:
        pipeline: Any = client.pipeline(transaction=False)
        pipeline.execute_command("SENTINEL MASTER", service_name)
        pipeline.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", service_name)
        try:
            state, address = pipeline.execute()
        except redis.AuthenticationError:
            if client is clients[-1]:
                raise
            continue
        if client is not clients[0]:
            clients.remove(client)
            clients.insert(0, client)
        host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in address)
        is_up = state["is_master"] and not state["is_sdown"] and not state["is_odown"]
        # During a failover, a sentinel already names the new master, with the state of the former one.
        is_heir = (host, int(port)) != (state["ip"], state["port"])
        return int(state["config-epoch"]), (host, int(port)) if is_up or is_heir else None
    raise AssertionError("a sentinel has a client")


Client = redis.Redis | redis.RedisCluster

CONNECT_TIMEOUT_S = 2.0
SOCKET_TIMEOUT_S = 5.0
"""The timeout of one read, and of one complete write. Commands must have at most some MiB, and block for less."""
SENTINEL_TIMEOUT_S = 1.0

_CONNECT_RETRIES = 3
# More than the number of the service's threads, so that no thread waits for a connection.
_MAX_CONNECTIONS = 1024
# A connection that was idle for longer is checked with PING before the next command.
_HEALTH_CHECK_INTERVAL_S = 30
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}

_FORMS = (
    "redis://HOST:PORT[/DB], redis+sentinel://HOST:PORT,HOST:PORT/NAME[/DB] or redis+cluster://HOST:PORT,HOST:PORT; "
    "rediss instead of redis for TLS"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """The address and credentials of Redis. Its string form contains no secrets."""

    url: str
    """One of the forms above, with USER:PASSWORD@ before the first host unless they are set separately."""
    username: str | None = None
    password: str | None = None
    """The password. This and the user name take precedence over those in the URL."""
    ca_file: Path | None = None
    """The CA certificate that signed the server's certificate, if the machine does not already trust it."""

    def __repr__(self) -> str:
        return f"RedisAddress({self})"

    def __str__(self) -> str:
        shown = self.url.rpartition("@")[2]
        scheme, separator, _ = self.url.partition("://")
        return f"{scheme}{separator}{shown}" if separator and shown != self.url else shown


@dataclass(frozen=True, slots=True, repr=False)
class _Target:
    kind: Literal["", "sentinel", "cluster"]
    tls: bool
    nodes: list[tuple[str, int]]
    service: str
    database: int
    username: str | None
    password: str | None


def connect(address: RedisAddress) -> Client:
    """Returns a thread-safe client, which the caller must close. Replies are bytes.

    Raises InvalidArgumentError for an invalid `redis_url`, UnavailableError if the server is unreachable, and
    FailedPreconditionError if it rejects the login.
    """
    target = _parse(address)
    options = _options(target, address.ca_file)
    with translated(f"{address}", "check redis_url, or retry"):
        if target.kind == "cluster":
            return _connect_cluster(target, options)
        client = _connect_master(target, options) if target.kind == "sentinel" else _connect_alone(target, options)
        try:
            client.ping()
        except BaseException:
            client.close()
            raise
        return client


@contextmanager
def translated(where: Client | str, remedy: str = "retry") -> Iterator[None]:
    """Converts Redis' errors to gristmill's, which name the server and a remedy. The original error is the cause.

    UnavailableError: a retry may help. FailedPreconditionError: the settings or the server must change first.
    """
    try:
        yield
    except REDIS_ERRORS as error:
        raise _translation(error, where, remedy) from error


def outcome_unknown(error: BaseException) -> bool:
    """Returns whether a failed command may nevertheless have been executed, or may be later; True if in doubt.

    error: an error of Redis, or its conversion, from a command on keys of one slot. A script that fails midway returns
    an error, so its outcome is known.
    """
    cause = error.__cause__ if isinstance(error, GristmillError) else error
    if isinstance(cause, _NEVER_SENT):
        return False
    if isinstance(cause, exceptions.RedisClusterException):
        return True  # also raised if a command's connection broke, and then no node answered
    is_silent = isinstance(cause, exceptions.ConnectionError | exceptions.TimeoutError)
    return is_silent and _CONNECTING.match(str(cause)) is None


REDIS_ERRORS = (redis.RedisError, exceptions.RedisClusterException)

_CONNECTING = re.compile(r"(Error( -?\d+)?|Timeout) connecting to ")
_NEVER_SENT = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.BusyLoadingError,
    exceptions.MaxConnectionsError,
    exceptions.SlotNotCoveredError,
    MasterNotFoundError,
)


def _parse(address: RedisAddress) -> _Target:
    scheme, separator, rest = address.url.partition("://")
    base, _, kind = scheme.partition("+")
    if not separator or base not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
        # The URL is not shown, because it may contain a password.
        raise InvalidArgumentError(f"redis_url has no known scheme; set it to {_FORMS}")
    # Splits at the last @, so that a password may contain @ / ? and #, where redis-py's from_url would split it.
    userinfo, _, location = rest.rpartition("@")
    username, _, password = userinfo.partition(":")
    hosts, _, path = location.partition("/")

    def wrong(reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"redis_url {address} is invalid: {reason}; set it to {_FORMS}")

    if "?" in location or "#" in location:
        raise wrong("options after ? or # are not supported")
    nodes = [_split_node(node, 26379 if kind == "sentinel" else 6379) for node in hosts.split(",")]
    if None in nodes:
        raise wrong(f"{hosts.split(',')[nodes.index(None)]!r} is not HOST:PORT with a port of 1..65535")
    if kind == "" and len(nodes) > 1:
        raise wrong("several hosts are allowed only with redis+sentinel:// and redis+cluster://")
    service, _, database = path.partition("/") if kind == "sentinel" else ("", "", path)
    if kind == "sentinel" and not service:
        raise wrong("the NAME of the sentinels' master is missing")
    if database and not (database.isascii() and database.isdigit()):
        raise wrong(f"{database!r} is not the number of a database")
    if kind == "cluster" and int(database or 0) != 0:
        raise wrong("a cluster has only database 0")
    if address.ca_file is not None and base != "rediss":
        raise InvalidArgumentError(f"redis_ca_file is set, but redis_url {address} is not for TLS; use rediss")
    if address.ca_file is not None and not address.ca_file.is_file():
        raise InvalidArgumentError(f"redis_ca_file {address.ca_file} does not exist; set it to a PEM file")
    return _Target(
        kind=cast(Literal["", "sentinel", "cluster"], kind),
        tls=base == "rediss",
        nodes=[node for node in nodes if node is not None],
        service=unquote(service),
        database=int(database or 0),
        username=address.username or unquote(username) or None,
        password=address.password or unquote(password) or None,
    )


def _split_node(text: str, default_port: int) -> tuple[str, int] | None:
    if text and ":" not in text.rpartition("]")[2]:
        text = f"{text}:{default_port}"
    try:
        host, port = split_address(text)
    except ValueError:
        return None
    return (host, port) if port and not re.search(r"[\s/]", host) else None


def _options(target: _Target, ca_file: Path | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "username": target.username,
        "password": target.password,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_keepalive": True,
        "socket_keepalive_options": _KEEPALIVE,
        "health_check_interval": _HEALTH_CHECK_INTERVAL_S,
        "max_connections": _MAX_CONNECTIONS,
        # With this protocol, replies have the same form in all versions of the library and the server.
        "protocol": 2,
        "decode_responses": False,
    }
    if target.tls:
        options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        if ca_file is not None:
            options["ssl_ca_certs"] = str(ca_file)
    return options


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def _connect_alone(target: _Target, options: dict[str, Any]) -> redis.Redis:
    ((host, port),) = target.nodes
    return redis.Redis(host=host, port=port, db=target.database, retry=_once(), **options)


class _Master(redis.Redis):
    """A client of the master, which each new connection requests from the sentinels. Closing it also closes the
    connections to the sentinels."""

    def close(self) -> None:
        super().close()
        for sentinel in cast(SentinelConnectionPool, self.connection_pool).sentinel_manager.sentinels:
            sentinel.close()


def _connect_master(target: _Target, options: dict[str, Any]) -> redis.Redis:
    without_login = {name: value for name, value in options.items() if name not in ("username", "password")}
    # Sentinels may need the same password or none, and reject an unneeded password, so both ways are tried.
    ways = [without_login] if target.password is None else [options, without_login]
    timeouts = {"socket_connect_timeout": SENTINEL_TIMEOUT_S, "socket_timeout": SENTINEL_TIMEOUT_S, "retry": _once()}
    nodes = [[redis.Redis(host, port, **way | timeouts) for way in ways] for host, port in target.nodes]
    manager = cast(Any, Sentinels(nodes, **options))
    master: redis.Redis = manager.master_for(target.service, redis_class=_Master, db=target.database, retry=_once())
    return master


def watched_master(client: Client) -> tuple[str, int] | None:
    """Returns the current master according to the sentinels; None without sentinels. Closes connections to a former
    master.

    Raises MasterNotFoundError of redis-py.
    """
    pool = None if isinstance(client, redis.RedisCluster) else client.connection_pool
    return cast(Any, pool).get_master_address() if isinstance(pool, SentinelConnectionPool) else None


def _connect_cluster(target: _Target, options: dict[str, Any]) -> redis.RedisCluster:
    client = redis.RedisCluster(
        startup_nodes=[cast(Any, ClusterNode)(host, port) for host, port in target.nodes],
        # The constructor sends a command to one primary, which may be down while the others are served.
        retry=Retry(NoBackoff(), _CONNECT_RETRIES),
        # Each redirect reloads the slot map.
        reinitialize_steps=1,
        **options,
    )
    client.set_retry(_once())
    return client


def is_full(error: BaseException | None) -> bool:
    """Returns whether Redis rejected a command because its memory is full."""
    return isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error)


def server_of(client: Client, key: str) -> redis.Redis:
    """Returns the server that has the key, according to the client's slot map."""
    if isinstance(client, redis.RedisCluster):
        return client.get_redis_connection(cast(Any, client).get_node_from_key(key))
    return client


def _translation(error: Exception, where: Client | str, remedy: str) -> GristmillError:
    place, text = where if isinstance(where, str) else described(where), str(error).removesuffix(".")
    # In a cluster, only the chain of causes contains the reason why no node answered.
    reasons = [error]
    while isinstance(error, exceptions.RedisClusterException) and (
        reason := reasons[-1].__cause__ or reasons[-1].__context__
    ):
        reasons.append(cast(Exception, reason))
    for reason in reasons:
        if refusal := _refusal(reason, str(reason).removesuffix("."), isinstance(where, redis.RedisCluster)):
            return FailedPreconditionError(f"Redis at {place} {refusal}")
    if is_full(error):
        return UnavailableError(
            f"Redis at {place} is out of memory: {text}; raise its maxmemory, or free memory by committing batches and "
            "deleting runs, and retry"
        )
    if isinstance(error, _PASSING) or _PASSING_CODES.search(text):
        return UnavailableError(f"Redis at {place}: {text}; {remedy}")
    return FailedPreconditionError(
        f"Redis at {place} refuses a command: {text}; check the keys under redis_prefix, and make sure that no other "
        "program writes there"
    )


def _refusal(error: Exception, text: str, is_cluster: bool) -> str:
    """Returns why the server rejects the client permanently; empty if it does not."""
    if isinstance(error, _REFUSED):
        return f"refused the login: {text}; check redis_url, or redis_username and redis_password"
    if isinstance(error, exceptions.NoPermissionError) or "The user executing the script can't" in text:
        return f"forbids a command: {text}; grant it to the user of redis_url with ACL SETUSER"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"has a certificate that is not trusted: {text}; set redis_ca_file to its CA certificate, and use the "
            "certificate's host name in redis_url"
        )
    if isinstance(error, exceptions.AskError) and not is_cluster:
        return "is a node of a cluster; start redis_url with redis+cluster://"
    if "Cluster mode is not enabled" in text:
        return "is not a cluster; start redis_url with redis://"
    return ""


_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)
_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.TryAgainError,
    exceptions.AskError,
    exceptions.ReadOnlyError,
)
# Errors without a class in redis-py, and errors within a script, which are quoted in the script's error.
_PASSING_CODES = re.compile(
    r"(?:^|-)(?:MISCONF|NOREPLICAS|BUSY|UNBLOCKED|READONLY|CLUSTERDOWN|TRYAGAIN|MASTERDOWN|LOADING) "
)


def described(client: Client) -> str:
    """Returns the address to which the client connects, without secrets."""
    if isinstance(client, redis.RedisCluster):
        return ", ".join(sorted(client.nodes_manager.startup_nodes))
    pool = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        known = (sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels)
        sentinels = sorted({f"{options['host']}:{options['port']}" for options in known})
        return f"{pool.service_name} of the sentinels {', '.join(sentinels)}"
    return f"{pool.connection_kwargs['host']}:{pool.connection_kwargs['port']}"
