"""What /metrics makes of a run's status."""

from __future__ import annotations

from gristmill_service.config import parse_config
from gristmill_service.metrics import Metrics
from gristmill_service.run.state import State
from gristmill_service.run.status import status
from tests.run.harness import CONFIG


def test_lost_rows_are_told_apart_from_what_clients_gave_up():
    state = State.initial(parse_config(CONFIG))
    state.groups_dropped |= {"rows_lost": 2, "the environment crashed": 1, "bad prompt": 3}
    metrics = Metrics()
    metrics.watch(lambda: [status(state, run="run", config_json="{}", room=0, duplicates=0)], lambda: 0)
    found = [line for line in metrics.text().decode().splitlines() if line.startswith("gristmill_groups_dropped_total")]
    assert sorted(found) == [
        'gristmill_groups_dropped_total{reason="aborted",run="run"} 4.0',
        'gristmill_groups_dropped_total{reason="rows_lost",run="run"} 2.0',
    ]
