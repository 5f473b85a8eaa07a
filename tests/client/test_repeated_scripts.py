"""A worker's script that runs a second time does no harm, and says why it does nothing."""

from __future__ import annotations

import pytest

from gristmill import RolloutClient, RowOutcome
from tests.on_loop import Service

CONFIG = {"train_batch_size": 2, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
ROW = {"sample": 0, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}


def test_who_asks_for_groups_that_are_finished_is_told_why_there_are_none(
    service: Service, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        # Clients of other tests may have something to say in this process, too.
        return [text for text in caplog.messages if f"run {run_name!r}" in text]

    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        assert client.begin_groups(["given-up", "a", "b"]) == ["given-up", "a", "b"]
        client.abort_group("given-up")
        client.submit([{**ROW, "uid": "a"}, {**ROW, "uid": "b"}])
        assert warnings() == []
        assert client.begin_groups(["a", "b", "given-up"]) == []
        (advice,) = warnings()
        assert f"run {run_name!r}: no group of uid 'a' and others (3 in all) was begun" in advice
        assert "2 are already in batches, and 1 were dropped" in advice
        assert "round=1" in advice
        # It is no mere advice: another round has room for them, and what is sent of this one is not taken twice.
        assert client.begin_groups(["a"], round=1) == ["a"]
        assert client.submit([{**ROW, "uid": "a"}]) == [RowOutcome.DUPLICATE]
        assert len(warnings()) == 1
