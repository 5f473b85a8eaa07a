"""`gristmill batch` and `plan` make of random files what an independent reference makes of them."""

from __future__ import annotations

import os
from random import randrange

import pytest

from tests.reference_model.fuzz import by_command, campaign

# As laws: the gate draws the same each time, people's runs go on looking.
SEED = 0 if "CI" in os.environ else randrange(10**9)


@pytest.mark.parametrize("part", range(4))
def test_the_commands_make_what_the_specification_says(part: int) -> None:
    """`python -m tests.tools.fuzz.batches` compares thousands, and prints the smallest case of a disagreement."""
    assert sum(campaign(by_command, SEED + part, batches=50)) >= 50
