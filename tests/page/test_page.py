"""The page at `/`, in a real browser, by what a person does."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.monitoring.health import findings
from gristmill_service.run.machine.answers import Position
from tests.on_loop import Service
from tests.page import stage
from tests.page.conftest import OpenPage
from tests.page.views import section
from tests.serving import StartService


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    """Batch 0 of two groups, on two ranks."""
    stage.published(service.runs, run_name, stage.CONFIG, [two_groups("a", "b")])
    return run_name


def two_groups(*uids: str) -> Any:
    return from_rows([row for uid in uids for row in stage.group(uid)], step_wise=True)


def drawn(page: Any) -> Any:
    page.locator("section[aria-label=Shards] canvas").first.wait_for()
    return page


def test_the_first_view_shows_the_runs_and_the_newest_batch(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page())
    assert page.locator("#runs a[aria-current=page]").inner_text().startswith(run)
    assert page.locator("h1").inner_text() == run
    assert "2 groups · 8 rows merged into 6" in page.locator("section[aria-label=Shards]").inner_text()
    assert page.locator("section[aria-label=Shards] canvas").count() == 2
    assert page.title() == f"{run} · gristmill"


def test_nothing_is_loaded_from_elsewhere(open_page: OpenPage, service: Service, run: str) -> None:
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    drawn(page)
    assert len(asked) > 15
    assert all(url.startswith(service.http_url) for url in asked)


def test_another_run_is_filtered_and_chosen_by_a_click(open_page: OpenPage, service: Service, run: str) -> None:
    other = f"{run}-other"
    for name in (other, *(f"{run}-{number}" for number in range(8))):
        service.runs.create(name, stage.CONFIG)
    page = drawn(open_page(f"#/{run}"))
    names = page.locator("#runs a")
    first = r"\n□ no trainer\n0 groups open · 1 batch\nactive (at least )?\d+ s ago"
    assert re.fullmatch(re.escape(run) + first, names.first.inner_text())
    page.get_by_label("Filter runs").fill("OTHER")
    stage.until(lambda: names.count() == 1)
    page.get_by_role("link", name=re.compile(other)).click()
    page.get_by_role("heading", name=other).wait_for()
    assert page.locator("section[aria-label=Shards]").is_hidden()
    page.go_back()
    page.get_by_role("heading", name=run, exact=True).wait_for()
    drawn(page)


def test_rows_are_named_when_pointed_at(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    # The first panel's first bar: below its line of words.
    page.locator("section[aria-label=Shards] canvas").first.hover(position={"x": 40, "y": 22})
    readout = page.locator("section[aria-label=Shards] .readout").inner_text()
    assert readout == (
        "mini-batch 0, rank 0, row 0 (a sample 0, steps 0 to 1): prompt 3, observation 2, trained 3, padding 0"
    )


def test_the_keyboard_walks_through_rows_and_shards(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("!!document.activeElement.closest('section[aria-label=Shards] canvas')"):
            break
    readout = page.locator("section[aria-label=Shards] .readout")
    assert "rank 0, row 0" in readout.inner_text()
    page.keyboard.press("ArrowDown")
    assert "row 1 (a sample 1, step 0): prompt 2, observation 0, trained 3, padding 3" in readout.inner_text()
    page.keyboard.press("ArrowRight")
    assert "rank 1, padding row: prompt 0, observation 0, trained 0, padding 8" in readout.inner_text()


def test_what_rows_of_a_prefix_tree_share_is_shown(open_page: OpenPage, service: Service, run_name: str) -> None:
    config = stage.CONFIG | {"layout": "prefix_tree", "merge": "none", "micro_batch": {"size": 4}, "dp_size": 1}
    stage.published(service.runs, run_name, config, [two_groups("a", "b")])
    page = drawn(open_page(f"#/{run_name}"))
    shards = page.locator("section[aria-label=Shards]")
    # Five tokens of the second row are the first's: its bar begins behind them.
    shards.locator("canvas").first.hover(position={"x": 900, "y": 30})
    assert "sample 0, step 1): shared 5, prompt 2, observation 0, trained 1, padding 0" in shards.inner_text()
    page.get_by_text("The same as a table").click()
    assert shards.locator("tbody tr").first.inner_text().split("\t") == [
        "0",
        "0",
        "4",
        "8",
        "10",
        "0",
        "8",
        "0",
        "0.0%",
    ]
    assert "52 tokens, 36 distinct" in shards.inner_text()


def test_the_picture_is_there_as_a_table(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    page.get_by_text("The same as a table").click()
    lines = page.locator("section[aria-label=Shards] tbody tr").all_inner_texts()
    assert lines[0].split("\t") == ["0", "0", "2", "5", "2", "6", "3", "18.8%"]
    assert len(lines) == 4


def test_a_mini_batch_may_be_looked_at_alone(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    page.get_by_label("mini-batch", exact=True).select_option("mini-batch 1")
    panels = page.locator("section[aria-label=Shards] canvas")
    stage.until(lambda: panels.count() == 1)
    assert panels.first.get_attribute("aria-label") == "Mini-batch 1: 2 ranks with one panel each, one bar per row"
    assert "2 groups · 8 rows merged into 6" in page.locator("section[aria-label=Shards]").inner_text()


def test_loads_are_shown_by_micro_step(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    loads = section(page, "Load per rank and micro-step")
    loads.locator("canvas").first.hover(position={"x": 100, "y": 20})
    assert loads.locator(".readout").inner_text() == (
        "mini-batch 0, rank 1, micro-step 0: 8 tokens; the slowest, rank 0, has 13"
    )


def test_a_break_shows_the_token_that_differs_among_its_neighbours(open_page: OpenPage, run: str) -> None:
    breaks = section(drawn(open_page(f"#/{run}")), "Where merging broke")
    breaks.get_by_text("2 of 8 steps (25.0%) did not extend").wait_for()
    assert "13 came back as 99 2 ×" in breaks.inner_text()
    line = breaks.locator("tbody tr").first
    assert line.locator("td").all_inner_texts() == ["a sample 1", "1", "3", "10 11 12 13 14", "10 11 12 99 14 15"]
    assert line.locator("mark").all_inner_texts() == ["13", "99"]


def test_scores_and_advantages_stand_by_group(open_page: OpenPage, run: str) -> None:
    scores = section(drawn(open_page(f"#/{run}")), "Scores and advantages")
    scores.locator("summary").click()
    cells = scores.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[:2] == ["a", "0.500"]
    assert cells[3] == "-0.707 0.707"
    assert scores.locator(".chip.minus").count() == scores.locator(".chip.plus").count() == 2


_NOTHING = "In 2 groups all advantages are 0, so nothing is learned from them."


@pytest.mark.parametrize(
    ("settings", "agents", "text"),
    [
        ({}, "", f"In 2 groups all scores are equal. {_NOTHING}"),
        ({}, "ab", f"In no group all scores are equal. {_NOTHING}"),
        ({"advantage_estimator": "rae"}, "", "In 2 groups all scores are equal."),
        ({"advantage_estimator": "reinforce++", "whiten": "batch"}, "", "In 2 groups all scores are equal."),
    ],
    ids=str,
)
def test_nothing_is_learned_from_a_group_only_if_its_advantages_are_0(
    open_page: OpenPage, service: Service, run_name: str, settings: dict[str, Any], agents: str, text: str
) -> None:
    """Agents, of whom a group has one trajectory each, have other scores; otherwise the scores of a group are equal."""
    rows = [
        stage.turn(uid, sample, 0, [1], [2, 3], reward=1.0 + (sample if agents else number))
        | ({"agent": agents[sample]} if agents else {})
        for number, uid in enumerate("ab")
        for sample in range(2)
    ]
    stage.published(service.runs, run_name, stage.CONFIG | settings, [from_rows(rows, step_wise=True)])
    scores = section(drawn(open_page(f"#/{run_name}")), "Scores and advantages")
    scores.locator("summary").wait_for()
    assert scores.locator("p").inner_text().endswith(f"one dot per sample. {text}")


def test_on_a_phone_the_chosen_run_comes_before_the_list(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    list_, title = page.locator("#runs a"), page.locator("h1")
    assert list_.bounding_box()["x"] < title.bounding_box()["x"]
    page.set_viewport_size({"width": 390, "height": 800})
    assert title.bounding_box()["y"] < 120 < list_.bounding_box()["y"]
    page.get_by_role("button", name="Runs").click()
    assert page.evaluate("document.activeElement.closest('#runs') !== null")
    assert list_.bounding_box()["y"] < 800


def test_ranks_stand_on_a_time_line(open_page: OpenPage, service: Service, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    line = section(page, "Timeline of ranks")
    line.locator("canvas").wait_for()
    waits = section(page, "What waits, and for how long")
    ranks = waits.get_by_role("region", name="Ranks")
    assert ranks.locator("tbody tr").nth(1).inner_text().startswith("rank 1\tbatch 0 mini-batch 0\tno trainer")
    service.runs.get(run).acknowledge("policy", 0, Position(0), 0, False)
    stage.until(lambda: "batch 0 mini-batch 1" in ranks.inner_text())
    assert ranks.locator("tbody tr").nth(1).inner_text().startswith("rank 1\tbatch 0 mini-batch 0\tpublished, not")
    assert "Of 2 ranks over" in (line.locator("canvas").get_attribute("aria-label") or "")


def test_what_is_stuck_is_shown_with_its_time(
    open_page: OpenPage, service: Service, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "LATE_RANK_S", 0.2)
    service.runs.get(run).begin_groups(0, ["late"])
    service.runs.get(run).acknowledge("policy", 0, Position(0), 0, False)
    page = drawn(open_page(f"#/{run}"))
    finding = page.locator(".findings li").filter(has_text="stuck")
    finding.wait_for()
    words = r"stuck policy rank 1 did not .* batch 0 mini-batch 0, which is published; 1 other rank .*, for .*\d s.*"
    assert re.fullmatch(words, finding.first.inner_text(), re.DOTALL)
    before = finding.first.inner_text()
    stage.until(lambda: finding.first.inner_text() != before)
    assert page.locator("h1 + .state").inner_text() == "■ stuck"
    assert "late\t0 of 2 samples" in section(page, "What waits, and for how long").inner_text()


def test_a_run_whose_batch_could_not_be_built_is_shown_first_with_the_reason(
    open_page: OpenPage, service: Service, run: str
) -> None:
    failed = f"{run}-failed"
    config = {**stage.CONFIG, "merge": "none", "on_misaligned": "error", "micro_batch": {"max_tokens": 100}}
    service.runs.create(failed, {**config, "n_samples_per_prompt": 1, "train_batch_size": 1})
    service.runs.get(failed).begin_groups(0, ["a"])
    # One row makes no two ranks.
    service.runs.get(failed).submit(from_rows([stage.turn("a", 0, 0, [1], [2])], step_wise=True))
    stage.until(lambda: bool(service.runs.get(failed).status().failed_batches))
    page = open_page()
    page.get_by_role("heading", name=failed).wait_for()
    finding = page.locator(".findings li").first
    finding.wait_for()
    assert finding.inner_text().startswith("failed batch 0 could not be built, for ")
    assert page.locator("h1 + .state").inner_text() == "✖ failed"


def test_a_newer_batch_is_offered_and_the_one_looked_at_stays(open_page: OpenPage, service: Service, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    service.runs.get(run).begin_groups(0, ["c", "d"])
    service.runs.get(run).submit(two_groups("c", "d"))
    newer = page.get_by_role("button", name="newer batch")
    stage.until(newer.is_enabled)
    assert page.get_by_role("heading", name="Batch 0").is_visible()
    newer.click()
    page.get_by_role("heading", name="Batch 1").wait_for()
    assert page.evaluate("location.hash") == f"#/{run}/1"


def test_what_did_not_change_is_not_sent_again_and_a_hidden_page_asks_nothing(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    answers: list[int] = []
    page.on("response", lambda answer: answers.append(answer.status) if answer.url.endswith("/health") else None)
    stage.until(lambda: page.evaluate("1") and 304 in answers)
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { get: () => true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")

    def is_quiet() -> bool:
        answers.clear()
        page.wait_for_timeout(1_000)
        return not answers

    # What was asked for before may be answered yet.
    stage.until(is_quiet)
    page.wait_for_timeout(4_500)
    assert not answers
    assert page.locator("#live").inner_text() == "paused"
    page.evaluate("""() => {
        delete document.hidden;
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    stage.until(lambda: page.evaluate("1") and bool(answers))


def test_names_are_text_whatever_they_say(open_page: OpenPage, service: Service, run_name: str) -> None:
    bad = "<img src=x onerror=alert(1)>"
    run = stage.published(service.runs, run_name, stage.CONFIG, [two_groups(bad, "<script>alert(2)</script>")])
    run.begin_groups(0, [f"{bad}late"])
    page = drawn(open_page(f"#/{run_name}"))
    breaks = section(page, "Where merging broke")
    breaks.get_by_text(f"{bad} sample 1").wait_for()
    section(page, "Scores and advantages").locator("summary").click()
    section(page, "What waits, and for how long").get_by_text(f"{bad}late").wait_for()
    assert page.locator("img").count() == page.locator("script:not([src])").count() == 0


def test_nothing_moves_for_those_who_want_no_motion(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}", reduced_motion="reduce"))
    moving = "[...document.querySelectorAll('*')].filter(node => getComputedStyle(node).transitionDuration !== '0s')"
    assert page.evaluate(f"{moving}.length") == 0


def test_everything_that_is_drawn_or_chosen_has_a_name(open_page: OpenPage, run: str) -> None:
    page = drawn(open_page(f"#/{run}"))
    section(page, "What waits, and for how long")
    page.locator("section[aria-label='Timeline of ranks'] canvas").wait_for()
    unnamed = "[...document.querySelectorAll('canvas, select, nav, [tabindex=\"0\"]')].filter(n => !n.ariaLabel)"
    assert page.evaluate(f"{unnamed}.length") == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(node => Number(node.tagName[1]))")
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_an_empty_service_says_so(open_page: OpenPage, service: Service) -> None:
    page = open_page()
    page.get_by_text("No runs yet").wait_for()
    service.runs.create("first", stage.CONFIG)
    page.get_by_role("heading", name="first").wait_for()


def test_a_service_that_is_gone_is_reported_and_found_again(
    browser: Any, start_service: StartService, tmp_path: Path
) -> None:
    first = start_service("--journal-dir", str(tmp_path / "journal"))
    page = browser.new_page()
    page.clock.install()
    page.goto(first.http_url)
    page.get_by_text("No runs yet").wait_for()
    first.stop()
    page.locator("#live", has_text="no answer").wait_for()
    start_service("--journal-dir", str(tmp_path / "journal"), "--http-address", first.http_url.removeprefix("http://"))
    page.clock.fast_forward(30_000)  # the longest that it waits before it asks again
    page.locator("#live", has_text="live").wait_for()
    page.close()
