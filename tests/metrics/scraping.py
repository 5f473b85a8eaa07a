"""Metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gristmill_service.monitoring.metrics import Metrics, Watched, run_stats
from gristmill_service.run.run import Run


class Scrape:
    """Series by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self._samples = [sample for family in self.families for sample in family.samples]

    def of(self, name: str, **given: str) -> dict[str, float]:
        """The value of each series with these labels, by its labels besides `run` and these."""
        return {
            ",".join(value for label, value in sample.labels.items() if label != "run" and label not in given): (
                sample.value
            )
            for sample in self._samples
            if sample.name == name and given.items() <= sample.labels.items()
        }

    def one(self, name: str, **given: str) -> float:
        samples = self.of(name, **given)
        assert len(samples) == 1, f"{name} {given}: {samples}"
        return next(iter(samples.values()))

    def runs(self) -> set[str]:
        return {sample.labels["run"] for sample in self._samples if "run" in sample.labels}


def scraped(runs: Iterable[Run]) -> Scrape:
    """A scrape of these runs, without a service."""
    metrics = Metrics()
    metrics.watch(Watched(lambda: [run_stats(run) for run in runs], lambda: 0))
    return Scrape(metrics.text().decode())


def scrape(http_url: str) -> Scrape:
    return Scrape(httpx.get(f"{http_url}/metrics", trust_env=False).text)
