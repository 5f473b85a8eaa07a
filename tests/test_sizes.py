"""The project does not grow unnoticed, nor does the way of a call through it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tools.bench.sizes import sizes

MOST = {
    "service": (36_633, 218),
    "clients": (20_791, 167),
    "recorder": (5_715, 49),
}
"""Lines and files of each part. Lower them when it shrinks; a change that needs more says why."""

MOST_OF_A_WAY = {"SubmitRows": (225, 52), "Acknowledge": (168, 39)}
"""Functions and files that a call runs."""


@pytest.mark.parametrize("part", MOST)
def test_a_part_is_no_larger_than_it_was(part: str) -> None:
    size, (lines, files) = sizes()[part], MOST[part]
    assert size.lines <= lines
    assert size.files <= files


@pytest.fixture(scope="module")
def printed() -> dict[str, tuple[int, int]]:
    """What `tests.tools.bench.way` prints, by call; it profiles a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.bench.way"], capture_output=True, text=True, timeout=120, check=True
    )
    by_part = {}
    for line in done.stdout.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in MOST_OF_A_WAY:
            functions, files, _ = [int(word) for word in rest.replace(",", "").split() if word.isdigit()]
            by_part[name] = functions, files
    return by_part


@pytest.mark.parametrize("call", MOST_OF_A_WAY)
def test_a_call_runs_no_more_functions_in_no_more_files_than_it_did(
    printed: dict[str, tuple[int, int]], call: str
) -> None:
    assert 20 < printed[call][0] <= MOST_OF_A_WAY[call][0]
    assert 5 < printed[call][1] <= MOST_OF_A_WAY[call][1]
