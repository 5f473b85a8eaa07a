"""Without a parser SGLang streams no logprob of the token that ends an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.rollout import MESSAGES, MODEL, Rollout
from tests.engines.sglang.conftest import running

# Most answers of 200 tokens end by themselves.
CALL: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "n": 6, "stream": True}


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    with running(folder) as url:
        yield url


@pytest.fixture
def client(rollout: Rollout) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_its_streams_are_refused(rollout: Rollout, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match=r"logprobs for \d+ token ids"):
        list(client.chat.completions.create(**CALL))


@pytest.mark.parametrize("flags", [("--whole-answers",)])
def test_they_are_recorded_with_whole_answers(rollout: Rollout, client: openai.OpenAI) -> None:
    list(client.chat.completions.create(**CALL))
    rollout.check(CALL["n"])
