"""A run's story: figures of every batch, which outlive the batch and the process, as curves on the page."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gristmill._wire.rows import from_rows
from tests.faults.services import Services, on_redis, patiently
from tests.on_loop import Service
from tests.page import stage
from tests.page.conftest import OpenPage
from tests.redis.servers import RedisServer

TAGGED = stage.CONFIG | {"max_buffered_batches": 8}


def batch_rows(number: int, **more: Any) -> list[dict[str, Any]]:
    """A batch of two groups: of the first both samples fail, of the second one has a score."""
    flat = [row | {"reward": 0.0} for row in stage.group(f"a{number}")]
    return [row | more for row in [*flat, *stage.group(f"b{number}")]]


@pytest.fixture
def client(service: Service) -> Any:
    with httpx.Client(base_url=f"{service.http_url}/v1", trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    """Three published batches, the first of which is trained and freed."""
    tables = [from_rows(batch_rows(number, policy_version=0), step_wise=True) for number in range(3)]
    run = stage.published(service.runs, run_name, TAGGED, tables)
    for rank in range(2):
        for mini_batch in range(2):
            stage.acknowledge(run, rank, mini_batch, commit=True)
    stage.until(lambda: run.status().batches_freed == 1)
    return run_name


def history(client: httpx.Client, run: str, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/runs/{run}/history", params=query)
    assert answer.status_code == 200, answer.text
    points: dict[str, Any] = answer.json()
    return points


def test_figures_are_those_of_the_plan_also_where_the_batch_is_freed(client: httpx.Client, run: str) -> None:
    shown = history(client, run)
    assert [(point["first"], point["last"]) for point in shown["points"]] == [(0, 0), (1, 1), (2, 2)]
    plan = client.get(f"/runs/{run}/batches/1/picture").json()
    for point in shown["points"]:
        assert point["groups"] == 2
        assert point["score_mean"] == pytest.approx(plan["metrics"]["score_mean"])
        assert point["solved"] == plan["metrics"]["pass_at_n"] == 0.5
        assert point["zero_variance"] == 0.5
        assert (point["rows"], point["rows_merged"], point["breaks"]) == (8, 6, 2)
        assert point["padding_share"] == pytest.approx(plan["metrics"]["padding_share"], rel=1e-5)
        assert point["tokens"] == plan["metrics"]["tokens"]
        assert (point["staleness_mean"], point["staleness_max"]) == (0.0, 0)
        assert point["stages"]["merge"] >= 0
        assert point["seconds"] > 0
        assert point["tags"] == {}
    assert shown["totals"]["batches"] == 3
    assert shown["totals"]["rows"] == 24
    assert shown["failed"] == []


def test_neighbours_are_added_up_where_fewer_points_are_asked_for(client: httpx.Client, run: str) -> None:
    shown = history(client, run, points=2)
    assert [(point["first"], point["last"], point["rows"]) for point in shown["points"]] == [(0, 1, 16), (2, 2, 8)]
    assert client.get(f"/runs/{run}/history", params={"points": 0}).status_code == 422


def test_groups_of_environments_have_figures_of_their_own(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    flat, solved = batch_rows(0, tag="math")[:4], batch_rows(0, tag="code")[4:]
    stage.published(service.runs, run_name, stage.CONFIG, [from_rows([*flat, *solved], step_wise=True)])
    [point] = history(client, run_name)["points"]
    assert {
        tag: (counts["groups"], counts["solved"], counts["zero_variance"]) for tag, counts in point["tags"].items()
    } == {
        "code": (1, 1.0, 0.0),
        "math": (1, 0.0, 1.0),
    }


def test_agents_components_and_baselines_have_curves(
    open_page: OpenPage, service: Service, client: httpx.Client, run_name: str
) -> None:
    config = TAGGED | {"advantage_estimator": "rae", "rae": {"decay": 0.5}}
    tables = []
    for batch in range(2):
        rows = batch_rows(batch, tag="math")
        for row in rows:
            row |= {"agent": "solver" if row["sample"] else "judge"}
            row |= {"reward_components": {"format": 0.25}} if row["is_last_step"] else {}
        tables.append(from_rows(rows, step_wise=True))
    stage.published(service.runs, run_name, config, tables)
    points = history(client, run_name)["points"]
    names = {"agents/judge/score_mean", "agents/solver/score_mean", "components/format/mean"}
    names |= {"baselines/math/judge", "baselines/math/solver"}
    assert [set(point["means"]) for point in points] == [names] * 2
    assert [point["means"]["components/format/mean"] for point in points] == [0.25] * 2
    plan = client.get(f"/runs/{run_name}/batches/1/picture").json()
    assert plan["metrics"]["baselines/math/solver"] == pytest.approx(points[1]["means"]["baselines/math/solver"], 1e-5)
    page = open_page(f"#/{run_name}")
    shown = page.locator("section[aria-label=History]")
    for curve in ("score by agent", "reward components", "running baselines"):
        chart = shown.locator("figure.curve").filter(has_text=curve)
        chart.wait_for(state="attached")


def test_a_failed_batch_is_shown_with_its_reason_and_what_to_do(
    open_page: OpenPage, service: Service, client: httpx.Client, run_name: str
) -> None:
    sizes = {"n_samples_per_prompt": 1, "train_batch_size": 1, "micro_batch": {"max_tokens": 100}}
    config = stage.CONFIG | sizes | {"merge": "none", "on_misaligned": "error"}
    service.runs.create(run_name, config)
    run = service.runs.get(run_name)
    run.begin_groups(0, ["a"])
    # One row makes no two ranks.
    with capture_logs() as logged:
        run.submit(from_rows([stage.turn("a", 0, 0, [1], [2])], step_wise=True))
        stage.until(lambda: any(line["event"] == "batch failed" for line in logged))
    [failed] = history(client, run_name)["failed"]
    assert failed["batch"] == 0
    assert failed["reason"].startswith("policy mini-batch 0: its 1 rows cannot make")
    assert "on_misaligned: pad (now error); its rows are kept; resume with a dp_size that aligns" in failed["remedy"]
    [line] = [line for line in logged if line["event"] == "batch failed"]
    assert (line["log_level"], line["reason"], line["remedy"]) == ("error", failed["reason"], failed["remedy"])
    page = open_page(f"#/{run_name}")
    parts = page.locator(".findings li").first.locator("dt, dd")
    parts.first.wait_for()
    assert parts.all_inner_texts() == ["reason", failed["reason"], "remedy", failed["remedy"]]
    assert page.get_by_text(failed["remedy"]).count() == 1


def fill(service: Any, number: int) -> None:
    rows = batch_rows(number)
    service.http.begin("r", list(dict.fromkeys(row["uid"] for row in rows)))
    service.http.submit("r", rows)
    assert service.http.batch("r", number, wait_s=20)["state"] == "published"


def history_of(service: Any) -> dict[str, Any]:
    answer: dict[str, Any] = service.http.call("GET", "/runs/r/history").json()
    return answer


@pytest.mark.parametrize("kept_in", ["journal", "redis"])
def test_the_history_outlives_the_process(tmp_path: Path, services: Services, kept_in: str) -> None:
    with ExitStack() as stack:
        flags = ["--journal-dir", str(tmp_path / "journal"), "--store", "memory"]
        if kept_in == "redis":
            server = stack.enter_context(RedisServer(tmp_path / "redis", appendonly="no"))
            flags = list(on_redis(server.url))
        _outlives(services, flags)


def _outlives(services: Services, flags: list[str]) -> None:
    [first] = services.start(1, *flags)
    first.http.create("r", TAGGED)
    fill(first, 0)
    before = history_of(first)
    first.process.kill()
    first.process.wait()
    [second] = services.start(1, *flags)
    # On Redis the lease of who was killed has to run out.
    stage.until(lambda: patiently(lambda: history_of(second))["points"] != [])
    assert history_of(second) == before
    fill(second, 1)
    assert [point["first"] for point in history_of(second)["points"]] == [0, 1]


def test_pointing_at_a_curve_names_its_values_and_a_click_opens_the_batch(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}")
    score = page.locator("section[aria-label=History] figure.curve").filter(
        has=page.get_by_role("heading", name="score", exact=True)
    )

    def readout() -> str:
        # What is drawn above moves it.
        score.locator("canvas").hover(position={"x": 200, "y": 40})
        return str(score.locator(".readout").inner_text())

    stage.until(lambda: readout() == "batch 2: score 0.250")
    score.locator("canvas").click(position={"x": 200, "y": 40})
    stage.until(lambda: page.url.endswith(f"#/{run}/2"))
    page.get_by_role("heading", name="Batch 2").wait_for()


def test_curves_are_walked_by_keyboard_and_enter_opens_the_batch(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}/2")
    chart = page.locator("figure.curve").first
    chart.locator("canvas").focus()
    page.keyboard.press("ArrowLeft")
    stage.until(lambda: chart.locator(".readout").inner_text().startswith("batch 1:"))
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Batch 1").wait_for()


def test_of_a_freed_batch_that_another_process_published_the_figures_are_still_shown(
    open_page: OpenPage, service: Service, run: str
) -> None:
    opened = service.runs.get(run)
    opened.tables.forget(opened.run_id)
    page = open_page(f"#/{run}/2")
    page.locator("figure.curve").first.wait_for()
    page.get_by_text("Figures of every batch").first.click()
    page.get_by_role("link", name="batch 0", exact=True).click()
    page.get_by_role("heading", name="Batch 0").wait_for()
    shards = page.locator("section[aria-label=Shards]")
    shards.get_by_role("cell", name="after merging").wait_for()
    assert "Batch 0 cannot be shown: batch 0 is freed, and its numbers are gone" in shards.inner_text()
    assert not page.get_by_role("heading", name="Distributions").is_visible()
    # The link alone leads there, too.
    shards = open_page(f"#/{run}/0").locator("section[aria-label=Shards]")
    shards.get_by_role("cell", name="after merging").wait_for()
    assert "batch 0 is freed" in shards.inner_text()


def test_a_freed_batch_is_offered_and_shown_without_its_tokens(open_page: OpenPage, run: str) -> None:
    page = open_page(f"#/{run}/2")
    page.get_by_label("batch", exact=True).select_option("batch 0")
    page.get_by_role("heading", name="Batch 0").wait_for()
    shards = page.locator("section[aria-label=Shards]")
    shards.locator("canvas").first.click(position={"x": 40, "y": 22})
    page.get_by_text("the tokens of row 0 are gone: batch 0 is freed").wait_for()


def test_a_finished_run_shows_totals_all_curves_and_its_newest_batch(
    open_page: OpenPage, service: Service, run: str
) -> None:
    opened = service.runs.get(run)
    for batch in (1, 2):
        for rank in range(2):
            for mini_batch in range(2):
                stage.acknowledge(opened, rank, mini_batch, batch=batch, commit=True)
    opened.finish()
    other = f"{run}-other"
    stage.published(service.runs, other, stage.CONFIG, [from_rows(batch_rows(1), step_wise=True)])
    page = open_page(f"#/{run}")
    section = page.locator("section[aria-label=History]")
    section.get_by_role("heading", name="rows per batch").wait_for()
    assert section.locator("dl.tiles dd").first.inner_text().startswith("3\n")
    assert section.locator("figure.curve").count() == 10
    page.get_by_role("heading", name="Batch 2").wait_for()
    page.locator("section[aria-label=Shards] canvas").first.wait_for()
    page.get_by_label("compare with another run").select_option(other)
    score = section.locator("figure.curve canvas").first
    stage.until(lambda: f"score of {other}" in score.get_attribute("aria-label"))
    ranks = page.get_by_role("region", name="Ranks").get_by_role("row")
    assert ranks.nth(1).inner_text().startswith("rank 0\tnone\tfinished\t")
