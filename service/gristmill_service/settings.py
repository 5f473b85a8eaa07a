"""The service's settings: names, defaults and checks.

Flags override the environment, the environment overrides a file, and the file overrides defaults. Runs have their own
configuration: see `config`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import ByteSize, Field, PositiveInt, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gristmill._wire.browsers import checked_patterns
from gristmill._wire.hosts import is_of_this_machine
from gristmill.errors import InvalidArgumentError

ENVIRONMENT_PREFIX = "GRISTMILL_"
_Kind = TypeVar("_Kind", bound=BaseSettings)
_EVERYWHERE = ("0.0.0.0:", "[::]:", "unix:")


class ShardStoreKind(NamedTuple):
    """A store of shards that settings may name.

    module: imported only if the store is used; its `open_shards(settings, runs)` returns a `ShardStore`.
    run_stores: the compatible run stores.
    directory: the setting that names its directory; empty if it has none. The service reports the free space there,
        and `gristmill doctor` checks it.
    """

    module: str
    run_stores: tuple[str, ...] = ("memory", "journal")
    directory: str = ""


SHARD_STORES = {
    "shared_memory": ShardStoreKind("gristmill_service.storage.shared_memory", directory="shared_memory_dir"),
    "memory": ShardStoreKind("gristmill_service.storage.memory"),
    "redis": ShardStoreKind("gristmill_service.storage.redis.shard_store", run_stores=("redis",)),
}
RunStoreName = Literal["memory", "journal", "redis"]
if TYPE_CHECKING:
    ShardStoreName = str
else:
    ShardStoreName = Literal[tuple(SHARD_STORES)]


def _run_store(settings: dict[str, Any]) -> RunStoreName:
    """Returns the default run store for these settings."""
    if settings.get("store") == "redis":
        return "redis"
    return "memory" if settings.get("journal_dir") is None else "journal"


class Settings(BaseSettings):
    """The settings of a serving process. By default it listens only on this machine.

    A setting that is not an argument is read from the environment, else from the file `config_file`. Other variables
    with the prefix are ignored, because Kubernetes sets some that are named after a service.
    """

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True
    )

    config_file: Path | None = Field(None, description="A YAML file with the settings below.")
    grpc_address: str = Field(
        "127.0.0.1:50051", description="HOST:PORT or unix:/PATH of the gRPC API; port 0 picks a free one."
    )
    http_address: str = Field("127.0.0.1:8080", description="HOST:PORT of the HTTP API; port 0 picks a free one.")
    probe_address: str | None = Field(
        None,
        description="HOST:PORT of another HTTP listener, which serves only /healthz, /readyz and /metrics, also while "
        "the service shuts down. Other machines may reach it without insecure, because it changes nothing; without "
        "tokens it shows them the metrics of all runs. None: only http_address serves these.",
    )
    http_host_names: str = Field(
        "",
        description="Additional host names of the HTTP API, or patterns such as *.example.org, separated by commas. "
        "Without tokens, requests for other hosts are rejected, because a page of another site may send them. IP "
        "addresses, this machine's names and names of private networks (gristmill, NAME.local, NAME.internal, "
        "NAME.svc) are always accepted.",
    )
    store: Literal["shared_memory", "memory", "redis"] = Field(
        "shared_memory",
        description="The default of run_store and shard_store. redis stores both, so that several services can serve "
        "the same runs; shared_memory and memory store shards, and runs are stored in journal_dir, if it is set.",
    )
    journal_dir: Path | None = Field(
        None,
        description="The directory of run_store: journal. Runs stored there survive a restart of the process.",
    )
    run_store: RunStoreName = Field(
        default_factory=_run_store,
        description="Where runs and their rows are stored: memory, journal (files in journal_dir), or redis.",
    )
    shard_store: ShardStoreName = Field(
        default_factory=lambda settings: settings.get("store"),
        description="Where shards are stored: shared_memory (trainers map them), memory (for tests), or redis (any "
        "replica reads them; with run_store: redis).",
    )
    redis_url: str | None = Field(
        None,
        description="redis://HOST:PORT[/DB], redis+sentinel://HOST:PORT,HOST:PORT/NAME or "
        "redis+cluster://HOST:PORT,...; rediss instead of redis for TLS.",
    )
    redis_username: str | None = Field(None, description="The user name for Redis; the URL may contain it instead.")
    redis_password: SecretStr | None = Field(
        None,
        description="The password for Redis. Set it in the environment rather than as a flag, which other users of the "
        "machine can read.",
    )
    redis_ca_file: Path | None = Field(None, description="The CA certificate that signed Redis' certificate.")
    redis_prefix: str = Field("gristmill", pattern=r"^[\w.-]+$", description="The prefix of all keys in Redis.")
    redis_min_replicas: int = Field(
        0,
        ge=0,
        le=16,
        description="How many replicas of Redis must confirm a change before the service answers; 0: only the master.",
    )
    redis_wait_aof: bool = Field(
        False,
        description="Whether Redis and these replicas must also write a change to disk; needs Redis 7.2.",
    )
    lease_s: float = Field(
        3.0,
        ge=0.5,
        le=60,
        description="Seconds without a sign of life from a run's owner after which another service takes over.",
    )
    advertise_grpc_address: str | None = Field(
        None, description="The address at which other services reach this one's gRPC API. None: grpc_address."
    )
    advertise_http_url: str | None = Field(
        None, description="The URL at which other services reach this one's HTTP API. None: derived from http_address."
    )
    shared_memory_dir: Path = Field(Path("/dev/shm"), description="The tmpfs that shared_memory writes to.")  # noqa: S108
    journal_fsync: Literal["always", "interval", "never"] = Field(
        "interval",
        description="When the journal is synced to disk, so that it also survives a crash of the machine: always "
        "(before each answer), interval (every second), never.",
    )
    max_message_bytes: ByteSize = Field(
        ByteSize(64 << 20),
        gt=0,
        # Rows of a message are one value in SQLite, which may have 10^9 bytes.
        le=900_000_000,
        description="The largest message, compressed or not (64MiB, 256MiB, or bytes), at most 900 MB.",
    )
    max_row_bytes: ByteSize = Field(
        ByteSize(8 << 30),
        gt=0,
        description="The bytes of rows that all runs together may store; at the limit, workers wait.",
    )
    max_runs: PositiveInt = Field(4096, description="The maximum number of runs.")
    max_run_groups: PositiveInt | None = Field(
        None, description="Prompt groups that a run may store, open or in batches that are not freed. None: no limit."
    )
    max_run_rows: PositiveInt | None = Field(None, description="Rows that a run may store. None: no limit.")
    max_run_row_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="Bytes of rows that a run may store, regardless of its max_buffered_bytes. None: no limit.",
    )
    max_run_requests: PositiveInt | None = Field(
        None,
        description="Concurrent calls for a run, including waiting calls; allow a few for each of its workers and "
        "ranks. None: no limit.",
    )
    max_waiters: PositiveInt = Field(
        512,
        description="How many calls may wait at a time. Further calls are answered at once.",
    )
    max_streams: PositiveInt = Field(
        256,
        description="How many streaming gRPC calls, such as ReadShard, may be open; further callers must retry.",
    )
    tokenizer: Path | None = Field(
        None,
        description="The tokenizer.json of the trained models, or its directory, for the page to show tokens as text. "
        "Needs the extra [tokenizer]. None: the page shows token ids.",
    )
    tokens_file: Path | None = Field(
        None,
        description="A YAML file of tokens and their roles (`gristmill token create` writes it), reloaded when it "
        "changes. None: every caller may do everything.",
    )
    jwks: str | None = Field(
        None,
        description="The keys that verify callers' JSON web tokens, such as those of Kubernetes service accounts: a "
        "file or a URL. tokens_file contains the roles of their subjects.",
    )
    jwks_ca_file: Path | None = Field(
        None, description="The CA certificate for the host of the jwks URL. None: public authorities."
    )
    jwt_issuer: str | None = Field(None, description="The issuer that JSON web tokens must have (iss).")
    jwt_audience: str | None = Field(None, description="The audience that JSON web tokens must have (aud).")
    proxy_user_header: str | None = Field(
        None,
        pattern="^[A-Za-z0-9-]+$",
        description="The header in which a proxy in front of the HTTP API sends the name of the signed-in user, such "
        "as X-Forwarded-User. The proxy must remove this header from clients' requests. tokens_file contains the "
        "users' roles, under proxy_users.",
    )
    proxy_addresses: str = Field(
        "127.0.0.1,::1",
        description="The addresses or networks of the proxy, separated by commas. The header is ignored in requests "
        "from other addresses.",
    )
    tls_cert_file: Path | None = Field(
        None, description="The certificate (chain) of both APIs, PEM; reloaded when it changes."
    )
    tls_key_file: Path | None = Field(None, description="The private key of the certificate, PEM.")
    tls_client_ca_file: Path | None = Field(
        None,
        description="The CA certificate that must have signed the certificate of every client. None: clients need no "
        "certificate.",
    )
    tls_peer_ca_file: Path | None = Field(
        None,
        description="The CA certificate that signed the other services' certificates. None: the CAs that gRPC trusts "
        "by default.",
    )
    insecure: bool = Field(
        False,
        description="Accept connections from other machines without TLS and tokens. Anyone who reaches a port can then "
        "read, change and delete every run.",
    )
    shutdown_grace_s: float = Field(
        30.0,
        ge=0,
        description="After SIGTERM, the seconds to wait for batches in construction and calls in progress to finish.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The minimum level that is logged."
    )
    log_format: Literal["human", "json"] = Field("human", description="human, or json: one object per line.")
    announce: Path | None = Field(
        None,
        description="A file to which the service writes its addresses as JSON when it is ready; removed at shutdown.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _ConfigFile(settings_cls)

    @model_validator(mode="after")
    def _check_stores(self) -> Settings:
        """Rejects combinations of stores, and of stores and their settings, that do not work."""
        if self.journal_dir is not None and self.run_store != "journal":
            raise ValueError(
                f"journal_dir conflicts with run_store: {self.run_store}, which stores runs elsewhere; set one of them"
            )
        if self.run_store == "journal" and self.journal_dir is None:
            raise ValueError("run_store: journal needs journal_dir, which is not set; set it to a directory")
        if (self.run_store == "redis") != (self.redis_url is not None):
            raise ValueError("redis_url must be set exactly if store or run_store is redis; set both, or neither")
        run_stores = SHARD_STORES[self.shard_store].run_stores
        if self.run_store not in run_stores:
            raise ValueError(
                f"shard_store: {self.shard_store} needs run_store: {' or '.join(run_stores)}, got {self.run_store}: "
                "replicas that share runs in Redis read each other's shards there, and a lease in Redis decides which "
                "replica publishes; change one of them"
            )
        for name, listens, advertised in (
            ("advertise_grpc_address", self.grpc_address, self.advertise_grpc_address),
            ("advertise_http_url", self.http_address, self.advertise_http_url),
        ):
            if self.run_store == "redis" and advertised is None and listens.startswith(_EVERYWHERE):
                raise ValueError(
                    f"{name} is required with run_store: redis, because other services cannot reach this one at "
                    f"{listens}; set it to an address that they can reach"
                )
        if self.run_store != "redis" and (self.redis_min_replicas or self.redis_wait_aof):
            raise ValueError("redis_min_replicas and redis_wait_aof work only with run_store: redis; leave them out")
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Settings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file must be set together; set both, or neither")
        if self.tls_cert_file is None and (self.tls_client_ca_file or self.tls_peer_ca_file):
            raise ValueError("tls_client_ca_file and tls_peer_ca_file need tls_cert_file and tls_key_file; set both")
        if self.jwks is None and (self.jwt_issuer or self.jwt_audience or self.jwks_ca_file):
            raise ValueError("jwt_issuer, jwt_audience and jwks_ca_file need jwks, which is not set; set jwks")
        if self.jwks is not None and not (self.tokens_file and self.jwt_issuer and self.jwt_audience):
            raise ValueError("jwks needs jwt_issuer, jwt_audience, and tokens_file with the subjects' roles; set them")
        if self.proxy_user_header is not None and self.tokens_file is None:
            raise ValueError("proxy_user_header needs tokens_file with the users' roles; set tokens_file")
        is_safe = self.tls_cert_file is not None and self.tokens_file is not None
        for name in ("grpc_address", "http_address"):
            address = getattr(self, name)
            if not is_safe and not self.insecure and not is_of_this_machine(address):
                raise ValueError(
                    f"{name}: other machines can reach {address}, so the service needs tls_cert_file, tls_key_file and "
                    "tokens_file; set them, or set insecure if every machine on the network is trusted"
                )
        return self

    @model_validator(mode="after")
    def _check_probes(self) -> Settings:
        is_encrypted = self.tokens_file is None or self.tls_cert_file is not None or self.insecure
        if self.probe_address is not None and not is_encrypted and not is_of_this_machine(self.probe_address):
            raise ValueError(
                f"probe_address: other machines can reach {self.probe_address}, and scrapers would send their tokens "
                "unencrypted; set tls_cert_file and tls_key_file, or set insecure if the network is trusted"
            )
        return self

    @property
    def run_place(self) -> str:
        """Where runs are stored: memory, journal and its directory, or redis."""
        return f"{self.run_store} {self.journal_dir}" if self.run_store == "journal" else self.run_store

    @property
    def store_directories(self) -> dict[str, Path]:
        """The directories of the run store and the shard store, by their settings' names."""
        directories = {"journal": self.journal_dir}
        if name := SHARD_STORES[self.shard_store].directory:
            directories[self.shard_store] = getattr(self, name)
        return {name: path for name, path in directories.items() if path is not None}

    _check_host_names = field_validator("http_host_names")(checked_patterns)

    @field_validator("grpc_address", "http_address", "probe_address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None and not address.startswith("unix:"):
            split_address(address)
        return address

    @field_validator("advertise_http_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        # urlsplit may raise ValueError itself.
        if url is not None and ((parts := urlsplit(url)).scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("not a URL of an HTTP server; set http://HOST:PORT or https://HOST:PORT")
        return url

    @field_validator("proxy_addresses")
    @classmethod
    def _check_networks(cls, addresses: str) -> str:
        for address in addresses.split(","):
            ip_network(address.strip())
        return addresses

    @field_validator("http_address", "probe_address")
    @classmethod
    def _check_http_address(cls, address: str | None) -> str | None:
        if address is not None and address.startswith("unix:"):
            raise ValueError("only grpc_address may be a unix socket; set HOST:PORT")
        return address


def split_address(address: str) -> tuple[str, int]:
    """Splits `HOST:PORT` into host and port. An IPv6 host must be in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected HOST:PORT with a port of 0..65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _ConfigFile(PydanticBaseSettingsSource):
    """The settings in the file `config_file`, which an argument or the environment names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read as a whole")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config_file")
        return {} if path is None else _read_file(Path(path))


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Returns settings from flags (None: not set), the environment and the file.

    Raises InvalidArgumentError that names the setting, its source, its value and the expected value.
    """
    return load(Settings, flags)


def load(kind: type[_Kind], flags: Mapping[str, Any]) -> _Kind:
    """Returns settings of the class `kind`, like `load_settings`."""
    values = {name: value for name, value in flags.items() if value is not None}
    try:
        return kind(**values)
    except ValidationError as error:
        # A default that depends on invalid settings is not reported.
        wrong = (item for item in error.errors() if item["type"] != "default_factory_not_called")
        raise InvalidArgumentError("; ".join(_explain(item, values, kind) for item in wrong)) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"{path}: cannot read the settings: {error}; pass a YAML file") from None
    if mapping is None:
        return {}
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping):
        raise InvalidArgumentError(
            f"{path}: expected a mapping of settings, got {type(mapping).__name__}; write NAME: VALUE per setting"
        )
    return mapping


def _explain(error: ErrorDetails, flags: Mapping[str, Any], kind: type[BaseSettings]) -> str:
    reason = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        # Several settings conflict. Their values may include a secret, so they are not shown.
        return reason
    name = str(error["loc"][0])
    flag = "--" + name.replace("_", "-")
    variable = kind.model_config.get("env_prefix", "") + name.upper()
    if error["type"] == "missing":
        meaning = (kind.model_fields[name].description or "").rstrip(".")
        return f"{name} is required; set {flag} or {variable}: {meaning}"
    origin = flag if name in flags else variable if os.environ.get(variable) else _file(flags)
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown setting {name}; expected one of {', '.join(kind.model_fields)}"
    is_secret = kind.model_fields[name].annotation == SecretStr | None
    given = str(error["input"]) if isinstance(error["input"], Path) else error["input"]
    value = "" if is_secret else f" is {given!r}"
    return f"{origin}: {name}{value}: {reason[:1].lower()}{reason[1:]}"


def _file(flags: Mapping[str, Any]) -> str:
    """Returns the path of the settings file."""
    return str(flags.get("config_file") or os.environ[ENVIRONMENT_PREFIX + "CONFIG_FILE"])
