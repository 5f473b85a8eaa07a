"""A real vLLM gives the logprob of each token that it read, and a merged row has them for every token but the first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines import tiny_model
from tests.engines.conversing import converse
from tests.engines.rollout import Rollout
from tests.recorder.test_prompt_logprobs import LOGPROBS, rows


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ("--columns", "prompt_logprobs", "--splice", "on")


@pytest.fixture
def config() -> dict[str, Any]:
    return {"columns": [{**LOGPROBS, "required": False}]}


def test_they_are_those_of_a_forward_pass(rollout: Rollout) -> None:
    converse(rollout, False, True, False)
    rollout.recorder.finish(rollout.run)
    ((tokens, values),) = rows(rollout.service.grpc_address, rollout.run, "prompt_logprobs")
    last = rollout.witness.answers[-1]
    assert tokens == [*last.prompt, *last.response]
    expected = tiny_model.logprobs(rollout.model, tokens[:1], tokens[1:], 1.0)
    assert values[0] == LOGPROBS["fill"]
    difference = max(abs(one - other) for one, other in zip(values[1:], expected, strict=True))
    print(f"{len(tokens)} tokens: {difference:.1e}")
    assert difference <= 1e-4
