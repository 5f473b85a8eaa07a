"""A short campaign in some modes, of each kind of run; `make chaos` runs long ones of all."""

from __future__ import annotations

import pytest

from tests.tools.chaos.campaign import run_campaign
from tests.tools.chaos.kinds import COLUMNS, PLAIN

# The others take minutes each.
CAMPAIGNS = (("journal", COLUMNS), ("redis", PLAIN), ("sentinel-durable", COLUMNS))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "kind"), CAMPAIGNS)
def test_whatever_is_killed_every_accepted_row_takes_effect_once_an_epoch(mode: str, kind: str) -> None:
    report = run_campaign(mode, faults=12, seed=7, kind=kind)
    document = report.document()
    assert report.is_clean, f"{document}; see {report.directory}"
    assert document["faults"] == 12
    assert document["rows_acknowledged"] > 300, "there was work to lose"
    assert len(document["by_kind"]) >= 7
    assert (document["written_values_trained"] > 1000) == (kind == COLUMNS)
