"""The blocks of the documents that are parts of a program: each is run with the code around it in a reader's own.

The README's, the guides' and named blocks are run whole, by tests of their own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
import trustme
import yaml

import gristmill.torch
from gristmill import MicroBatch, RolloutClient, TrainerClient
from gristmill_service.config import parse_config
from tests.on_loop import Service
from tests.rows import make_config

DOCS = Path(__file__).parents[1] / "docs"
COUNTS: dict[str, Any] = make_config(micro_batch={"size": 4}, step_wise=False)
ROW: dict[str, Any] = {"sample": 0, "prompt_token_ids": [1, 2], "response_ids": [3, 4], "loss_mask": [1, 1]}
NAMED = re.compile(r"<!-- [\w-]+ -->\n\Z")


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page that have no name before them."""
    text = (DOCS / page).read_text(encoding="utf-8")
    matches = re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [match[1] for match in matches if not NAMED.search(text[: match.start()])]


def block_with(page: str, text: str) -> str:
    """The only Python block of a page with this text."""
    (block,) = [block for block in blocks(page, "python") if text in block]
    return block


def run(block: str, service: Service, run_name: str, names: dict[str, Any]) -> None:
    code = block.replace("127.0.0.1:50051", service.grpc_address).replace('"my-run"', repr(run_name))
    exec(code, names)


def test_no_other_document_has_blocks_of_python_that_nothing_runs() -> None:
    pages = {
        str(path.relative_to(DOCS))
        for path in DOCS.rglob("*.md")
        if path.parent.name != "guides" and blocks(str(path.relative_to(DOCS)), "python")
    }
    assert pages == {"columns.md", "operations.md", "prefix_tree.md", "security.md", "shards.md", "table.md"}


def test_columns_are_declared_sent_and_chosen(service: Service, run_name: str) -> None:
    declared, *estimators = (yaml.safe_load(block) for block in blocks("columns.md", "yaml"))
    sent, chosen = block_with("columns.md", "client.trajectory"), block_with("columns.md", "TrainerClient(")
    for settings in estimators:
        parse_config(COUNTS | {"critic_mini_batch_size": 1} | settings | {"critic_mini_batch_size": 1})
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS | {"step_wise": True} | declared)
        client.begin_groups(["math/17"])
        variables: dict[str, Any] = {
            "client": client,
            "prompt_token_ids": [1, 2],
            "response_ids": [3],
            "routed_experts": np.full((2, 48, 8), 9, np.int16),
        }
        run(sent, service, run_name, variables)
    names: dict[str, Any] = {"TrainerClient": TrainerClient, "rank": 0}
    run(chosen, service, run_name, names)
    with names["trainer"] as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert "teacher_logprobs" in shard.tensors
        assert "routed_experts" not in shard.tensors
    with TrainerClient(service.grpc_address, run_name, rank=0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        read: dict[str, Any] = {"torch": torch, "shard": shard}
        run(block_with("columns.md", "micro.given("), service, run_name, read)
    assert read["given"][0].tolist() == [True, True, False]
    assert read["experts"][0, :, 0].tolist() == [[9] * 8, [9] * 8, list(range(8))]


def test_both_forms_of_a_sampling_mask_restrict_the_logits_alike(service: Service, run_name: str) -> None:
    column = {"name": "sampling_mask", "dtype": "int32", "scope": "response", "shape": [None], "required": True}
    names: dict[str, Any] = {"torch": torch, "kept_ids": [11, 17, 5, 6, 7], "offsets": [0, 2, 2, 5]}
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS | {"train_batch_size": 2, "policy_mini_batch_size": 2, "columns": [column]})
        for uid, form in (("a", "[[11, 17]"), ("b", "kept_ids")):
            run(block_with("columns.md", form), service, run_name, names)
            row = ROW | {"uid": uid, "reward": 1.0, "response_ids": [3, 4, 5], "loss_mask": [1, 1, 1]}
            client.submit([row | names["columns"]])
        client.finish()
    with TrainerClient(service.grpc_address, run_name, rank=0) as trainer:
        (names["shard"],) = next(iter(trainer)).mini_batches()
        names["model"] = lambda sequences, position_ids: torch.zeros(*sequences.shape, 20)
        run(block_with("columns.md", "kept = "), service, run_name, names)
        logprobs = names["logprobs"].reshape(-1, 3, 20)[:2]
    assert [[int(count) for count in row.isfinite().sum(-1)] for row in logprobs] == [[2, 20, 3]] * 2
    assert set(logprobs[0, 0].isfinite().nonzero().flatten().tolist()) == {11, 17}


def test_losses_are_weighted_as_documented(service: Service, run_name: str) -> None:
    (settings,) = (one for one in map(yaml.safe_load, blocks("columns.md", "yaml")) if "observation_weight" in one)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS | {"step_wise": True, "merge": "prefix"} | settings)
        with client.trajectory("a", 0) as trajectory:
            trajectory.step([1, 2], [3], columns={"loss_weight": [0.5]})
            trajectory.step([1, 2, 3, 4], [5], reward=1.0, is_last_step=True, columns={"loss_weight": [0.4]})
        client.finish()
    names: dict[str, Any] = {}
    run(block_with("columns.md", "weighted_loss"), service, run_name, names)
    with TrainerClient(service.grpc_address, run_name, rank=0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        (micro,) = shard.micro_batches()
        losses = torch.tensor([[1.0, 2.0, 4.0]])
        assert names["weighted_loss"](shard, micro, losses).item() == pytest.approx((0.5 + 0.2 + 1.6) / 1.0)


def test_what_trainers_write_back_is_written_as_documented(service: Service, run_name: str) -> None:
    every = [yaml.safe_load(block) for block in blocks("columns.md", "yaml")]
    (settings,) = (block for block in every if "kl_in_reward" in block)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS | settings)
        client.submit([{**ROW, "uid": "a", "reward": 1.0}])
        client.finish()

    def computed(micro: MicroBatch) -> torch.Tensor:
        return torch.zeros(micro["response_mask"].shape)

    with TrainerClient(service.grpc_address, run_name, rank=0) as trainer:
        names = {
            "trainer": trainer,
            "critic": computed,
            "old_logprobs": computed,
            "ref_logprobs": computed,
        }
        run(block_with("columns.md", "trainer.write("), service, run_name, names)
    assert service.runs.get(run_name).status().batches_freed == 1


def test_a_trainer_with_checkpoints_goes_on_as_operations_say(service: Service, run_name: str) -> None:
    (block,) = blocks("operations.md", "python")
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS)
        client.submit({**ROW, "uid": uid, "reward": 1.0} for uid in "abc")
        client.finish()
    saved: list[dict[str, Any]] = []

    class EnoughError(Exception):
        pass

    def save(state: dict[str, Any]) -> None:
        saved.append(state)
        if len(saved) == 1:
            raise EnoughError  # a crash between saving and committing

    names: dict[str, Any] = {
        "TrainerClient": TrainerClient,
        "address": service.grpc_address,
        "rank": 0,
        "dp_size": 1,
        "job_id": "first",
        "checkpoint": None,
        "train": lambda shard: None,
        "save": save,
    }
    with pytest.raises(EnoughError):
        run(block, service, run_name, names)
    names["trainer"].close()
    assert service.runs.get(run_name).status().batches_freed == 0
    run(block, service, run_name, names | {"job_id": "second", "checkpoint": saved[0]})
    assert len(saved) == 3
    assert service.runs.get(run_name).status().batches_freed == 3


def test_a_client_takes_its_token_and_authority_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Service, run_name: str
) -> None:
    (block,) = blocks("security.md", "python")
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("gristmill_secret")
    trustme.CA().cert_pem.write_to_path("ca.crt")
    names: dict[str, Any] = {}
    run(block, service, run_name, names)
    names["client"].close()


def test_tensors_come_in_the_types_that_are_asked_for(service: Service, run_name: str) -> None:
    (block,) = blocks("shards.md", "python")
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS)
        client.submit([{**ROW, "uid": "a", "reward": 1.0}])
    names: dict[str, Any] = {"TrainerClient": TrainerClient, "torch": torch, "rank": 0}
    run(block.replace('device="cuda"', 'device="cpu"'), service, run_name, names)
    with names["trainer"] as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert (shard["sequences"].dtype, shard["loss_mask"].dtype) == (torch.int64, torch.float32)


def test_a_batch_s_table_is_aggregated(service: Service, run_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("table.md", "python")
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS | {"n_samples_per_prompt": 2})
        client.submit({**ROW, "uid": "a", "sample": sample, "reward": float(sample)} for sample in range(2))
        client.finish()
    run(block, service, run_name, {"TrainerClient": TrainerClient, "pyarrow": pyarrow})
    assert "tokens_max: [[4]]" in capsys.readouterr().out


def test_a_model_trains_on_trees(service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a model of transformers: those are trained by tests/trainers/transformers."""
    (settings,) = (yaml.safe_load(block) for block in blocks("prefix_tree.md", "yaml"))
    (block,) = blocks("prefix_tree.md", "python")
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(COUNTS | {"n_samples_per_prompt": 2} | settings)
        client.submit({**ROW, "uid": "a", "sample": sample, "reward": float(sample)} for sample in range(2))
        client.finish()
    logits = torch.zeros(1, 6, 10, requires_grad=True)

    def model(tokens: torch.Tensor, *, position_ids: torch.Tensor, tree: Any, use_cache: bool) -> SimpleNamespace:
        # A prompt of two tokens is stored once, before two responses of two.
        assert tokens.shape == position_ids.shape == (1, 6)
        assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 4]
        return SimpleNamespace(logits=logits)

    models = SimpleNamespace(from_pretrained=lambda path, attn_implementation: model)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=models))
    monkeypatch.setattr(gristmill.torch, "register_tree_attention", lambda: "tree", raising=False)
    names: dict[str, Any] = {"path": "a model", "rank": 0, "device": "cpu"}
    run(block.replace('device="cuda"', 'device="cpu"') + "    break\n", service, run_name, names)
    assert logits.grad is not None
    assert logits.grad.any()
