"""The whole of verl's main_ppo trains runs: it learns, is killed and goes on, and writes back what advantages need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2ForCausalLM
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_multi_turn_optimal_token_baseline_advantage,
)

from gristmill import NotFoundError, RolloutClient
from gristmill._torch.conversion import Conversion
from gristmill._torch.shard_files import parse_shard
from gristmill._wire.addresses import Position
from gristmill.torch import Shard
from tests.on_loop import Service
from tests.trainers.verl import tiny_model
from tests.trainers.verl.main_ppo import MainPpo, weights
from tests.trainers.verl.rollouts import rollouts
from tests.trainers.verl.verl_settings import CPU, batches, model

pytestmark = pytest.mark.timeout(2400)

Start = Callable[..., MainPpo]


@pytest.fixture
def rollout_client(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name, timeout_s=600) as client:
        yield client


@pytest.fixture
def start(rollout_client: RolloutClient, service: Service, tmp_path: Path) -> Iterator[Start]:
    """Starts main_ppo on the test's run, with the checkpoints in the test's folder, as often as it is asked."""
    tiny_model.save(tmp_path / "model")
    started: list[MainPpo] = []

    def start(*overrides: str) -> MainPpo:
        settings = [
            *CPU,
            model(tmp_path / "model"),
            "trainer.v1.trainer_mode=gristmill",
            f"+trainer.v1.gristmill.address={service.grpc_address}",
            f"+trainer.v1.gristmill.run={rollout_client.run}",
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        ]
        started.append(MainPpo([*settings, *overrides], tmp_path / f"main_ppo-{len(started)}.log"))
        return started[-1]

    yield start
    for one in started:
        one.close()


def run_exists(client: RolloutClient) -> bool:
    try:
        client.status()
    except NotFoundError:
        return False
    return True


def trained(client: RolloutClient) -> int:
    """Batches that all ranks have acknowledged."""
    return min(position.batch for position in client.status().models["policy"].next)


# --- A run that learns

TARGET, TURN = 7, 4


class Player:
    """Samples two turns from the weights of verl's checkpoints; the score is the share of TARGET among them."""

    def __init__(self, client: RolloutClient, folder: Path) -> None:
        self._client, self._folder = client, folder
        self._policy = Qwen2ForCausalLM.from_pretrained(folder / "model")
        torch.manual_seed(0)

    def load(self, version: int) -> None:
        if version:
            step = self._folder / "checkpoints" / f"global_step_{version}"
            self._policy = Qwen2ForCausalLM.from_pretrained(step / "actor" / "huggingface")

    @torch.no_grad()
    def _turn(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their logprobs, (rows, TURN)."""
        tokens, logprobs = prompts, []
        for _ in range(TURN):
            logits = self._policy(tokens).logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(logits.exp(), 1)
            logprobs.append(logits.gather(-1, chosen))
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens[:, -TURN:], torch.cat(logprobs, dim=1)

    def play(self, uid: str, samples: int, version: int) -> float:
        """A group; returns its mean score."""
        question = torch.randint(2, tiny_model.WORDS, (1, 3)).expand(samples, 3)
        first, first_logprobs = self._turn(question)
        prompts = torch.cat([question, first, torch.randint(2, tiny_model.WORDS, (1, 2)).expand(samples, 2)], dim=1)
        second, second_logprobs = self._turn(prompts)
        scores = (torch.cat([first, second], dim=1) == TARGET).float().mean(-1)
        self._client.begin_groups([uid])
        for sample in range(samples):
            with self._client.trajectory(uid, sample, policy_version=version) as trajectory:
                trajectory.step(
                    question[sample].tolist(),
                    first[sample].tolist(),
                    rollout_logprobs=first_logprobs[sample].tolist(),
                )
                trajectory.step(
                    prompts[sample].tolist(),
                    second[sample].tolist(),
                    rollout_logprobs=second_logprobs[sample].tolist(),
                    reward=float(scores[sample]),
                    is_last_step=True,
                )
        return float(scores.mean())


def test_a_policy_learns_from_rollouts_of_its_own_checkpoints(
    start: Start, rollout_client: RolloutClient, tmp_path: Path
) -> None:
    steps, groups, samples = 20, 4, 16
    trainer = start(
        *batches(groups, samples, mini_batch=2, micro_batch=8),
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "+trainer.v1.gristmill.settings={merge: prefix}",
    )
    trainer.wait_until(partial(run_exists, rollout_client))
    player, scores = Player(rollout_client, tmp_path), []
    for step in range(steps):
        trainer.wait_until(lambda step=step: rollout_client.policy_version() >= step)  # type: ignore[misc]
        player.load(step)
        scores.append(sum(player.play(f"{step}-{group}", samples, step) for group in range(groups)) / groups)
    trainer.wait()
    assert sum(scores[:3]) / 3 < 0.1
    assert sum(scores[-3:]) / 3 > 0.5
    tokens = groups * samples * (3 + TURN + 2 + TURN)
    assert trainer.metrics("perf/total_num_tokens") == [tokens] * steps, "two turns are one row"
    assert trainer.metrics("gristmill/score_mean") == pytest.approx(scores, abs=1e-6)
    assert trainer.metrics("training/global_step") == list(range(1, steps + 1))
    # Old logprobs are the sampled ones: of float32 weights at first, then of verl's bfloat16 for Hugging Face.
    differences = trainer.metrics("training/rollout_probs_diff_max")
    assert differences[0] < 1e-6
    assert max(differences) < 0.05


# --- Killed, and going on

STEPS, SAVE_FREQ, RANKS, GROUPS, SAMPLES = 6, 2, 2, 4, 2
FIXED = [
    *batches(GROUPS, SAMPLES, mini_batch=2, micro_batch=4),
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={SAVE_FREQ}",
    f"trainer.n_gpus_per_node={RANKS}",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "+trainer.v1.gristmill.settings={merge: prefix, seal_order: admission}",
]


def submit(client: RolloutClient, number: int, *, most_turns: int = 3, trains_last: bool = False) -> None:
    """The rollouts of a batch, which are the same in every run. trains_last: also each response's last token."""
    rows = rollouts(GROUPS, SAMPLES, seed=number, most_turns=most_turns)
    for row in rows:
        row["uid"] = f"{number}-{row['uid']}"
        row["loss_mask"][-1] |= trains_last
    client.begin_groups(list(dict.fromkeys(row["uid"] for row in rows)))
    client.submit(rows)


def test_a_trainer_that_is_killed_ends_with_the_weights_of_one_that_was_not(
    start: Start, rollout_client: RolloutClient, service: Service, tmp_path: Path
) -> None:
    undisturbed = start(
        *FIXED, f"trainer.default_local_dir={tmp_path / 'undisturbed'}", "trainer.v1.gristmill.run=other"
    )
    with RolloutClient(service.grpc_address, "other", timeout_s=600) as other:
        undisturbed.wait_until(partial(run_exists, other))
        for number in range(STEPS):
            submit(other, number)
        undisturbed.wait()

    killed = start(*FIXED)
    killed.wait_until(partial(run_exists, rollout_client))
    for number in range(SAVE_FREQ + 1):
        submit(rollout_client, number)
    # Past the checkpoint of step 2: batch 2 is trained and lost, batch 3 is not there yet.
    killed.wait_until(lambda: trained(rollout_client) == SAVE_FREQ + 1)
    killed.kill()
    resumed = start(*FIXED)
    for number in range(SAVE_FREQ + 1, STEPS):
        submit(rollout_client, number)
    resumed.wait()

    assert resumed.metrics("training/global_step") == list(range(SAVE_FREQ + 1, STEPS + 1))
    assert rollout_client.policy_version() == STEPS
    assert trained(rollout_client) == STEPS
    assert rollout_client.status().batches_freed == STEPS, "the last checkpoint has all of it"
    saved = json.loads((tmp_path / "checkpoints" / f"global_step_{STEPS}" / "gristmill.json").read_text())
    assert saved["policy"]["batch"] == STEPS
    expected = weights(tmp_path / "undisturbed", STEPS, RANKS)
    for shard, other_shard in zip(weights(tmp_path / "checkpoints", STEPS, RANKS), expected, strict=True):
        assert shard.keys() == other_shard.keys()
        for name, weight in shard.items():
            assert weight.equal(other_shard[name]), name


# --- What advantages depend on

KL, GAMMA, LAMBDA = 0.5, 0.9, 0.8
GAE = [
    *batches(GROUPS, SAMPLES, mini_batch=2, micro_batch=4),
    "trainer.total_training_steps=9",
    "trainer.save_freq=8",
    "algorithm.adv_estimator=gae",
    f"algorithm.gamma={GAMMA}",
    f"algorithm.lam={LAMBDA}",
    "algorithm.use_kl_in_reward=True",
    f"algorithm.kl_ctrl.kl_coef={KL}",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.optim.lr=0.01",
]
OTB = [
    *batches(GROUPS, SAMPLES, mini_batch=2, micro_batch=4),
    "trainer.total_training_steps=9",
    "trainer.save_freq=8",
    "algorithm.adv_estimator=tir_optimal_token_baseline",
    "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
]
OF_RESPONSES = ("loss_mask", "rewards", "values", "old_logprobs", "ref_logprobs", "advantages", "returns")


class Rows(NamedTuple):
    """Of a batch, without padding rows. sequences, uids: of each row. others: by name of the tokens of responses,
    (rows, longest response), 0 behind each."""

    sequences: list[list[int]]
    others: dict[str, torch.Tensor]
    uids: list[str]


def rows_of(service: Service, run: str, batch: int, names: tuple[str, ...] = OF_RESPONSES) -> Rows:
    """What the service gave the trainer."""
    parts, uids = dict[str, list[torch.Tensor]](), list[str]()
    for mini_batch in range(2):
        url = f"{service.http_url}/v1/runs/{run}/batches/{batch}/policy/{mini_batch}/0"
        with urlopen(url, timeout=600) as answer:
            tensors, metadata = parse_shard(np.frombuffer(bytearray(answer.read()), np.uint8), url)
        shard = Shard(tensors, metadata, Conversion(), Position(batch, 0, mini_batch), is_mapped=False)
        is_real = (shard["is_padding"] == 0).tolist()
        uids += [uid for uid, real in zip(metadata["uids"], is_real, strict=True) if real]
        for name in ("sequences", *names):
            jagged = shard.jagged(name, "row" if name == "sequences" else "response")
            rows = [row for row, real in zip(jagged.nested().unbind(), is_real, strict=True) if real]
            parts.setdefault(name, []).extend(rows)
    sequences = [row.tolist() for row in parts.pop("sequences")]
    return Rows(sequences, {name: pad_sequence(each, batch_first=True) for name, each in parts.items()}, uids)


@torch.no_grad()
def logprobs_of(policy: Qwen2ForCausalLM, sequences: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    """Of each response's tokens, shaped as the mask of them, which are trained up to the last."""
    logprobs = torch.zeros(like.shape)
    for row, sequence in enumerate(sequences):
        tokens, length = torch.tensor([sequence]), int(like[row].nonzero().max()) + 1
        logprobs[row, :length] = (
            policy(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[-length:, 0]
        )
    return logprobs


def test_values_and_the_kl_are_written_back_and_a_finished_run_ends_training(
    start: Start, rollout_client: RolloutClient, service: Service, tmp_path: Path
) -> None:
    critic = [f"critic.model.path={tmp_path / 'model'}", "+critic.model.override_config.attn_implementation=eager"]
    trainer = start(*GAE, *critic)
    trainer.wait_until(partial(run_exists, rollout_client))
    for number in range(2):
        # verl takes no reward of a token that is not trained, and each turn for itself.
        submit(rollout_client, number, most_turns=1, trains_last=True)
    trainer.wait_until(lambda: trained(rollout_client) == 2)
    by_batch = [rows_of(service, rollout_client.run, batch) for batch in range(2)]
    rollout_client.finish()
    trainer.wait()

    reference = Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    for sequences, rows, _ in by_batch:
        mask = rows["loss_mask"].float()
        expected = logprobs_of(reference, sequences, mask)
        torch.testing.assert_close(rows["ref_logprobs"] * mask, expected * mask, rtol=0, atol=1e-4)
        advantages, returns = compute_gae_advantage_return(rows["rewards"], rows["values"], mask, GAMMA, LAMBDA)
        torch.testing.assert_close(rows["returns"] * mask, returns * mask, rtol=0, atol=1e-4)
        torch.testing.assert_close(rows["advantages"] * mask, advantages * mask, rtol=0, atol=1e-4)
        assert rows["values"][mask != 0].std() > 1e-3
    differences = [(rows["old_logprobs"] - rows["ref_logprobs"]) * rows["loss_mask"] for _, rows, _ in by_batch]
    # The policy is the reference at first, and its KL to it is nothing.
    assert differences[0].abs().max() < 1e-5
    assert differences[1].abs().max() > 1e-2
    # What is left of the rewards, 0 or 1 for the last token.
    scores = by_batch[1].others["rewards"] + KL * differences[1]
    torch.testing.assert_close(scores, scores.round(), rtol=0, atol=1e-4)

    assert trainer.metrics("training/global_step") == [1, 2]
    assert len(trainer.metrics("critic/vf_loss")) == len(trainer.metrics("critic/values/mean")) == 2
    assert (tmp_path / "checkpoints" / "global_step_2" / "gristmill.json").exists()
    assert rollout_client.status().batches_freed == 2


def test_the_optimal_token_baseline_is_that_of_verl_for_what_its_workers_wrote_back(
    start: Start, rollout_client: RolloutClient, service: Service, tmp_path: Path
) -> None:
    trainer = start(*OTB)
    trainer.wait_until(partial(run_exists, rollout_client))
    submit(rollout_client, 0, most_turns=1, trains_last=True)
    trainer.wait_until(lambda: trained(rollout_client) == 1)
    names = ("loss_mask", "rewards", "old_logprobs", "sum_pi_squared", "advantages", "returns")
    sequences, rows, uids = rows_of(service, rollout_client.run, 0, names)
    rollout_client.finish()
    trainer.wait()

    policy, mask = Qwen2ForCausalLM.from_pretrained(tmp_path / "model"), rows["loss_mask"].float()
    torch.testing.assert_close(
        rows["old_logprobs"] * mask, logprobs_of(policy, sequences, mask) * mask, rtol=0, atol=1e-4
    )
    for row, sequence in enumerate(sequences):
        length = int(mask[row].nonzero().max()) + 1
        squares = policy(torch.tensor([sequence])).logits[0, :-1].softmax(-1).square().sum(-1)[-length:]
        torch.testing.assert_close(rows["sum_pi_squared"][row, :length], squares.detach(), rtol=0, atol=1e-4)
    advantages, returns = compute_multi_turn_optimal_token_baseline_advantage(
        rows["rewards"], mask, np.array(uids, dtype=object), rows["old_logprobs"], rows["sum_pi_squared"]
    )
    torch.testing.assert_close(rows["advantages"] * mask, advantages, rtol=0, atol=1e-4)
    torch.testing.assert_close(rows["returns"] * mask, returns * mask, rtol=0, atol=1e-4)
    assert advantages.abs().max() > 0.1
