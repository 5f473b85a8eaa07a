"""Every view of the page, as a person gets to it: what axe-core looks at in tests, and what pictures are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gristmill._wire.rows import from_rows
from gristmill_service.access.tokens import create_token
from gristmill_service.monitoring.health import findings
from gristmill_service.settings import Settings
from tests.on_loop import Run, Service
from tests.page import stage
from tests.serving import FREE_PORTS
from tests.tools.bench.workloads import workload

Open = Callable[[str], Any]
"""Opens the page at this URL."""

BUSY, HEAT, FAILED, FINISHED, SMALL = "swe-agent-7b", "math-64-ranks", "search-qa", "code-3b", "tool-use"
_SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstv" for vowel in "aeiou"]
_WORDS = 150_000


@dataclass(frozen=True)
class Services:
    """runs: one with runs in every state, and a tokenizer. empty: one without runs. closed: one that asks for a
    token."""

    runs: Service
    empty: Service
    closed: Service


@contextmanager
def staged(folder: Path, *, trained: int) -> Iterator[Services]:
    """Services with something to see. A rank counts as late after a moment. trained: batches that the largest run has
    behind it."""
    words = folder / "tokenizer.json"
    Tokenizer(WordLevel({_word(number): number for number in range(_WORDS)}, unk_token=_word(0))).save(str(words))
    tokens = folder / "tokens.yaml"
    create_token(tokens, "a person", ["viewer"], ["*"], None)
    base: dict[str, Any] = {**FREE_PORTS, "store": "memory", "shutdown_grace_s": 5}
    more: list[dict[str, Any]] = [{"tokenizer": words}, {}, {"tokens_file": tokens}]
    each = [Service(Settings(**base, **one)) for one in more]
    for service in each:
        service.start()
    with mock.patch.object(findings, "LATE_RANK_S", 0.01):
        try:
            services = Services(*each)
            _fill(services.runs, trained)
            yield services
        finally:
            for service in each:
                service.stop()


def _word(number: int) -> str:
    base = len(_SYLLABLES)
    return "".join(_SYLLABLES[number // base**place % base] for place in range(3)) + " "


def _fill(service: Service, trained: int) -> None:
    _busy(service, trained)
    work = workload("short")
    stage.published(
        service.runs, HEAT, stage.settings(work, merge="none", dp_size=64, micro_batch={"size": 7}), [work.steps]
    )
    _failed(service)
    _finished(service)
    rows = [row for uid in ("a", "b") for row in stage.group(uid)]
    stage.published(service.runs, SMALL, stage.CONFIG, [from_rows(rows, step_wise=True)])
    for number in range(14):
        service.runs.create(f"sweep-lr-{number}", stage.CONFIG)


def _busy(service: Service, trained: int) -> None:
    """An agents' run with that many batches behind it; of the next one rank is late, and groups of another are open."""
    work = workload("agent")
    service.runs.create(BUSY, stage.settings(work, merge="prefix", dp_size=8))
    run = service.runs.get(BUSY)
    for batch in range(trained):
        _train(run, batch, _rows(batch, groups=32, samples=8, solves={"": 0.1 + 0.04 * batch}), ranks=8, mini_batches=4)
    run.begin_groups(0, list(dict.fromkeys(work.steps.uids)))
    run.submit(stage.scored(work.steps))
    stage.until(lambda: run.status().batches_published == trained + 1)
    for rank in range(8):
        for mini_batch in range(2 - (rank == 5)):
            stage.acknowledge(run, rank, mini_batch, batch=trained)
    late = [f"late-{number}" for number in range(3)]
    run.begin_groups(0, late)
    first = stage.turn(late[0], 0, 0, range(20), range(30), is_last_step=False) | {"rollout_logprobs": [-1.0] * 30}
    run.submit(from_rows([first], step_wise=True))


def _failed(service: Service) -> None:
    """One row makes no two ranks."""
    sizes = {"n_samples_per_prompt": 1, "train_batch_size": 1, "micro_batch": {"max_tokens": 100}}
    service.runs.create(FAILED, {**stage.CONFIG, **sizes, "merge": "none", "on_misaligned": "error"})
    run = service.runs.get(FAILED)
    run.begin_groups(0, ["a"])
    run.submit(from_rows([stage.turn("a", 0, 0, [1], [2])], step_wise=True))
    stage.until(lambda: bool(run.status().failed_batches))


def _finished(service: Service) -> None:
    """A run that learned two tasks, all of it trained."""
    sizes = {"train_batch_size": 8, "n_samples_per_prompt": 4, "policy_mini_batch_size": 4}
    service.runs.create(FINISHED, {**stage.CONFIG, **sizes})
    run = service.runs.get(FINISHED)
    for batch in range(24):
        solves = {"math": 0.2 + batch / 40, "code": 0.1 + batch / 80}
        _train(run, batch, _rows(batch, groups=8, samples=4, solves=solves), ranks=2, mini_batches=2)
    run.finish()


def _rows(batch: int, *, groups: int, samples: int, solves: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of a batch, of one turn each. solves: by tag the share that is solved."""
    rng, tags = np.random.default_rng(batch), list(solves)
    lengths = rng.integers(20, 200, (groups, samples)).tolist()
    return [
        stage.turn(f"b{batch}-{group}", sample, 0, range(20), range(lengths[group][sample]), tag=tag)
        | {"reward": float(rng.random() < solves[tag]), "rollout_logprobs": [-1.0] * lengths[group][sample]}
        for group in range(groups)
        for tag in [tags[group % len(tags)]]
        for sample in range(samples)
    ]


def _train(run: Run, batch: int, rows: list[dict[str, Any]], *, ranks: int, mini_batches: int) -> None:
    run.begin_groups(0, list(dict.fromkeys(row["uid"] for row in rows)))
    run.submit(from_rows(rows, step_wise=True))
    stage.until(lambda: run.status().batches_published == batch + 1)
    for rank in range(ranks):
        for mini_batch in range(mini_batches):
            stage.acknowledge(run, rank, mini_batch, batch=batch, commit=True)


def _batch_of(page: Any) -> Any:
    page.locator("section[aria-label=History] dl").wait_for()
    page.locator("section[aria-label=Shards] canvas").first.wait_for()
    return page


def section(page: Any, name: str) -> Any:
    located = page.locator(f"section[aria-label='{name}']")
    located.scroll_into_view_if_needed()
    return located


def _empty(services: Services, open_: Open) -> Any:
    page = open_(services.empty.http_url)
    page.get_by_role("heading", name="No runs yet").wait_for()
    return page


def _sign_in(services: Services, open_: Open) -> Any:
    page = open_(services.closed.http_url)
    page.get_by_role("dialog", name="Sign in").wait_for()
    return page


def _stuck(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{BUSY}"))
    page.locator(".findings li.loud").wait_for()
    return page


def _row(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{SMALL}"))
    page.locator("section[aria-label=Shards] canvas").first.click(position={"x": 20, "y": 22})
    page.get_by_role("region", name="Tokens of row 0").wait_for()
    return page


def _breaks(services: Services, open_: Open, run: str = SMALL) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{run}"))
    section(page, "Where merging broke").locator("tbody tr").first.wait_for()
    section(page, "Scores and advantages").locator("canvas").first.wait_for()
    section(page, "Where merging broke").locator("h2").evaluate("title => title.scrollIntoView()")
    return page


def _tables(services: Services, open_: Open) -> Any:
    """All that can be opened is."""
    page = _row(services, open_)
    for name in ("Where merging broke", "Scores and advantages", "Distributions"):
        section(page, name).locator("canvas, table").first.wait_for()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    return page


def _heat(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{HEAT}"))
    canvas = section(page, "Load per rank and micro-step").locator("canvas")
    canvas.hover(position={"x": 120, "y": 60})
    return page


def _timeline(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{SMALL}"))
    section(page, "Timeline of ranks").locator("canvas").wait_for()
    return page


def _settings(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{SMALL}"))
    settings = section(page, "Settings")
    settings.locator("summary").first.click()
    settings.locator("tr").nth(1).wait_for()
    return page


def _search(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{SMALL}"))
    page.get_by_label("Find groups by uid").fill("a")
    page.get_by_role("button", name="Find", exact=True).click()
    page.get_by_role("region", name="Matching groups").wait_for()
    page.get_by_role("region", name="Matching groups").get_by_role("link").first.click()
    page.get_by_text("Marked: the rows of a").wait_for()
    return page


def _samples(services: Services, open_: Open) -> Any:
    page = _batch_of(open_(f"{services.runs.http_url}/#/{BUSY}"))
    section(page, "What waits, and for how long").get_by_role("link", name="late-0").click()
    page.get_by_role("button", name="tokens of sample 0 step 0").click()
    page.get_by_role("region", name="Tokens of sample 0 step 0").wait_for()
    return page


def _failed_batch(services: Services, open_: Open) -> Any:
    page = open_(f"{services.runs.http_url}/#/{FAILED}")
    page.locator(".findings dl").wait_for()
    return page


def _finished_run(services: Services, open_: Open) -> Any:
    page = open_(f"{services.runs.http_url}/#/{FINISHED}")
    page.locator("section[aria-label=History] figure").nth(8).wait_for()
    page.get_by_text("Figures of every batch").click()
    return page


def _freed_batch(services: Services, open_: Open) -> Any:
    return _batch_of(open_(f"{services.runs.http_url}/#/{FINISHED}/3"))


def _deleted(services: Services, open_: Open) -> Any:
    page = open_(f"{services.runs.http_url}/#/nobody")
    page.get_by_text("It was deleted, or never created.").wait_for()
    return page


VIEWS: dict[str, Callable[[Services, Open], Any]] = {
    "empty": _empty,
    "sign-in": _sign_in,
    "stuck": _stuck,
    "row": _row,
    "breaks": _breaks,
    "tables": _tables,
    "heat": _heat,
    "timeline": _timeline,
    "settings": _settings,
    "search": _search,
    "samples": _samples,
    "failed": _failed_batch,
    "finished": _finished_run,
    "freed": _freed_batch,
    "deleted": _deleted,
}
"""By name: gets to the view, and returns the page that shows it."""


def breaks_of_agents(services: Services, open_: Open) -> Any:
    """As the view of breaks, of many long rows."""
    return _breaks(services, open_, BUSY)
