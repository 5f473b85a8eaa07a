"""How much the audit log has of refused calls."""

from __future__ import annotations

import httpx
from structlog.testing import capture_logs

from gristmill_service.access.gate import RefusalLog
from tests.access.conftest import Guarded


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_of_a_flood_there_is_a_line_a_second_that_counts_the_others() -> None:
    clock = Clock()
    log = RefusalLog(clock)
    with capture_logs() as lines:
        for _ in range(1000):
            log.note("team", "get_run", "PERMISSION_DENIED", "run", None)
        clock.now += 1
        log.note("team", "get_run", "PERMISSION_DENIED", "run", None)
    assert [(line["event"], line.get("count")) for line in lines] == [
        ("refused", None),
        ("refused, lines omitted", 999),
        ("refused", None),
    ]


def test_each_caller_call_and_status_has_lines_of_its_own() -> None:
    log = RefusalLog(Clock())
    with capture_logs() as lines:
        for _ in range(2):
            for caller in ("one", "other"):
                for call in ("get_run", "create_run"):
                    for code in ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED"):
                        log.note(caller, call, code, "run", 3)
    assert len({(line["caller"], line["call"], line["code"]) for line in lines}) == len(lines) == 8


def test_callers_without_number_share_lines() -> None:
    clock = Clock()
    log = RefusalLog(clock)
    with capture_logs() as lines:
        for number in range(10_000):
            log.note(f"caller {number}", "get_run", "PERMISSION_DENIED", "r" * 1_000_000, None)
        clock.now += 1
        log.flush()
    assert len(lines) < 300
    assert sum(line.get("count", 1) for line in lines) == 10_000
    assert max(len(str(line)) for line in lines) < 1000


def test_what_was_left_out_last_is_logged_at_the_end() -> None:
    log = RefusalLog(Clock())
    with capture_logs() as lines:
        for _ in range(3):
            log.note("team", "get_run", "PERMISSION_DENIED", None, None)
        log.flush()
        log.flush()
    assert [line.get("count") for line in lines] == [None, 2]


def test_tokens_that_are_not_known_are_logged_without_them(guarded: Guarded) -> None:
    url = f"{guarded.service.http_url}/v1/runs"
    with capture_logs() as lines:
        for number in range(5):
            httpx.get(url, headers={"authorization": f"Bearer gristmill_guess-{number}"}, trust_env=False)
    refused = [line for line in lines if line["event"] == "refused"]
    assert {(line["caller"], line["code"]) for line in refused} == {("unknown", "UNAUTHENTICATED")}
    assert "guess" not in str(lines)
