"""A run of simulated hours, scraped each minute, as Prometheus would have it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gristmill.errors import UnavailableError
from gristmill_service.monitoring.metrics import Metrics, Watched, run_stats
from gristmill_service.pipeline import build_batch
from gristmill_service.storage.memory import MemoryShardStore
from tests.metrics.scraping import Scrape
from tests.run.harness import Bench, row
from tests.strategies import Row

Series = dict[str, list[float]]


class Recording:
    """`minute` lets one pass and scrapes. What the service reports in addition to its runs may be set."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "build_batch": build_batch,
            "store": MemoryShardStore(),
            "merge": "prefix",
            "max_buffered_batches": 2,
        }
        self.bench = Bench(**(defaults | settings))
        self.leases = {"own": 1, "lost": 0, "elsewhere": 0, "nobody": 0}
        self.trouble = ""
        self.room = {"rows": (9, 10), "journal": (1, 10)}
        self.series: Series = {}
        self._metrics, self._minutes, self._batches = Metrics(), 0, 0
        self._metrics.watch(
            Watched(
                lambda: [run_stats(self.bench.run)],
                lambda: 0,
                lambda: self.leases,
                lambda: self.trouble,
                lambda: self.room,
            )
        )

    def minute(self) -> None:
        self.bench.now += 60.0
        for family in Scrape(self._metrics.text().decode()).families:
            for sample in family.samples if family.name.startswith("gristmill_") else ():
                labels = {**sample.labels, "instance": "one:8080"}
                name = sample.name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
                # One that begins later was not there before.
                self.series.setdefault(name, [float("nan")] * self._minutes).append(sample.value)
        self._minutes += 1

    def train(self, minutes: int, *, lengths: tuple[int, int] = (8, 8), merges: bool = True) -> None:
        """A batch each minute, which the rank trains for most of it. lengths: tokens of short and long responses."""
        run = self.bench.run
        for _ in range(minutes):
            run.shard("policy", 0, None, 0)
            uids = [f"{self._batches}-{prompt}" for prompt in range(2)]
            self.bench.begin(*uids)
            self.bench.submit(*(one for uid in uids for one in _group(uid, lengths, merges)))
            self.bench.make_batches()
            self._batches += 1
            self.minute()
            for _ in range(2):
                position = run.shard("policy", 0, None, 0).position
                assert position is not None
                run.acknowledge("policy", 0, position, 0, commit=True)

    def fail(self) -> None:
        """An append that the journal refuses."""

        def refuse() -> None:
            raise UnavailableError("the disk is gone")

        with suppress(UnavailableError):
            self._metrics.storing.call("append", refuse)


def _group(uid: str, lengths: tuple[int, int], merges: bool) -> list[Row]:
    """Two trajectories of two turns."""
    rows = []
    for sample, length in enumerate(lengths):
        first = list(range(100, 100 + length))
        context = [1, 2, *first] if merges else [1, 2, *first[:-1], 7]
        rows.append(row(uid, sample, 0, last=False, response=first))
        rows.append(row(uid, sample, 1, reward=float(sample), response=[5], prompt_token_ids=[*context, 9]))
    return rows
