"""The recorder's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gristmill_recorder.rows import Row

_ADDED = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
_CALLS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """All metrics of a recorder. docs/recorder.md describes each.

    row_bytes: of the steps that the service has not acknowledged yet.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "gristmill_recorder", "registry": self.registry}
        self.calls = Counter("calls", "Answered calls by API and status.", ("api", "status"), **shared)
        self.call_seconds = Histogram(
            "call_seconds", "Seconds from a call to the last byte of its answer.", ("api",), buckets=_CALLS, **shared
        )
        self.added_seconds = Histogram(
            "added_seconds", "The recorder's share of call_seconds.", ("api",), buckets=_ADDED, **shared
        )
        self.journal_seconds = Histogram(
            "journal_seconds", "Seconds of one append to the journal.", buckets=_ADDED, **shared
        )
        self.under_way = Gauge("calls_under_way", "Calls in progress.", **shared)
        self.in_flight = Gauge("in_flight_bytes", "Bytes of requests and answers in memory.", **shared)
        self.cut = Counter(
            "cut_calls", "Calls whose connection was lost before they were recorded, by side.", ("side",), **shared
        )
        self.refused = Counter("refused_calls", "Calls that the recorder refused, by reason.", ("reason",), **shared)
        self.steps = Counter("steps", "Recorded steps.", **shared)
        self.tokens = Counter("tokens", "Recorded tokens by kind.", ("kind",), **shared)
        self.unreproducible = Counter(
            "unreproducible_steps",
            "Recorded steps that were sampled with a setting that a trainer cannot reproduce, by setting.",
            ("setting",),
            **shared,
        )
        self.splices = Counter("splices", "Recorded chat completions by the result of splicing.", ("result",), **shared)
        self.splice_differences = Counter(
            "splice_differences",
            "Verified calls by the place where the spliced prompt differs first from the engine's.",
            ("place",),
            **shared,
        )
        self.splice_saved = Counter(
            "splice_saved_tokens",
            "Prompt tokens of verified calls that began a row, and would not with splicing.",
            **shared,
        )
        self.row_bytes = 0
        undelivered = Gauge("row_bytes", "Bytes of steps that the service has not acknowledged yet.", **shared)
        undelivered.set_function(lambda: self.row_bytes)
        self.open = Gauge("open_trajectories", "Trajectories that are not closed.", **shared)
        self.policy_version = Gauge(
            "policy_version", "The last policy version that the recorder received from the service.", ("run",), **shared
        )
        self.closed = Counter("closed_trajectories", "Closed trajectories by outcome.", ("outcome",), **shared)
        self.delivery_failures = Counter(
            "delivery_failures", "Failed submissions to the service, by status code.", ("code",), **shared
        )
        self._prompt, self._response = self.tokens.labels("prompt"), self.tokens.labels("response")

    def recorded(self, rows: Sequence[Row], odd: Sequence[str]) -> None:
        """Counts recorded steps. odd: the settings that a trainer cannot reproduce."""
        for setting in odd:
            self.unreproducible.labels(setting).inc(len(rows))
        for row in rows:
            self.steps.inc()
            self._prompt.inc(len(row.prompt))
            self._response.inc(len(row.response))

    def answered(self, api: str, status: int, took_s: float, engine_s: float) -> None:
        """Counts an answered call, and the recorder's share of its time."""
        self.calls.labels(api, str(status)).inc()
        self.call_seconds.labels(api).observe(took_s)
        self.added_seconds.labels(api).observe(max(0.0, took_s - engine_s))

    def text(self) -> bytes:
        return generate_latest(self.registry)
