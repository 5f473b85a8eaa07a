"""Routed experts and sample support reach SkyRL 0.4's workers as it packs them itself, and survive a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

from skyrl.train.generators.base import GeneratorInput, GeneratorOutput

from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer
from gristmill.adapters.skyrl._batches import BatchRows
from gristmill.adapters.skyrl._replay import generator_output
from gristmill.converters import from_skyrl
from tests.on_loop import Service
from tests.trainers.skyrl.play import Recorded, config, save_model
from tests.trainers.skyrl.training import train

pytest.importorskip("skyrl.backends.skyrl_train.utils.packed_tensor", reason="SkyRL 0.3 has none")

ROUTES, SUPPORT = "rollout_expert_indices", "rollout_sample_support"
COLUMNS = [
    {"name": ROUTES, "dtype": "int16", "scope": "token", "shape": [1, 2], "partial": True},
    {"name": SUPPORT, "dtype": "int32", "scope": "response", "shape": [3], "fill": -1},
]


def routes_of(tokens: list[int]) -> np.ndarray:
    """Each token's route is the token and the one after it; the last was never forwarded."""
    ids = np.array(tokens[:-1], np.int16)
    return np.stack([ids, ids + 1], axis=1)[:, None]


class Routed(Recorded):
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await super().generate(input_batch)
        pairs = list(zip(output["prompt_token_ids"], output["response_ids"], strict=True))
        output[ROUTES] = [routes_of([*prompt, *response]) for prompt, response in pairs]
        output[SUPPORT] = [np.repeat(np.array(response, np.int32)[:, None], 3, axis=1) for _, response in pairs]
        return output


@pytest.mark.usefixtures("ray_address")
@pytest.mark.parametrize("merges", [False, True])
def test_side_channels_are_packed_on_their_own_tokens(
    service: Service, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merges: bool
) -> None:
    save_model(tmp_path / "model")
    inputs: list[Any] = []

    def training_input(self: BatchRows, columns: Any = ()) -> Any:
        inputs.append(making(self, columns))
        return inputs[-1]

    making = BatchRows.training_input
    monkeypatch.setattr(BatchRows, "training_input", training_input)
    cfg = config(tmp_path, generator__merge_stepwise_output=merges)
    gristmill = Gristmill(service.grpc_address, run_name, settings={"columns": COLUMNS})
    train(GristmillPPOTrainer, cfg, Routed(cfg), prompts=4, gristmill=gristmill)
    batch = inputs[0]
    for row, real in enumerate(batch["attention_mask"].bool()):
        tokens = batch["sequences"][row][real]
        routes, is_padding = batch[ROUTES].segment(row), batch["router_padding_mask"][row]
        assert is_padding[~real].all()
        has_route = ~is_padding[real]
        assert has_route.tolist() == [True] * (len(tokens) - 1) + [False]
        assert (routes[has_route, 0, 0] == tokens[has_route]).all()
        assert routes[~has_route].tolist() == [[[0, 1]]]
        support, trained = batch[SUPPORT].segment(row), batch["loss_mask"][row][batch["response_mask"][row].bool()]
        response = tokens[len(tokens) - len(support) :]
        assert (support[trained == 1] == response[trained == 1][:, None]).all()


def test_stored_rows_are_the_output_that_they_came_from() -> None:
    output: Any = {
        "prompt_token_ids": [[1, 2]],
        "response_ids": [[3]],
        "rewards": [1.0],
        "loss_masks": [[1]],
        "stop_reasons": ["stop"],
        "rollout_logprobs": [[-0.5]],
        ROUTES: [routes_of([1, 2, 3])],
        SUPPORT: [np.array([[3, 4, -1]], np.int32)],
    }
    rows = from_skyrl({**output, "uids": ["a"], "samples": [0]}, columns=[ROUTES, SUPPORT])
    again = generator_output(
        [{**row, "step": 0, "is_last_step": True} for row in rows], False, {ROUTES: "int16", SUPPORT: "int32"}
    )
    for name in (ROUTES, SUPPORT):
        assert again[name][0].dtype == output[name][0].dtype
        assert (again[name][0] == output[name][0]).all()
