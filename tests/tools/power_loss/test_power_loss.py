"""A power loss costs what `--journal-fsync` says; by hand, `python -m tests.tools.power_loss` takes hundreds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gristmill_service.storage.journal.run_log import Fsync
from tests.storage.dying_disk import compiled
from tests.tools.power_loss.campaign import campaign
from tests.tools.power_loss.image import PROMISED_S

# A busy machine syncs late: the figure is of the campaign by hand.
TOLERANCE_S = 2.0
LOAD_S = 4.0


@pytest.mark.parametrize("fsync", PROMISED_S)
def test_no_batch_fails_nothing_is_trained_twice_and_no_more_is_lost_than_promised(
    tmp_path: Path, fsync: Fsync
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = compiled(tmp_path, compiler)
    for seed in (0, 1):
        findings = campaign(
            tmp_path / "campaign", library, fsync, images=5, seed=seed, seconds=LOAD_S, tolerance_s=TOLERANCE_S
        )
        assert findings.images == 5
        assert not findings.wrong
