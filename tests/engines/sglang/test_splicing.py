"""A real SGLang reads the recorded tokens and what is new: every prompt begins with the whole call before it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.conversing import CALLS, check_spliced, converse
from tests.engines.rollout import TOOLS, Rollout


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ("--splice", "on")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"stop": ["e", "a"]}], ids=["plain", "tools", "stop"])
def test_a_conversation_is_one_row(rollout: Rollout, more: dict[str, Any], stream: bool) -> None:
    converse(rollout, *[stream] * CALLS, **more)
    check_spliced(rollout)
