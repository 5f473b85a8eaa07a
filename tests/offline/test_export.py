"""A batch of a running service, written to a file and laid out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from gristmill import RolloutClient, TrainerClient
from tests.cli.terminal import gristmill, gristmill_process
from tests.on_loop import Service
from tests.rows import make_config

CONFIG = make_config(
    train_batch_size=2, n_samples_per_prompt=2, micro_batch={"max_tokens": 64}, dp_size=2, merge="prefix"
)


def fill(address: str, run: str, **settings: object) -> None:
    with RolloutClient(address, run) as client:
        client.create_run({**CONFIG, **settings})
        client.begin_groups(["a", "b"], tag={"a": "math"})
        for uid in ("a", "b"):
            for sample in range(2):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1, 2], [3, 4 + sample], reward=0.5, rollout_logprobs=[-0.1, -0.2])
                    trajectory.step(
                        [1, 2, 3, 4 + sample, 9], [7], reward=float(sample), rollout_logprobs=[-0.3], is_last_step=True
                    )
            # Groups are in a batch in the order in which they were complete.
            client.flush()


def test_the_address_is_taken_from_the_environment_as_by_the_other_commands(
    service: Service, run_name: str, tmp_path: Path
) -> None:
    fill(service.grpc_address, run_name)
    out = tmp_path / "rollouts.jsonl"
    exported = gristmill("export", run_name, 0, "--out", out, GRISTMILL_ADDRESS=service.grpc_address)
    assert (exported.returncode, exported.stderr) == (0, "")


@pytest.mark.parametrize(
    "settings",
    [{}, {"zero_variance_filter": "replace"}, {"micro_batch": {"count": 3}, "tag_shares": {"math": {"min": 0.5}}}],
    ids=["", "groups_replaced", "counted_and_shared"],
)
def test_an_exported_batch_is_laid_out_as_the_service_did(
    service: Service, run_name: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    fill(service.grpc_address, run_name, **settings)
    # The run's name is in the shards.
    rollouts, config = tmp_path / f"{run_name}.jsonl.gz", tmp_path / "run.yaml"
    exported = gristmill(
        "export", run_name, 0, "--out", rollouts, "--config", config, "--address", service.grpc_address
    )
    assert (exported.returncode, exported.stderr) == (0, "")
    made = gristmill("batch", rollouts, "--config", config, "--out", tmp_path / "out")
    assert made.returncode == 0, made.stderr

    run = service.runs.get(run_name)
    plan = json.loads(run.batch(0).plan)
    assert json.loads((tmp_path / "out/batch-00000/plan.json").read_text()) == plan
    assert plan["tags"] == ["math", ""]
    paths = sorted((tmp_path / "out/batch-00000").glob("*/*.safetensors"))
    assert len(paths) == 4
    from gristmill_service.pipeline.scheduling.plan import ShardAddress

    for path in paths:
        address = ShardAddress("policy", int(path.parent.name[-3:]), int(path.stem[-3:]))
        ours, theirs = load(path.read_bytes()), load(b"".join(run.read_shard(0, address)))
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in ours)


def test_all_complete_groups_of_a_run_are_exported_and_planned(service: Service, run_name: str, tmp_path: Path) -> None:
    address, out, config = service.grpc_address, tmp_path / "rollouts.jsonl", tmp_path / "run.yaml"
    command = ("export", run_name, "--out", out, "--config", config, "--address", address)
    with RolloutClient(address, run_name) as client:
        client.create_run(CONFIG)
        assert "nothing to export; retry later" in gristmill(*command, expect=1).stderr
        fill(address, run_name)
        client.begin_groups(["c", "d"])
        for uid, samples in (("c", 2), ("d", 1)):
            for sample in range(samples):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1, 2], [3], reward=0.5, rollout_logprobs=[-0.1], is_last_step=True)
    gristmill(*command, expect=0)
    # One sample of d is missing.
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["uid"] for row in rows] == ["a"] * 4 + ["b"] * 4 + ["c"] * 2
    compared = json.loads(gristmill("plan", out, "-c", config, "--json", expect=0).stdout)["configurations"]
    assert [(one["groups"], one["reason"]) for one in compared] == [(3, "")]


def test_a_finished_run_that_is_trained_has_nothing_left_to_export(
    service: Service, run_name: str, tmp_path: Path
) -> None:
    address = service.grpc_address
    with RolloutClient(address, run_name) as client:
        client.create_run(CONFIG)
        fill(address, run_name)
        client.finish()
    with TrainerClient(address, run_name, ranks="all", dp_size=CONFIG["dp_size"]) as trainer:
        for batch in trainer:
            batch.ack()
    command = ("--out", tmp_path / "rollouts.jsonl", "--address", address)
    assert "nothing to export; export batches before they" in gristmill("export", run_name, *command, expect=1).stderr
    assert "batch 1 does not exist: the run is finished" in gristmill("export", run_name, 1, *command, expect=1).stderr


@pytest.mark.slow
def test_what_cannot_be_exported_is_reported_in_one_line_and_leaves_no_file(
    service: Service, run_name: str, tmp_path: Path
) -> None:
    out = tmp_path / "rollouts.jsonl"
    refused = gristmill_process("export", run_name, 0, "--out", out, "--address", service.grpc_address)
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: run ")
    assert "does not exist" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_client_learns_what_became_of_every_group(service: Service, run_name: str) -> None:
    fill(service.grpc_address, run_name)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.begin_groups(["c", "d", "e"])
        client.abort_group("c", reason="bad prompt")
        groups = {group.uid: group for group in client.groups()}
    assert {uid: (group.state, group.batch, group.reason) for uid, group in groups.items()} == {
        "a": ("sealed", 0, ""),
        "b": ("sealed", 0, ""),
        "c": ("dropped", None, "bad prompt"),
        "d": ("open", None, "samples not begun: 2"),
        "e": ("open", None, "samples not begun: 2"),
    }
    assert [uid for uid, group in sorted(groups.items()) if group.is_consumed] == ["a", "b", "c"]
