"""What is read of others is taken, or refused in the service's own words, and soon; `make fuzz` goes on for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.fuzz import operations
from tests.tools.fuzz.campaign import known, run
from tests.tools.fuzz.targets import Target, all_targets

TARGETS = all_targets()
INPUTS = 400


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_taken_or_refused_cleanly(name: str) -> None:
    outcome = run(TARGETS[name], seed=0, count=INPUTS)
    assert not outcome.findings
    assert 0 < outcome.taken < INPUTS, "some are taken, some are not"


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_taken(name: str) -> None:
    for data in TARGETS[name].seeds():
        if name != "http_bodies":
            assert TARGETS[name].takes(data)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        pytest.param(target, path, id=f"{name}-{path.stem}")
        for name, target in TARGETS.items()
        for path in known(target)
    ],
)
def test_what_was_found_once_is_found_no_more(target: Target, path: Path) -> None:
    target.takes(path.read_bytes())


def test_answers_over_http_are_as_the_api_describes_them() -> None:
    outcome = operations.run(0, examples=3)
    assert not outcome.findings
    assert 0 < outcome.taken < outcome.inputs
