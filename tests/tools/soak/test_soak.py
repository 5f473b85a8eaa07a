"""The judgment of the soak: what grows is found, what is noisy is not, and processes say what they have in use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tools.soak.probed import start
from tests.tools.soak.slopes import Work, slope_of, slopes

WORK = Work(batches=10, groups=100, kept=2, history=False)


def test_a_slope_is_that_of_most_rounds() -> None:
    assert slope_of([5.0, 6.0, 7.0, 8.0]) == 1.0
    assert slope_of([5.0, 5.0, 900.0, 5.0, 5.0, 5.0]) == 0.0


@pytest.mark.parametrize(
    ("quantity", "growth", "is_within"),
    [
        ("bytes", 121_000, True),
        ("bytes", 123_000, False),
        ("descriptors", 0, True),
        ("descriptors", 1, False),
        ("journal files", 4, True),
        ("journal files", 5, False),
        ("keys", 6, True),
        ("keys", 7, False),
        ("scrape, ms", 0.1, True),
        ("scrape, ms", 5, False),
    ],
)
def test_growth_is_held_against_what_the_rounds_made(quantity: str, growth: float, is_within: bool) -> None:
    rounds = [{("journal", quantity): 20.0 + growth * number} for number in range(5)]
    [found] = slopes(rounds, {"journal": WORK})
    assert found.growth == pytest.approx(growth)
    assert found.is_within is is_within


LEAK = """
import sys
kept = []
print("started", flush=True)
for line in sys.stdin:
    kept.append(bytearray(int(line)))
    files = [open(__file__) for _ in range(2)]
    kept.append(files)
    print("done", flush=True)
"""


def test_a_process_says_what_it_has_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaking.py").write_text(LEAK)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    probed = start(tmp_path, "leak", 1.0, ["leaking"])
    wires = probed.process.stdin, probed.process.stdout
    assert wires[0] is not None
    assert wires[1] is not None
    assert wires[1].readline() == "started\n"
    before = probed.in_use()
    for _ in range(3):
        wires[0].write("100000\n")
        wires[0].flush()
        assert wires[1].readline() == "done\n"
    after = probed.in_use()
    probed.stop()
    assert 300_000 < after.bytes - before.bytes < 600_000
    assert after.descriptors - before.descriptors == 6
    assert after.threads == before.threads
