"""A ledger says which step of a trainer is at which position of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill import FailedPreconditionError, InvalidArgumentError
from gristmill.adapters._core.checkpoint import Ledger


def state(batch: int, run_id: str = "one") -> dict[str, Any]:
    return {"run": "r", "run_id": run_id, "batch": batch, "epoch": 0, "mini_batch": 0}


def test_steps_are_found_by_their_position_also_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "folder" / "ledger.json")
    assert ledger.step_at(state(0)) is None
    ledger.start(10, state(0))
    ledger.record(11, state(1))
    ledger.record(12, state(3))
    again = Ledger(ledger.path)
    assert [again.step_at(state(batch)) for batch in range(4)] == [10, 11, 11, 12]
    assert again.state_after(11) == state(1)


def test_steps_before_a_commit_are_forgotten(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    ledger.start(0, state(0))
    ledger.record(1, state(1))
    ledger.forget_before(1)
    with pytest.raises(FailedPreconditionError, match=r"begins after batch 0 .* remove the file to continue"):
        ledger.step_at(state(0))


def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    ledger.start(0, state(0))
    with pytest.raises(FailedPreconditionError, match=r"is of run 'r' \(one\), but the service's run is 'r' \(two\)"):
        ledger.step_at(state(0, "two"))


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text("{")
    with pytest.raises(
        InvalidArgumentError, match=r"ledger.json: cannot read the file: .*; remove the file to continue"
    ):
        Ledger(path)
