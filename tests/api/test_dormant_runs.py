"""Dormant runs over the APIs: reports show them as they were and do not open them; calls do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_service.settings import Settings
from tests.api.apis import GrpcApi, HttpApi
from tests.faults.services import CONFIG, group, train
from tests.metrics.scraping import scrape
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """One with a dormant run, `run`, of one trained batch."""
    settings = Settings(**FREE_PORTS, journal_dir=tmp_path / "runs", shared_memory_dir=tmp_path, shutdown_grace_s=5)
    service = Service(settings)
    service.start()
    api = GrpcApi(service.grpc_address)
    api.create("run", CONFIG)
    api.submit("run", [*group("a"), *group("b")])
    train(api, "run", 0)
    api.finish("run")
    api.close()
    service.runs._target._dormant._after_s = 0.0
    wait_until(lambda: service.runs.own() == [])
    service.runs._target._dormant._after_s = 3600.0
    yield service
    service.stop()


def test_reports_show_a_dormant_run_as_it_was_and_do_not_open_it(service: Service) -> None:
    over_grpc, over_http = GrpcApi(service.grpc_address), HttpApi(service.http_url)
    names = [api.names() for api in (over_grpc, over_http)]
    assert names == [["run"], ["run"]]
    for status in (over_grpc.get("run"), over_http.get("run")):
        assert status["finished"]
        assert (status["batches_sealed"], status["batches_freed"], status["rows_accepted"]) == (1, 1, 4)
    overview = over_http.call("GET", "/overview").json()
    [entry] = overview["runs"]
    assert entry["state"] == "finished"
    assert entry["summary"]
    assert (entry["batches_freed"], entry["groups_open"], entry["findings"]) == (1, 0, 0)
    assert entry["last_event"] <= time.time()
    scraped = scrape(service.http_url)
    assert scraped.runs() == set()
    assert scraped.of("gristmill_leases")["dormant"] == 1
    assert service.runs.own() == []
    over_grpc.close()
    over_http.close()


def test_a_call_opens_it_and_its_counters_begin_at_0(service: Service) -> None:
    api = HttpApi(service.http_url)
    assert api.batch("run", 1)["state"] == "end"
    assert [run.name for run in service.runs.own()] == ["run"]
    scraped = scrape(service.http_url)
    assert set(scraped.of("gristmill_rows_total").values()) == {0}
    assert scraped.one("gristmill_batches_total", stage="freed") == 1, "the run's own history goes on"
    assert api.call("GET", "/overview").json()["runs"][0]["state"] == "finished"
    api.close()
