"""Fixtures of tests of runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill_service.run.rows import shared_prefixes


@pytest.fixture(scope="module")
def one_token_is_shared() -> Iterator[None]:
    """Rows of these tests are short: what they share is kept once however little it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefixes, "LEAST_TOKENS", 1)
        yield
