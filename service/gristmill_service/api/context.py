"""The parts of the service that both APIs use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.gate import Gate
from gristmill_service.api.admission import Admission
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.monitoring.views.tokens import TokenTexts
from gristmill_service.off_loop import OneByOne
from gristmill_service.run.runs import Runs


@dataclass(slots=True)
class ApiContext:
    """The parts of the service that calls use.

    host_names: patterns of host names of the HTTP API. not_ready: why the service accepts no new work; empty if ready.
    encode_groups: encodes lists of groups in parts, because encoding is slow in Python. grpc_address: the address of
    this process. token_texts: the texts of tokens; None without a tokenizer. started: when this process started, in
    seconds since 1970. run_store: see `Settings.run_place`.
    """

    runs: Runs
    admission: Admission
    long_poll: LongPoll
    metrics: Metrics
    max_message_bytes: int
    gate: Gate
    host_names: Sequence[str] = ()
    encode_groups: OneByOne = field(default_factory=OneByOne)
    not_ready: str = "starting"
    grpc_address: str = ""
    token_texts: TokenTexts | None = None
    started: float = field(default_factory=time.time)
    run_store: str = ""

    def unhealthy_reason(self) -> str:
        """Returns why the service is not ready; empty if it is."""
        return self.not_ready or self.runs.unhealthy_reason()

    def refuse_too_large(self, size: int) -> None:
        """Raises ResourceExhaustedError if a request of this size exceeds the limit."""
        if size > self.max_message_bytes:
            raise ResourceExhaustedError(
                f"the request has {size} bytes, and max_message_bytes is {self.max_message_bytes}; send fewer rows per "
                "request, or raise max_message_bytes"
            )
