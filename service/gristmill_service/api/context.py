"""The parts of the service that both doors stand on. No word of gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill._wire.codecs.row_codec import Sent
from gristmill.errors import InvalidArgumentError, ResourceExhaustedError
from gristmill_service.access.gate import Gate
from gristmill_service.api.long_poll import LongPoll
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.monitoring.views.token_texts import TokenTexts
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.run import Run
from gristmill_service.run.runs import Runs


@dataclass(slots=True)
class ApiContext:
    """host_names: patterns of names that lead to the HTTP API. not_ready: why new work should go elsewhere; empty when
    ready. grpc_address: where this process takes gRPC calls. token_texts: what tokens say; None without a tokenizer."""

    runs: Runs
    long_poll: LongPoll
    metrics: Metrics
    max_message_bytes: int
    gate: Gate
    host_names: Sequence[str] = ()
    not_ready: str = "starting"
    grpc_address: str = ""
    token_texts: TokenTexts | None = None

    def unhealthy_reason(self) -> str:
        """Why the service is not ready; empty when it is."""
        return self.not_ready or self.runs.unhealthy_reason()

    def submit(self, run: Run, sent: Sent) -> list[Outcome]:
        """Submits rows as they came over the wire, which may lack what the service has already."""
        # As if they had come whole: what a few bytes ask for must not be more than a request may be.
        size = 0 if sent.prefixes is None else 4 * int(sent.steps.tokens.total + sent.prefixes.lengths.sum())
        if size > self.max_message_bytes:
            raise InvalidArgumentError(
                f"the rows' tokens and prefixes have {size} bytes together, and max_message_bytes is "
                f"{self.max_message_bytes}; send fewer rows a request, or raise the setting"
            )
        return run.submit(run.checked(sent), sent.prefixes, self.gate.quota())

    def refuse_too_large(self, size: int) -> None:
        """Raises ResourceExhaustedError for a request of so many bytes, when that is beyond the limit."""
        if size > self.max_message_bytes:
            raise ResourceExhaustedError(
                f"the request has {size} bytes and max_message_bytes is {self.max_message_bytes}; send fewer rows a "
                "request, or raise the setting"
            )
