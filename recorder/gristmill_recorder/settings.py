"""The settings of a recorder: names, defaults and checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ByteSize, Field, PositiveInt, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gristmill._wire.browsers import checked_patterns
from gristmill._wire.hosts import is_of_this_machine
from gristmill_recorder.columns import NAMES, names_of
from gristmill_recorder.engines.names import ENGINES

ENVIRONMENT_PREFIX = "GRISTMILL_RECORD_"
# Scheme, host and port in lower case, as browsers send it.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*,\sA-Z]+")


class RecorderSettings(BaseSettings):
    """The settings of a recorder. A setting without an argument is read from the environment variable with the prefix
    and its name."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True
    )

    upstream: str = Field(description="The engine's URL, without the /v1: http://vllm:8000.")
    engine: Literal["vllm", "sglang", "dynamo", "llamacpp"] = Field("vllm", description="The engine at --upstream.")
    splice: Literal["off", "on", "verify"] = Field(
        "off",
        description="on: send a call that continues a recorded conversation as the recorded tokens and the new "
        "messages, so that the conversation is one row. verify: send it unchanged, and count differences.",
    )
    whole_answers: bool = Field(
        False,
        description="Request whole chat completions where the agent streams, and stream them when they are complete: "
        "for engines whose reasoning parser misreads streamed thoughts.",
    )
    address: str = Field(
        "127.0.0.1:50051",
        description="The service's address: HOST:PORT, unix:/PATH, or addresses of replicas separated by commas.",
    )
    http_address: str = Field(
        "127.0.0.1:8090", description="HOST:PORT on which the recorder serves agents; port 0 picks a free port."
    )
    insecure: bool = Field(
        False,
        description="Allow an http_address beyond this machine. Anyone who can reach it can record and end "
        "trajectories.",
    )
    http_host_names: str = Field(
        "",
        description="Additional host names of the recorder, or patterns such as *.example.org, separated by commas. "
        "Requests for other hosts are refused, because a web page may send them. IP addresses, this machine's names "
        "and names of private networks (recorder, NAME.local, NAME.internal, NAME.svc) are always accepted.",
    )
    allowed_origins: str = Field(
        "",
        description="The origins of web pages whose agents may call, such as https://agents.example, separated by "
        "commas. Calls of all other pages are refused.",
    )
    end_token_file: Path | None = Field(
        None,
        description="A file with a token that finish and abort require, so that agents, which do not have it, cannot "
        "end their trajectories themselves. It is read at the start.",
    )
    journal: Path = Field(
        Path("gristmill-record.sqlite3"),
        description="The file that stores steps until the service has them. It must be on a local disk.",
    )
    logprobs: bool = Field(True, description="Whether rows have logprobs: all rows of a run have them, or none.")
    trainer_temperature: float | None = Field(
        None,
        gt=0,
        description="The temperature at which the trainer computes logprobs. Steps with other sampling settings "
        "(temperature, top-p, penalties, a grammar) get loss_mask 0. Without it all steps are trained.",
    )
    columns: str = Field(
        "",
        description="The columns that rows get from answers, separated by commas: conversation, sampling, "
        "sampling_mask, routed_experts, prompt_logprobs, images. The run must declare them.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(64 << 20), gt=0, description="Limit of a request, and of an answer, in bytes or as 64MiB."
    )
    max_in_flight_bytes: ByteSize = Field(
        ByteSize(2 << 30),
        gt=0,
        description="Limit of the requests and answers in memory, in bytes; requests alone take half of it. Further "
        "calls must be retried.",
    )
    max_calls: PositiveInt = Field(4096, description="Limit of concurrent calls. Further calls must be retried.")
    max_row_bytes: ByteSize = Field(
        ByteSize(4 << 30),
        gt=0,
        description="Limit of steps that wait for the service, in bytes. Further calls must be retried.",
    )
    connect_timeout_s: float = Field(10.0, gt=0, description="Seconds for opening a connection to the engine.")
    silence_timeout_s: float = Field(
        1800.0, gt=0, description="Seconds without a byte from the engine after which a call fails."
    )
    finish_wait_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that finish waits for the service. The end is journaled, and delivered later if needed.",
    )
    idle_abort_s: float = Field(
        21600.0, gt=0, description="Seconds without a call after which an open trajectory is aborted."
    )
    keep_closed_s: float = Field(
        86400.0,
        gt=0,
        description="Seconds that the journal stores a closed trajectory's outcome, so that finish can be retried. "
        "Only seconds in which the recorder runs count.",
    )
    shutdown_grace_s: float = Field(
        30.0, ge=0, description="Seconds after SIGTERM for finishing calls and delivering steps."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The lowest level that is logged."
    )
    log_format: Literal["human", "json"] = Field("human", description="human, or json: one object per line.")

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: str) -> str:
        if unknown := sorted({*names_of(columns)} - {*NAMES}):
            raise ValueError(f"there is no column {unknown[0]}; expected some of {', '.join(NAMES)}")
        return columns

    @field_validator("upstream")
    @classmethod
    def _check_upstream(cls, upstream: str) -> str:
        if not upstream.startswith(("http://", "https://")):
            raise ValueError("expected http://HOST:PORT or https://HOST")
        where = urlsplit(upstream)
        if not where.hostname or "@" in where.netloc or where.port == 0 or where.query or where.fragment:
            raise ValueError(
                "expected http://HOST:PORT or https://HOST without credentials or a query: the agents' own keys are "
                "forwarded to the engine"
            )
        return upstream.rstrip("/").removesuffix("/v1")

    _check_host_names = field_validator("http_host_names")(checked_patterns)

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: str) -> str:
        for origin in origins.split(",") if origins else ():
            if not _ORIGIN.fullmatch(origin.strip()):
                raise ValueError("expected origins such as https://agents.example, separated by commas")
        return origins

    @property
    def origins(self) -> frozenset[str]:
        """The origins of `allowed_origins`."""
        return frozenset(origin.strip() for origin in self.allowed_origins.split(",") if origin)

    @field_validator("end_token_file")
    @classmethod
    def _check_end_token(cls, path: Path | None) -> Path | None:
        try:
            token = path.read_text("ascii").strip() if path is not None else "none"
        except OSError as error:
            raise ValueError(f"cannot read it: {error.strerror}") from None
        if not token or not token.isprintable():
            raise ValueError("expected a file with a token, such as 32 random letters")
        return path

    def end_token(self) -> bytes | None:
        """Reads the token in `end_token_file`; None without a file."""
        return None if self.end_token_file is None else self.end_token_file.read_bytes().strip()

    @field_validator("http_address")
    @classmethod
    def _check_http_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError("expected HOST:PORT with a port from 0 to 65535")
        return address

    @model_validator(mode="after")
    def _check_buffers(self) -> RecorderSettings:
        if self.max_in_flight_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_in_flight_bytes is {self.max_in_flight_bytes:d}, and requests, which take half of it, may have "
                f"{self.max_body_bytes:d} (max_body_bytes); raise max_in_flight_bytes, or lower max_body_bytes"
            )
        return self

    @model_validator(mode="after")
    def _check_splice(self) -> RecorderSettings:
        if self.splice != "off" and not ENGINES[self.engine].renderings:
            raise ValueError(
                f"splice is {self.splice}, but {self.engine} has no route that renders conversations; "
                "set --splice off, or start the recorder in front of vLLM or SGLang"
            )
        return self

    @model_validator(mode="after")
    def _check_images(self) -> RecorderSettings:
        if self.engine == "dynamo" and "images" in names_of(self.columns):
            raise ValueError(
                "columns has images, but Dynamo may report a prompt without the tokens of its images; omit images, or "
                "start the recorder in front of vLLM"
            )
        return self

    @model_validator(mode="after")
    def _check_reach(self) -> RecorderSettings:
        if not self.insecure and not is_of_this_machine(self.http_address):
            raise ValueError(
                f"http_address {self.http_address} can be reached from other machines, and a recorder does not "
                "authenticate callers; set --insecure if the network keeps everyone else out"
            )
        return self
