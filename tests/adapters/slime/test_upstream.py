"""slime's own RolloutManager and readers with gristmill's batches. Needs a checkout of slime's source:

SLIME_SOURCE=path/to/slime python -m pytest tests/adapters/slime/test_upstream.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.adapters.slime import advantages, run_settings
from gristmill.adapters.slime._manager import swap
from gristmill.adapters.slime._rank_data import rank_data
from gristmill.adapters.slime._settings import ADVANTAGE_FUNCTION
from tests.adapters.slime.golden import GOLDEN, plain, slime_s_own
from tests.adapters.slime.samples import PARALLEL, arguments
from tests.adapters.slime.test_rank_data import OPTIONS, mini_batches, rollout, train_data
from tests.adapters.slime.upstream import slime
from tests.client.converters.stand_ins import Sample
from tests.on_loop import Service

SOURCE = Path(os.environ.get("SLIME_SOURCE", ""))
pytestmark = pytest.mark.skipif("SLIME_SOURCE" not in os.environ, reason="SLIME_SOURCE names no checkout")


@pytest.fixture
def modules() -> Iterator[SimpleNamespace]:
    with slime(SOURCE) as loaded:
        yield loaded


def test_the_golden_file_is_slime_s() -> None:
    assert [plain(rank) for rank in slime_s_own(SOURCE)] == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("cap", [10, 15, 16, 24, 40, 100])
@pytest.mark.parametrize("global_batch_size", [4, 8, 16])
def test_every_rank_s_data_are_slime_s_own_whatever_the_sizes(cap: int, global_batch_size: int) -> None:
    changes = {"rollout_batch_size": 16, "global_batch_size": global_batch_size, "max_tokens_per_gpu": cap}
    args = arguments(sample_type=Sample, **changes)
    ours = rank_data(mini_batches(rollout(args), run_settings(args, OPTIONS, dp_size=2)))
    assert [plain(rank) for rank in ours] == [plain(rank) for rank in slime_s_own(SOURCE, **changes)]


def test_slime_s_manager_gives_the_same_whether_it_schedules_or_gristmill(
    modules: SimpleNamespace, service: Service, run_name: str, tmp_path: Path
) -> None:
    options = {"address": service.grpc_address, "run": run_name}
    defaults = arguments(sample_type=modules.types.Sample)
    ours = arguments(
        sample_type=modules.types.Sample, gristmill=options, num_rollout=3, save=str(tmp_path), save_interval=1
    )
    before = modules.rollout.RolloutManager.plain(defaults, None)
    swap()
    after = modules.rollout.RolloutManager.plain(ours, None)
    for manager in (before, after):
        manager.set_train_parallel_config(PARALLEL)
    for rollout_id in range(3):
        expected, actual = ([plain(box.inner) for box in manager.generate(rollout_id)] for manager in (before, after))
        for name in ("sample_indices", "rollout_ids"):
            # slime counts over all rollouts; who trains uses neither.
            assert [len(rank.pop(name)) for rank in actual] == [len(rank.pop(name)) for rank in expected]
        assert actual == expected
        after.save(rollout_id)
    after.dispose()
    status = service.runs.get(run_name).status()
    assert (status.batches_freed, status.policy_version) == (3, 2)


@pytest.mark.parametrize("rows", [1, 4])
def test_slime_s_reducer_makes_each_rollout_s_mean_of_what_its_iterator_gives(
    modules: SimpleNamespace, rows: int
) -> None:
    """Also where the second rank has a padding row."""
    changes = {"rollout_batch_size": 1, "n_samples_per_prompt": rows, "global_batch_size": rows}
    loss, expected = 0.0, 0.0
    for rank in train_data(changes):
        (iterator,) = modules.data.get_data_iterator(rank)
        rank["total_lengths"] = [rank["total_lengths"][place] for place in rank["partition"]]
        for count in rank["num_microbatches"]:
            for _ in range(count):
                keys = ("total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums", "rollout_log_probs")
                batch = iterator.get_next(keys)
                values = torch.cat(batch.pop("rollout_log_probs"))
                loss += float(modules.cp_utils.get_sum_of_sample_mean(*batch.values())(values))
        for mask, logprobs in zip(rank["loss_masks"], rank["rollout_log_probs"], strict=True):
            expected += float((mask * logprobs).sum() / mask.sum().clamp(min=1))
    assert loss == pytest.approx(expected)


def test_the_advantage_function_gives_slime_the_credit_of_tokens(modules: SimpleNamespace) -> None:
    path = {"custom_advantage_function_path": ADVANTAGE_FUNCTION}
    for rank in train_data(path, advantage_estimator="reinforce++", gamma=0.5, whiten="batch"):
        rank["total_lengths"] = [rank["total_lengths"][place] for place in rank["partition"]]
        expected: Any = rank["gristmill_advantages"], rank["gristmill_returns"]
        rank["kl"] = [torch.zeros(length) for length in rank["response_lengths"]]
        advantages(None, rank)
        for name, rows in zip(("advantages", "returns"), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(rank[name], rows, strict=True))
        assert "gristmill_advantages" not in rank
