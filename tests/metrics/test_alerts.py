"""Each alert fires for what it is named after, as recorded, and for nothing in a run that is well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metrics.promtool import RULES, check_alert, promtool
from tests.metrics.recording import Recording
from tests.run.harness import BuildBatch, group_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN, POLICY, INSTANCE = {"run": "run"}, {"run": "run", "model": "policy"}, {"instance": "one:8080"}

Labels = dict[str, str]
Case = Callable[[], tuple[Recording, Labels | None]]


def starving() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.train(5)
    for _ in range(20):
        ask_for_a_minute(recording)
    return recording, POLICY


def ask_for_a_minute(recording: Recording) -> None:
    """As a rank that finds nothing does: every thirty seconds."""
    for _ in range(2):
        recording.bench.run.shard("policy", 0, None, 0)
        recording.bench.now += 30.0
    recording.bench.now -= 60.0
    recording.minute()


def abandoned() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.train(5)
    for _ in range(20):
        ask_for_a_minute(recording)
    for _ in range(7):
        recording.minute()
    return recording, None


def throttled() -> tuple[Recording, Labels | None]:
    recording = Recording(max_buffered_batches=1)
    recording.bench.begin("a", "b")
    for _ in range(25):
        recording.bench.begin("c")
        recording.bench.now += 30.0
        recording.bench.begin("c")
        recording.bench.now -= 30.0
        recording.minute()
    return recording, RUN


def padded() -> tuple[Recording, Labels | None]:
    recording = Recording(merge="none")
    recording.train(65, lengths=(2, 200))
    return recording, RUN


def unmerged() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.train(160)
    recording.train(45, merges=False)
    return recording, RUN


def broken() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.train(60)
    recording.train(25, merges=False)
    return recording, RUN


def broken_from_the_start() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.train(25, merges=False)
    return recording, RUN


def straggling() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.bench.begin("late")
    for _ in range(40):
        recording.minute()
    return recording, RUN


def dropped() -> tuple[Recording, Labels | None]:
    recording = Recording()
    for number in range(16):
        recording.bench.begin(f"{number}")
        recording.bench.run.abort_groups(0, [f"{number}"], "TimeoutError")
    for _ in range(8):
        recording.minute()
    return recording, RUN


def failed() -> tuple[Recording, Labels | None]:
    recording = Recording(build_batch=BuildBatch(fails=(0,)))
    recording.minute()
    recording.bench.submit(*(row for uid in "ab" for row in group_rows(uid)))
    recording.bench.make_batches()
    recording.minute()
    return recording, RUN


def held_up_by_a_rank() -> tuple[Recording, Labels | None]:
    recording = Recording(dp_size=2, policy_mini_batch_size=2)
    recording.bench.begin("a", "b")
    recording.bench.submit(*(row for uid in "ab" for row in group_rows(uid)))
    recording.bench.make_batches()
    recording.minute()
    run = recording.bench.run
    position = run.shard("policy", 0, None, 0).position
    assert position is not None
    run.acknowledge("policy", 0, position, 0, commit=True)
    for _ in range(6):
        recording.minute()
    return recording, RUN


def lost() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.minute()
    recording.bench.state.groups_dropped["rows_lost"] = 3
    recording.minute()
    return recording, RUN


def rolled_back() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.minute()
    recording.bench.state.generation = 2
    recording.minute()
    return recording, RUN


def lost_while_nobody_looked() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.bench.state.groups_dropped["rows_lost"] = 3
    recording.minute()
    for _ in range(12):
        recording.minute()
    return recording, None


def full() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.room = {"rows": (10, 10), "journal": (9, 10)}
    for _ in range(10):
        recording.minute()
    return recording, {**INSTANCE, "store": "journal"}


def refusing() -> tuple[Recording, Labels | None]:
    recording = Recording()
    for _ in range(8):
        recording.minute()
        recording.fail()
    return recording, INSTANCE


def waiting_for_the_disk() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.trouble = "the disk is full"
    for _ in range(4):
        recording.minute()
    return recording, INSTANCE


def unowned() -> tuple[Recording, Labels | None]:
    recording = Recording()
    recording.leases = {"own": 1, "lost": 0, "elsewhere": 0, "nobody": 1}
    for _ in range(4):
        recording.minute()
    return recording, INSTANCE


def handed_over() -> tuple[Recording, Labels | None]:
    recording = Recording()
    for minute in range(4):
        recording.leases = {"own": 0, "lost": int(minute == 1), "elsewhere": 1, "nobody": 0}
        recording.minute()
    return recording, None


CASES: list[tuple[str, Case]] = [
    ("GristmillTrainerStarving", starving),
    ("GristmillTrainerStarving", abandoned),
    ("GristmillProducersThrottled", throttled),
    ("GristmillPaddingShareHigh", padded),
    ("GristmillMergeRateFallen", unmerged),
    ("GristmillMismatchSurge", broken),
    ("GristmillMismatchSurge", broken_from_the_start),
    ("GristmillStragglerGroups", straggling),
    ("GristmillAllGroupsDropped", dropped),
    ("GristmillBatchFailed", failed),
    ("GristmillRunStuck", held_up_by_a_rank),
    ("GristmillRowsLost", lost),
    ("GristmillRunRolledBack", rolled_back),
    ("GristmillRowsLost", lost_while_nobody_looked),
    ("GristmillStoreNearLimit", full),
    ("GristmillJournalFailing", refusing),
    ("GristmillJournalFailing", waiting_for_the_disk),
    ("GristmillRunWithoutLease", unowned),
    ("GristmillRunWithoutLease", handed_over),
]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_promtool_takes_the_rules() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(RULES))


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_it_fires_for_what_it_is_named_after(tmp_path: Path, name: str, case: Case) -> None:
    recording, labels = case()
    check_alert(tmp_path, name, recording.series, [] if labels is None else [labels])


@pytest.fixture(scope="module")
def well() -> Recording:
    """Three hours of training with nothing wrong."""
    recording = Recording()
    recording.train(180)
    return recording


@pytest.mark.parametrize("name", [rule["alert"] for rule in alerts()])
def test_it_is_silent_when_all_is_well(tmp_path: Path, name: str, well: Recording) -> None:
    check_alert(tmp_path, name, well.series, [])


def test_each_alert_is_tried() -> None:
    assert {name for name, _ in CASES} == {rule["alert"] for rule in alerts()}


def test_each_alert_has_its_paragraph_in_the_runbook() -> None:
    text = (ROOT / "docs/runbook.md").read_text()
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.M)
    }
    linked = [rule["annotations"]["runbook"].split("#") for rule in alerts()]
    assert {file for file, _ in linked} == {"docs/runbook.md"}
    assert {anchor for _, anchor in linked} == anchors
    assert len(linked) == len(anchors), "a paragraph each"


@pytest.mark.parametrize("document", ["docs/runbook.md", "docs/metrics.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


def test_alerts_speak_of_metrics_that_there_are() -> None:
    documented = set(re.findall(r"^\| `(gristmill_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    for rule in alerts():
        assert set(re.findall(r"gristmill_\w+", rule["expr"])) <= documented, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
