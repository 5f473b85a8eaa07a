"""A worker's script that runs a second time does no harm, and says why it does nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from gristmill import RolloutClient, RowOutcome
from gristmill._client.rollout.finished_groups import FinishedGroups
from gristmill.v1 import rollout_pb2
from tests.client.faces import Connect
from tests.on_loop import Service

ROOT = Path(__file__).parents[2]

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
        assert f"run {run_name!r}: no group was begun of 3 requested (first uid 'a')" in advice
        assert "2 already in batches, 1 dropped" in advice
        assert "round=1" in advice
        # It is no mere advice: another round has room for them, and what is sent of this one is not taken twice.
        assert client.begin_groups(["a"], round=1) == ["a"]
        assert client.submit([{**ROW, "uid": "a"}]) == [RowOutcome.DUPLICATE]
        assert len(warnings()) == 1


def test_a_loop_over_finished_groups_is_told_once_and_asks_at_most_once_a_second(
    service: Service, run_name: str, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        client.begin_groups(["a", "b"])
        client.submit([{**ROW, "uid": "a"}, {**ROW, "uid": "b"}])
        began = time.monotonic()
        for _ in range(5):
            assert client.begin_groups(["a", "b"]) == []
        assert time.monotonic() - began > 0.02 + 0.04 + 0.08 + 0.16
        assert client.begin_groups(["c", "b"]) == ["c"]
    (told,) = [text for text in caplog.messages if f"run {run_name!r}: no group was begun" in text]
    assert "end the loop over begin_groups when it returns []" in told
    finished, request = FinishedGroups(run_name), rollout_pb2.BeginGroupsRequest(uids=["a"])
    answer = rollout_pb2.BeginGroupsResponse(admissions=[rollout_pb2.GROUP_ADMISSION_DROPPED])
    pauses = [finished.pause_s(request, answer) for _ in range(100)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert pauses[7:] == [1.0] * 93
    # A feed that skips what is finished asks for other groups each time.
    assert finished.pause_s(rollout_pb2.BeginGroupsRequest(uids=["b"]), answer) == 0


def test_every_loop_over_begin_groups_that_the_project_shows_ends_with_an_empty_answer() -> None:
    folders = ("README.md", "docs", "examples", "clients/demo", "clients/python/gristmill")
    paths = [path for name in folders for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file()]
    texts = {path: path.read_text() for path in paths if path.suffix in (".md", ".py")}
    assert sum("while admitted := " in text for text in texts.values()) >= 5
    loop = re.compile(r"^( *)while (?!.*:=).*:\n(?:\1 +.*\n){0,4}?\1 +.*begin_groups\((?:.*\n){3}", re.MULTILINE)
    endless = [
        path for path, text in texts.items() for found in loop.finditer(text) if "if not admitted" not in found[0]
    ]
    assert endless == []
