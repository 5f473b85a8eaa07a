"""A short campaign in each mode; `make chaos` runs long ones."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import run_campaign

# The others take minutes each.
MODES = ("journal", "redis", "sentinel-durable")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_whatever_is_killed_every_accepted_row_takes_effect_once_an_epoch(mode: str) -> None:
    report = run_campaign(mode, faults=12, seed=7)
    found = report.document()
    assert report.is_clean, f"{found}; see {report.directory}"
    assert found["faults"] == 12
    assert found["rows_acknowledged"] > 300, "there was work to lose"
    assert len(found["by_kind"]) >= 7
