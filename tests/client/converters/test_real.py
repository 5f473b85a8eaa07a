"""The converters take objects of real frameworks, if these are installed, and recorded ones."""

from __future__ import annotations

import pytest

from gristmill.converters import from_prime_rl, from_skyrl, from_slime, from_trl, from_trl_async, from_verl

from . import real, recorded, stand_ins
from .fields import fields_of, same

ROUTES = ("routed_experts",)


def test_verl() -> None:
    pytest.importorskip("verl")
    assert same(from_verl(real.verl_batch(), columns=ROUTES), from_verl(recorded.verl_batch(), columns=ROUTES))
    keys, queue = real.verl_queue()
    recorded_keys, recorded_queue = recorded.verl_queue()
    assert same(
        from_verl(queue, keys=keys, columns=ROUTES), from_verl(recorded_queue, keys=recorded_keys, columns=ROUTES)
    )


@pytest.mark.filterwarnings("ignore")
def test_trl() -> None:
    pytest.importorskip("trl")
    uids, rewards = ["a", "b"], [5.0, 2.0, 3.0, 1.0]
    for advantages in (False, True):
        made, kept = (
            from_trl(output, uids=uids, rewards=rewards, num_generations=2, advantages=advantages)
            for output in (real.trl_output(), recorded.trl_output())
        )
        assert same(made, kept)
    assert same(
        from_trl_async(real.trl_samples(), num_generations=2), from_trl_async(recorded.trl_samples(), num_generations=2)
    )


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl(step_wise: bool) -> None:
    pytest.importorskip("skyrl")
    ids, output = real.skyrl_output(step_wise=step_wise)
    recorded_ids, recorded_output = recorded.skyrl_output("step_wise" if step_wise else "whole")
    assert same(from_skyrl(output, trajectory_ids=ids), from_skyrl(recorded_output, trajectory_ids=recorded_ids))


def test_slime() -> None:
    types = pytest.importorskip("slime.utils.types")
    assert types.Sample.__dataclass_fields__.keys() == stand_ins.Sample.__dataclass_fields__.keys()
    assert {status.value for status in types.Sample.Status} == {status.value for status in stand_ins.Status}
    sample = types.Sample(group_index=1, index=2, tokens=[1, 2], reward=1.0, status=types.Sample.Status.COMPLETED)
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.5])
    sample.append_response_tokens(tokens=[5], trainable=False)
    for given in (sample, sample.to_dict()):
        (row,) = from_slime([given])
        assert fields_of([row], "prompt_token_ids", "response_ids", "loss_mask") == [([1, 2], [3, 4, 5], [1, 1, 0])]


def test_prime_rl() -> None:
    types = pytest.importorskip("prime_rl.transports.rollouts.types")
    for name in ("TrainingSample", "EncodedTensor", "RoutedExperts"):
        assert getattr(types, name).__struct_fields__ == getattr(stand_ins, name).__struct_fields__
    sample = types.TrainingSample([1, 2, 3], [False, True, True], [0.0, -0.5, -0.5], [1.0] * 3, "math")
    (row,) = from_prime_rl([sample], uids=["a"], rewards=[1.0])
    assert fields_of([row], "prompt_token_ids", "response_ids") == [([1], [2, 3])]
