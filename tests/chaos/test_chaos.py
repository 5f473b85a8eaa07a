"""A short campaign in some modes, of each kind of run; `make chaos` runs long ones of all."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import run_campaign
from tests.chaos.kinds import COLUMNS, PLAIN

# The others take minutes each.
CAMPAIGNS = (("journal", COLUMNS), ("redis", PLAIN), ("sentinel-durable", COLUMNS))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "kind"), CAMPAIGNS)
def test_whatever_is_killed_every_accepted_row_takes_effect_once_an_epoch(mode: str, kind: str) -> None:
    report = run_campaign(mode, faults=12, seed=7, kind=kind)
    found = report.document()
    assert report.is_clean, f"{found}; see {report.directory}"
    assert found["faults"] == 12
    assert found["rows_acknowledged"] > 300, "there was work to lose"
    assert len(found["by_kind"]) >= 7
    assert (found["written_values_trained"] > 1000) == (kind == COLUMNS)
