"""The recorder's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gristmill_recorder.rows import Row

_ADDED = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
_CALLS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RowBytes:
    """total: bytes of the steps that the service has not acknowledged yet."""

    total = 0


class Metrics:
    """All metrics of a recorder. docs/recorder.md describes each."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def name(of: str) -> str:
            return f"gristmill_recorder_{of}"

        self.calls = Counter(name("calls"), "Answered calls by API and status.", ("api", "status"), registry=registry)
        self.call_seconds = Histogram(
            name("call_seconds"),
            "Seconds from a call to the last byte of its answer.",
            ("api",),
            buckets=_CALLS,
            registry=registry,
        )
        self.added_seconds = Histogram(
            name("added_seconds"), "The recorder's share of call_seconds.", ("api",), buckets=_ADDED, registry=registry
        )
        self.journal_seconds = Histogram(
            name("journal_seconds"), "Seconds of one append to the journal.", buckets=_ADDED, registry=registry
        )
        self.under_way = Gauge(name("calls_under_way"), "Calls in progress.", registry=registry)
        self.cut = Counter(
            name("cut_calls"),
            "Calls whose connection was lost before they were recorded, by side.",
            ("side",),
            registry=registry,
        )
        self.refused = Counter(
            name("refused_calls"), "Calls that the recorder refused, by reason.", ("reason",), registry=registry
        )
        self.steps = Counter(name("steps"), "Recorded steps.", registry=registry)
        self.tokens = Counter(name("tokens"), "Recorded tokens by kind.", ("kind",), registry=registry)
        self.unreproducible = Counter(
            name("unreproducible_steps"),
            "Recorded steps that were sampled with a setting that a trainer cannot reproduce, by setting.",
            ("setting",),
            registry=registry,
        )
        self.splices = Counter(
            name("splices"), "Recorded chat completions by the result of splicing.", ("result",), registry=registry
        )
        self.splice_differences = Counter(
            name("splice_differences"),
            "Verified calls by the place where the spliced prompt differs first from the engine's.",
            ("place",),
            registry=registry,
        )
        self.splice_saved = Counter(
            name("splice_saved_tokens"),
            "Prompt tokens of verified calls that began a row, and would not with splicing.",
            registry=registry,
        )
        self.row_bytes = RowBytes()
        undelivered = Gauge(
            name("row_bytes"), "Bytes of steps that the service has not acknowledged yet.", registry=registry
        )
        undelivered.set_function(lambda: self.row_bytes.total)
        self.open = Gauge(name("open_trajectories"), "Trajectories that are not closed.", registry=registry)
        self.policy_version = Gauge(
            name("policy_version"),
            "The last policy version that the recorder received from the service.",
            ("run",),
            registry=registry,
        )
        self.closed = Counter(
            name("closed_trajectories"), "Closed trajectories by outcome.", ("outcome",), registry=registry
        )
        self.delivery_failures = Counter(
            name("delivery_failures"),
            "Failed submissions to the service, by status code.",
            ("code",),
            registry=registry,
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
            self.row_bytes.total += row.nbytes

    def answered(self, api: str, status: int, took_s: float, engine_s: float) -> None:
        """Counts an answered call, and the recorder's share of its time."""
        self.calls.labels(api, str(status)).inc()
        self.call_seconds.labels(api).observe(took_s)
        self.added_seconds.labels(api).observe(max(0.0, took_s - engine_s))

    def text(self) -> bytes:
        return generate_latest(self.registry)
