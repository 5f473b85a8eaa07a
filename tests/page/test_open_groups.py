"""What a group that is not sealed has: its samples, their rows, and how a finding leads there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill import RolloutClient
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import TrajectoryKey
from gristmill_service.monitoring.health import findings
from tests.on_loop import Run, Service
from tests.page import stage
from tests.page.conftest import OpenPage
from tests.serving import StartService

LATE = "repo/issue 17"


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{service.http_url}/v1", trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture
def run(service: Service, run_name: str) -> Run:
    """A run that waits for one group of five samples: one is complete, one has an end and no beginning, one waits for
    its reward, one is aborted, and one sent nothing."""
    service.runs.create(run_name, stage.CONFIG | {"n_samples_per_prompt": 5})
    run: Run = service.runs.get(run_name)
    run.begin_groups(1, [LATE], tags=["code"])
    rows = [
        *stage.group(LATE)[:2],
        stage.turn(LATE, 1, 1, [1, 2, 3], [4, 5]),
        stage.turn(LATE, 2, 0, [1, 2], [9], reward=None),
    ]
    run.submit(from_rows([row | {"round": 1} for row in rows], step_wise=True))
    run.abort_trajectories([TrajectoryKey(1, LATE, 3)], "the sandbox died")
    return run


def asked(client: httpx.Client, run: str, path: str, **query: Any) -> httpx.Response:
    return client.get(f"/runs/{run}/samples{path}", params={"uid": LATE, "round": 1, **query})


def test_each_sample_says_what_of_it_has_come(client: httpx.Client, run: Run) -> None:
    group = asked(client, run.name, "").json()
    assert (group["tag"], group["complete"], group["in_all"]) == ("code", 1, 5)
    shown = [
        (one["sample"], one["state"], one["rows"], one["newest_step"], one["missing_step"]) for one in group["samples"]
    ]
    assert shown == [
        (4, "no row", 0, None, None),
        (1, "open", 1, 1, 0),
        (2, "waits for a reward", 1, 0, None),
        (0, "complete", 2, 1, None),
        (3, "aborted", 0, None, None),
    ]
    assert group["samples"][-1]["reason"] == "the sandbox died"
    assert [(one["tokens"], one["reward"]) for one in group["samples"][1:4]] == [(5, 1.0), (3, None), (8, 0.0)]


def test_a_row_of_it_has_its_tokens_though_part_of_them_stand_with_the_step_before(
    client: httpx.Client, run: Run
) -> None:
    shown = asked(client, run.name, "/0/rows/1").json()
    assert shown["tokens"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert shown["loss_mask"] == [-1] * 7 + [1]
    assert asked(client, run.name, "/0/rows/1", start=6).json()["tokens"] == [7, 8]
    # A reward that has not come yet keeps nothing back.
    assert asked(client, run.name, "/2/rows/0").json()["tokens"] == [1, 2, 9]


def test_what_has_not_come_and_what_is_not_open_are_distinguished(
    client: httpx.Client, service: Service, run_name: str
) -> None:
    run = stage.published(
        service.runs, run_name, stage.CONFIG, [from_rows([*stage.group("a"), *stage.group("b")], step_wise=True)]
    )
    run.begin_groups(0, ["c", "d"])
    run.abort_groups(0, ["d"], "no sandbox")

    def refused(uid: str, path: str = "") -> str:
        answer = client.get(f"/runs/{run_name}/samples{path}", params={"uid": uid})
        assert answer.status_code == 404
        message: str = answer.json()["error"]["message"]
        return message

    assert refused("a") == "uid 'a' is not open: it was sealed into batch 0; see its rows there"
    assert refused("d") == "uid 'd' is not open: it was dropped (no sandbox), and its rows were removed"
    assert refused("nobody", "/0/rows/0").startswith(
        "uid 'nobody' is not open: no group of this uid and round was begun"
    )
    assert refused("c", "/1/rows/2") == "uid 'c' sample 1 has no step 2 yet; request one of the received steps"


def test_rows_that_a_journal_holds_are_read_from_it(start_service: StartService, tmp_path: Path) -> None:
    config = {"train_batch_size": 2, "n_samples_per_prompt": 2, "policy_mini_batch_size": 1, "micro_batch": {"size": 2}}
    row = stage.turn("p", 0, 0, [1, 2], [3])
    first = start_service("--journal-dir", str(tmp_path / "journal"))
    with RolloutClient(first.grpc_address, "r") as worker:
        worker.create_run(config)
        worker.begin_groups(["p"])
        worker.submit([{name: value for name, value in row.items() if name != "step"}])
        worker.flush()
    first.stop()
    again = start_service("--journal-dir", str(tmp_path / "journal"))
    response = httpx.get(
        f"{again.http_url}/v1/runs/r/samples/0/rows/0", params={"uid": "p"}, trust_env=False, timeout=30
    )
    assert response.json()["tokens"] == [1, 2, 3]


def test_a_finding_leads_to_the_samples_of_an_open_group_and_to_their_rows(
    open_page: OpenPage, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "_LONG_GROUP_S", 0.01)
    page = open_page(f"#/{run.name}")
    finding = page.locator(".findings li").filter(has_text="open for long")
    finding.get_by_role("button", name="samples of the oldest group").click()
    samples = page.get_by_role("region", name="Samples of the group")
    samples.wait_for()
    stage.until(lambda: bool(samples.evaluate("node => node === document.activeElement")))
    page.get_by_role("heading", name=f"{LATE} round 1 (code)").wait_for()
    assert samples.get_by_role("row").nth(2).inner_text().split("\t")[:6] == ["1", "open", "1", "step 0", "5", "1"]
    samples.get_by_role("button", name="tokens of sample 0 step 1").click()
    newest = page.get_by_role("region", name="Tokens of sample 0 step 1")
    newest.wait_for()
    assert newest.inner_text().split() == ["1", "2", "3", "4", "5", "6", "7", "8"]
    page.get_by_role("button", name="previous step").click()
    page.get_by_role("region", name="Tokens of sample 0 step 0").wait_for()
    # The address alone leads there, too.
    open_page(page.url.split("/", 3)[3]).get_by_role("region", name="Samples of the group").wait_for()


def test_what_came_meanwhile_is_there_when_one_looks_again(open_page: OpenPage, run: Run) -> None:
    page = open_page(f"#/{run.name}")
    waits = page.locator("section[aria-label='What waits, and for how long']")
    page.get_by_role("button", name="reasons").click()
    reasons = waits.get_by_role("region", name="Aborted samples")
    assert reasons.evaluate("node => node === document.activeElement")
    assert reasons.get_by_role("row").nth(1).inner_text().startswith(f"the sandbox died\t1\t{LATE}")
    waits.get_by_role("link", name=LATE).first.click()
    samples = page.get_by_role("region", name="Samples of the group")
    samples.wait_for()
    assert samples.get_by_role("row").nth(1).inner_text().startswith("4\tno row")
    run.submit(from_rows([stage.turn(LATE, 4, 0, [1], [2]) | {"round": 1}], step_wise=True))
    page.get_by_role("button", name="Refresh").click()
    samples.get_by_role("button", name="tokens of sample 4 step 0").wait_for()


def test_a_group_that_is_searched_for_and_open_leads_to_its_samples(open_page: OpenPage, run: Run) -> None:
    page = open_page(f"#/{run.name}")
    page.get_by_label("Find groups by uid").fill("issue")
    page.get_by_role("button", name="Find", exact=True).click()
    page.get_by_role("button", name=f"samples of {LATE} round 1 (code)").click()
    page.get_by_role("region", name="Samples of the group").wait_for()
