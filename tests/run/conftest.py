"""Fixtures of tests of runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.run.deltas import Sender


@pytest.fixture(scope="module")
def one_token_is_left_out() -> Iterator[None]:
    """Rows of these tests are short: what they share with the step before is left out however little it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sender, "least_tokens", 1)
        yield
