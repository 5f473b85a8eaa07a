"""The proof of runs with columns can fail, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save

from gristmill import Group, GroupState
from gristmill._wire.addresses import Position
from tests.tools.chaos.contents import SAMPLES, Contents, digest
from tests.tools.chaos.expected import expected_effects
from tests.tools.chaos.kinds import COLUMNS
from tests.tools.chaos.rank import written_for
from tests.tools.chaos.rank_log import Trained
from tests.tools.chaos.verify import Verdict, verify
from tests.tools.chaos.worker import WorkerLog
from tests.tools.chaos.written import value

WITH_COLUMNS = Contents(5, COLUMNS)
FORKED = next(
    uid
    for uid in (f"w0-{index}" for index in range(200))
    if any(effect.first != 0 for effect in expected_effects(WITH_COLUMNS, uid, 0, 0, 1))
    and not any(WITH_COLUMNS.is_aborted(uid, sample) for sample in range(SAMPLES))
)


def with_columns(launches: Sequence[int] = (7, 7), **changed: Any) -> Verdict:
    """One group, of which each rank trains a sample. launches: which wrote the columns of each sample. changed: of the
    first row."""
    log = WorkerLog(Path("unused"), {(FORKED, sample): 0 for sample in range(SAMPLES)}, {FORKED})
    ranks = []
    for sample in range(SAMPLES):
        log.rows += [(FORKED, sample, row["step"], 0, "ACCEPTED") for row in WITH_COLUMNS.rows(FORKED, sample, 0)]
        effects = expected_effects(WITH_COLUMNS, FORKED, sample, 0, launches[sample])
        if not sample:
            effects[0] = effects[0]._replace(**changed)
        ranks.append([Trained(Position(0, epoch, 0), effects) for epoch in range(2)])
    return verify(WITH_COLUMNS, 2, [log], [Group(FORKED, 0, GroupState.SEALED, 0, "")], [ranks])


def test_columns_that_went_well_are_clean_and_counted() -> None:
    verdict = with_columns()
    assert verdict.is_clean
    tokens = sum(len(row["response_ids"]) for sample in range(SAMPLES) for row in WITH_COLUMNS.rows(FORKED, sample, 0))
    assert verdict.values_trained == 2 * tokens


@pytest.mark.parametrize("changed", [{"columns": digest([])}, {"advantage": 0.0}, {"launch": 6}])
def test_columns_and_advantages_that_are_not_those_that_were_sent_and_written_are_seen(changed: dict[str, Any]) -> None:
    assert with_columns(**changed).wrong


def test_a_batch_with_columns_of_two_launches_is_seen() -> None:
    assert with_columns(launches=(7, 8)).wrong == ["launch 0: batch 0 has columns of launches [7, 8]"]


def test_a_rank_writes_something_of_every_row_of_its_own() -> None:
    mask = np.array([[0, 1, 1], [1, 1, 1]], np.uint8)
    tensors: dict[str, NDArray[Any]] = {
        "response_mask": mask,
        "sample": np.array([0, 1], np.int32),
        "step_last": np.array([2, 0], np.int32),
    }
    metadata = {"uids": json.dumps(["a", "b"])}
    written = written_for(save(tensors, metadata), launch=3)
    assert written["launch"].tolist() == [3, 3]
    values = written["values"]
    assert values[0].tolist() == [99, *(value("a", 0, 2, index, 3) for index in range(2))]
    assert values[1].tolist() == [value("b", 1, 0, index, 3) for index in range(3)]
    assert written_for(save({**tensors, **written}, metadata), launch=4) == {}
