"""Trainings of 20 steps, in which the policy learns what it is rewarded for."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from gristmill import RolloutClient
from tests.on_loop import Service
from tests.trainers.skyrl.play import save_model
from tests.trainers.skyrl.run import main

STEPS = 20


@pytest.mark.usefixtures("ray_address")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "fully async"])
def test_the_policy_learns(service: Service, run_name: str, tmp_path: Path, is_async: bool) -> None:
    save_model(tmp_path / "model")
    trained = main(
        service.grpc_address,
        run_name,
        str(tmp_path),
        STEPS,
        is_async,
        trainer__placement__policy_num_gpus_per_node=2,
    )
    logs = [log for log in trained.logs if "gristmill/score_mean" in log]
    scores = [log["gristmill/score_mean"] for log in logs]
    assert [log["step"] for log in logs] == list(range(1, STEPS + 1))
    assert fmean(scores[-5:]) > fmean(scores[:5]) + 0.2, scores
    assert all(log["gristmill/rows"] < log["gristmill/rows_received"] for log in logs), "turns were merged"
    with RolloutClient(service.grpc_address, run_name) as client:
        status = client.status()
        assert status.policy_version == STEPS
        assert status.batches_freed == STEPS
        staleness = [log["gristmill/staleness_max"] for log in logs]
        assert max(staleness) > 0 if is_async else max(staleness) == 0
        assert status.config["merge"] == "prefix"
