"""A short campaign in some modes, of each kind of run; `make chaos` runs long ones of all."""

from __future__ import annotations

import pytest

from tests.tools.chaos.campaign import run_campaign
from tests.tools.chaos.kinds import COLUMNS, PLAIN

# The others take minutes each. Each strikes in every way that its mode has, and kills the sentinels' master five times.
CAMPAIGNS = (("journal", COLUMNS, 10, 10), ("redis", PLAIN, 17, 17), ("sentinel-durable", COLUMNS, 15, 11))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "kind", "faults", "ways"), CAMPAIGNS)
def test_whatever_is_killed_every_accepted_row_takes_effect_once_an_epoch(
    mode: str, kind: str, faults: int, ways: int
) -> None:
    report = run_campaign(mode, faults=faults, seed=7, kind=kind)
    document = report.document()
    assert report.is_clean, f"{document}; see {report.directory}"
    assert document["faults"] == faults
    assert document["rows_acknowledged"] > 300, "there was work to lose"
    assert len(document["by_kind"]) == ways
    assert (document["written_values_trained"] > 1000) == (kind == COLUMNS)
