"""What the page shows on demand: settings, groups by uid, distributions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx
import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.monitoring.health import findings
from tests.on_loop import Service
from tests.page import stage
from tests.page.conftest import OpenPage
from tests.tools.bench.workloads import uniform


@pytest.fixture
def client(service: Service) -> Any:
    with httpx.Client(base_url=f"{service.http_url}/v1", trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    """Batch 0 of two groups, on two ranks, and a group that is open."""
    rows = [row | {"stop_reason": "length" if row["step"] else "stop"} for uid in "ab" for row in stage.group(uid)]
    run = stage.published(service.runs, run_name, stage.CONFIG, [from_rows(rows, step_wise=True)])
    run.begin_groups(0, ["another"])
    return run_name


def answered(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_every_setting_is_shown_next_to_its_default(client: httpx.Client, run: str) -> None:
    settings = {one["name"]: one for one in answered(client, f"/runs/{run}/settings")["settings"]}
    assert (settings["merge"]["value"], settings["merge"]["default"]) == ("prefix", "none")
    assert not settings["train_batch_size"]["is_default"]
    assert settings["lambda"] == {"name": "lambda", "value": 1.0, "default": 1.0, "is_default": True}
    assert settings["overlong_filter"]["is_default"]
    assert settings["columns"]["is_default"]


def test_groups_are_found_by_a_part_of_their_uid(client: httpx.Client, run: str) -> None:
    matches = answered(client, f"/runs/{run}/find", uid="a")
    assert [(one["uid"], one["state"], one["batch"]) for one in matches["groups"]] == [
        ("a", "sealed", 0),
        ("another", "open", None),
    ]
    assert answered(client, f"/runs/{run}/find", uid="nobody") == {"run": run, "in_all": 0, "archived": 0, "groups": []}


def test_scores_lengths_turns_and_stop_reasons_are_counted_by_trajectory(client: httpx.Client, run: str) -> None:
    distributions = answered(client, f"/runs/{run}/batches/0/distributions")
    bars = {one["name"]: dict(zip(one["lows"], one["counts"], strict=True)) for one in distributions["histograms"]}
    assert bars == {"score": {0.0: 2, 1.0: 2}, "response tokens": {3.0: 2, 5.0: 2}, "turns": {2.0: 4}}
    assert distributions["stop_reasons"] == {"length": 4}


def test_a_row_has_its_tokens_and_where_a_loss_is_taken(client: httpx.Client, run: str) -> None:
    merged = answered(client, f"/runs/{run}/batches/0/rows/0")
    assert (merged["uid"], merged["sample"], merged["prompt_tokens"]) == ("a", 0, 3)
    assert merged["tokens"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert merged["loss_mask"] == [-1, -1, -1, 1, 1, 0, 0, 1]
    alone = answered(client, f"/runs/{run}/batches/0/rows/5", start=2)
    assert (alone["uid"], alone["sample"], alone["tokens"]) == ("b", 1, [12, 99, 14, 15, 16, 17])
    assert alone["loss_mask"] == [-1, -1, -1, -1, 1, 1]
    assert client.get(f"/runs/{run}/batches/0/rows/6").status_code == 404


def test_a_click_on_a_row_shows_its_tokens(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    shards = page.locator("section[aria-label=Shards]")
    shards.locator("canvas").first.click(position={"x": 40, "y": 22})
    tokens = page.get_by_role("region", name="Tokens of row 0")
    tokens.wait_for()
    assert tokens.inner_text().split() == ["1", "2", "3", "4", "5", "6", "7", "8"]
    assert tokens.locator(".observation").count() == 2


def test_a_finding_leads_to_its_batch_and_rank(
    open_page: OpenPage, service: Service, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "LATE_RANK_S", 0.01)
    stage.acknowledge(service.runs.get(run), 0, 0)
    page = open_page(f"#/{run}")
    loud = page.locator(".findings li.loud")
    loud.get_by_role("button", name="rank 1", exact=True).click()
    line = page.locator("tr.loud")
    assert line.inner_text().startswith("rank 1")
    stage.until(lambda: bool(line.evaluate("node => node === document.activeElement")))
    loud.get_by_role("button", name="batch 0").click()
    stage.until(lambda: page.url.endswith(f"#/{run}/0"))


def test_a_finding_leads_to_the_longest_row_that_the_rank_has(
    open_page: OpenPage, service: Service, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "LATE_RANK_S", 0.01)
    stage.acknowledge(service.runs.get(run), 1, 0)
    page = open_page(f"#/{run}")
    page.locator(".findings li.loud").get_by_role("button", name="longest row of rank 0").click()
    tokens = page.get_by_role("region", name="Tokens of row 0")
    tokens.wait_for()
    stage.until(lambda: bool(tokens.evaluate("node => node === document.activeElement")))
    assert page.get_by_label("mini-batch", exact=True).input_value() == "0"
    # The address alone leads there, too.
    assert page.url.endswith(f"#/{run}/0//policy.0.0")
    open_page(f"#/{run}/0//policy.0.0").get_by_role("region", name="Tokens of row 0").wait_for()


def test_a_group_is_found_and_its_rows_are_marked(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    page.get_by_label("Find groups by uid").fill("b")
    page.get_by_role("button", name="Find", exact=True).click()
    page.locator("section[aria-label='Find groups']").get_by_role("link", name="batch 0").click()
    page.get_by_text("Marked: the rows of b, in mini-batch 1 rank 0, mini-batch 1 rank 1.").wait_for()


def test_the_settings_are_shown(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    settings = page.locator("section[aria-label=Settings]")
    settings.locator("summary").first.click()
    settings.get_by_role("row", name="merge prefix none").wait_for()


def test_distributions_are_named_where_they_are_pointed_at(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    # What is drawn above moves it.
    page.locator("section[aria-label=History] dl").wait_for()
    page.locator("section[aria-label=Shards] canvas").first.wait_for()
    spread = page.locator("section[aria-label=Distributions]")
    spread.scroll_into_view_if_needed()
    score = spread.locator("figure").first

    def readout() -> str:
        score.locator("canvas").hover(position={"x": 10, "y": 40})
        return str(score.locator(".readout").inner_text())

    stage.until(lambda: readout() == "0: 2 trajectories, 50.0%")


def test_loads_of_many_ranks_are_a_heat_map(open_page: OpenPage, service: Service, run_name: str) -> None:
    work = uniform(64, 16)
    stage.published(service.runs, run_name, stage.settings(work, merge="none", dp_size=16), [work.steps])
    page = open_page(f"#/{run_name}")
    loads = page.locator("section[aria-label='Load per rank and micro-step']")
    loads.scroll_into_view_if_needed()
    loads.locator("canvas").first.wait_for()
    assert loads.locator("canvas").count() == 1
    assert loads.locator("canvas").bounding_box()["height"] < 400

    def readout() -> str:
        loads.locator("canvas").hover(position={"x": 70, "y": 24})
        return str(loads.locator(".readout").inner_text())

    label = loads.locator("canvas").get_attribute("aria-label")
    # The rank that waits longest comes first, and every rank has a line of its own.
    worst = label.partition(" of their time, ")[2].partition(" the longest")[0]
    stage.until(lambda: readout().startswith(f"mini-batch 0, {worst}, micro-step 0: "))


def test_an_empty_service_shows_a_first_run_that_runs(open_page: OpenPage, service: Service) -> None:
    for name in service.runs.names():
        service.runs.delete(name)
    page = open_page()
    text = page.locator("section[aria-label='No runs yet'] pre").inner_text()
    assert service.grpc_address in page.locator("section[aria-label='No runs yet'] p").inner_text()
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
    page.get_by_role("heading", name="my-run").wait_for()
    stage.until(lambda: service.runs.get("my-run").status().batches_published == 1)


def test_a_run_that_is_deleted_says_so_and_is_there_again_when_it_is_recreated(
    open_page: OpenPage, service: Service, run: str
) -> None:
    page = open_page(f"#/{run}")
    page.locator("section[aria-label=Shards] canvas").first.wait_for()
    service.runs.delete(run)
    page.get_by_text("It was deleted while it was shown").wait_for()
    service.runs.create(run, stage.CONFIG)
    page.locator("dl.tiles").first.wait_for()


def test_a_link_to_a_run_that_there_is_not_says_so(open_page: OpenPage) -> None:
    open_page("#/nobody").get_by_text("It was deleted, or never created.").wait_for()


def test_the_calls_are_explained_under_the_policy_of_the_page(open_page: OpenPage) -> None:
    open_page("docs").get_by_text("/v1/runs/{run}/groups").first.wait_for()


def test_refusals_come_in_the_body_for_clients_that_prefer_it(service: Service, client: httpx.Client) -> None:
    plain = client.get("/runs/nobody/health")
    preferred = client.get("/runs/nobody/health", headers={"Prefer": "errors=body"})
    assert (plain.status_code, preferred.status_code, preferred.headers["gristmill-status"]) == (404, 200, "404")
    assert preferred.json() == plain.json()
    assert "gristmill-status" not in client.get("/overview", headers={"Prefer": "errors=body"}).headers
    # What is counted is what was meant.
    client.get("/runs/nobody/batches/0/distributions", headers={"Prefer": "errors=body"})
    counts = httpx.get(f"{service.http_url}/metrics", trust_env=False).text
    assert 'gristmill_call_seconds_count{api="http",call="batch_distributions",status="404"} 1.0' in counts


def test_times_on_an_axis_are_whole_numbers(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    labels = page.evaluate(
        "async () => { const { ago } = await import('./page/shared/text.js'); "
        "return [5, 60, 80, 120, 3600, 4200].map(ago); }"
    )
    assert labels == ["−5 s", "−1 min", "−1 min 20 s", "−2 min", "−1 h", "−1 h 10 min"]
