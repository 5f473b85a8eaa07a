"""Declared columns take the values that converters put into rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from gristmill._wire.column_spec import specs_of
from gristmill._wire.extras import check_extras
from gristmill._wire.rows import from_rows
from gristmill.converters import from_prime_rl, from_skyrl, from_slime, from_trl, from_verl
from tests.client.converters import recorded, stand_ins

ROUTES = {"dtype": "int16", "shape": [2, 2], "scope": "token", "partial": True, "fill": -1}
IMAGES = {"name": "pixel_values", "dtype": "float32", "shape": [2], "scope": "items", "required": False}


def test_skyrls_routes_and_images_are_columns_of_rows() -> None:
    specs = specs_of([{"name": "rollout_expert_indices", **ROUTES}, IMAGES])
    ids, output = recorded.skyrl_output("whole")
    counts = [len(prompt) + 7 for prompt in output["prompt_token_ids"]]
    output["rollout_expert_indices"] = [np.ones((count, 2, 2), np.int16) for count in counts]
    output["pixel_values"] = [np.ones((3, 2), np.float32), None, None, None]
    rows = from_skyrl(output, trajectory_ids=ids, columns=["rollout_expert_indices", "pixel_values"])
    table = check_extras(from_rows(rows, columns=specs), specs)
    assert table.extras["pixel_values"].given.tolist() == [True, False, False, False]
    assert table.extras["rollout_expert_indices"].values.lengths.tolist() == counts


def test_verls_routes_are_a_column() -> None:
    specs = specs_of([{"name": "routed_experts", **ROUTES}])
    table = check_extras(from_rows(from_verl(recorded.verl_batch(), columns=["routed_experts"]), columns=specs), specs)
    assert table.extras["routed_experts"].values.lengths.tolist() == [8, 4, 7]


def test_slimes_teacher_and_prime_rls_reference_are_columns_of_the_response() -> None:
    specs = specs_of([{"name": "teacher_log_probs", "dtype": "float32", "scope": "response"}])
    made: dict[str, Any] = {"index": 0, "group_index": 0, "tokens": [1, 2, 3], "response_length": 2, "reward": 1.0}
    made |= {"status": stand_ins.Status.COMPLETED, "teacher_log_probs": [-1.0, -2.0]}
    rows = from_slime([stand_ins.Sample(**made)], columns=["teacher_log_probs"])
    table = check_extras(from_rows(rows, columns=specs), specs)
    assert table.extras["teacher_log_probs"].values.values.tolist() == [-1.0, -2.0]

    specs = specs_of([{"name": "ref_logprobs", "dtype": "float32", "scope": "response"}])
    sample = stand_ins.TrainingSample([1, 2], [False, True], [0.0, -0.5], [1.0] * 2, "math", ref_logprobs=[0.0, -3.0])
    rows = from_prime_rl([sample], uids=["a"], rewards=[1.0], columns=["ref_logprobs"])
    table = check_extras(from_rows(rows, columns=specs), specs)
    assert table.extras["ref_logprobs"].values.values.tolist() == [-3.0]


def test_trls_images_are_items_of_their_rows() -> None:
    specs = specs_of([IMAGES])
    output = recorded.trl_output() | {"pixel_values": np.ones((3, 2), np.float32), "num_images": [1, 0, 2, 0]}
    rows = from_trl(output, uids=[1, 2], num_generations=2, rewards=[1.0, 0.0, 1.0, 0.0], columns=["pixel_values"])
    table = check_extras(from_rows(rows, columns=specs), specs)
    assert table.extras["pixel_values"].values.lengths.tolist() == [1, 0, 2, 0]
