"""docs/metrics.md lists what the registry exposes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.access.quotas import QuotaUsage
from gristmill_service.monitoring.metrics import Metrics, Watched, run_stats
from gristmill_service.pipeline import build_batch
from gristmill_service.storage.memory import MemoryShardStore
from tests.metrics.scraping import Scrape
from tests.run.harness import Bench, group_rows

_ROW = re.compile(r"^\| `(gristmill_\w+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)


@pytest.fixture(scope="module")
def busy() -> Metrics:
    """With a series of every metric."""
    columns = [{"name": "level", "dtype": "int8", "scope": "row"}]
    bench = Bench(
        build_batch=build_batch,
        store=MemoryShardStore(),
        name='a "run" \\ of\nmine',
        merge="prefix",
        columns=columns,
        tag_shares={"math": {"min": 1.0}},
        advantage_estimator="rae",
    )
    bench.begin("a", "b", "c")
    rows = [row | {"level": 3, "tag": tag} for uid, tag in (("a", "math"), ("b", "")) for row in group_rows(uid)]
    rows = [row | {"agent": "solver", "reward_components": {"format": 1.0}} for row in rows]
    bench.run.submit(from_rows(rows, columns=bench.run.config.columns))
    bench.run.seal(0)
    bench.make_batches()
    bench.run.shard("policy", 0, None, 0)
    bench.run.abort_groups(0, ["c"], "bad")
    bench.log.lease = 2.5
    metrics = Metrics()
    metrics.observe_call("grpc", "SubmitRows", "OK", 0.002)
    metrics.watch(
        Watched(
            lambda: [run_stats(bench.run)],
            lambda: 3,
            lambda: {"own": 1, "lost": 0, "elsewhere": 0, "nobody": 0},
            lambda: "the disk is full",
            lambda: {"rows": (1_000_000, 8 << 30)},
            lambda: [
                QuotaUsage("max_run_rows", "run", bench.run.name, 3, 10),
                QuotaUsage("max_rows", "caller", "team", 3, 10),
            ],
        )
    )
    return metrics


def test_every_metric_is_documented_with_its_type_and_labels(busy: Metrics) -> None:
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in _ROW.findall(Path("docs/metrics.md").read_text())
    }
    families = {}
    for family in Scrape(busy.text().decode()).families:
        if family.name.startswith("gristmill_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            families[name] = family.type, labels
    assert families == documented


def test_names_and_units_follow_the_conventions(busy: Metrics) -> None:
    for family in Scrape(busy.text().decode()).families:
        assert family.documentation.endswith("."), family.name
        assert "_ms" not in family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_versions"))
