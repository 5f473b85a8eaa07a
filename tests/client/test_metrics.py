"""What a trainer logs of each batch."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill import RolloutClient, TrainerClient
from gristmill._client.trainer.batch import batch_metrics
from gristmill._wire.rows import from_rows
from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.plan_document import encode_plan
from tests.on_loop import Service
from tests.reference_model.drawing import drawn
from tests.rows import make_config

CONFIG = make_config(
    n_samples_per_prompt=2, micro_batch={"size": 2}, max_buffered_batches=2, seal_order="admission", step_wise=False
)


def fill(client: RolloutClient) -> None:
    client.create_run(CONFIG)
    for number, tag in enumerate(["math", ""]):
        client.begin_groups([f"p{number}"], tag=tag)
        for sample in range(2):
            with client.trajectory(f"p{number}", sample, policy_version=0) as trajectory:
                trajectory.step([1, 2], [3] * (sample + 1), reward=float(sample + number), is_last_step=True)
    client.finish()


@pytest.mark.parametrize("make", [partial(TrainerClient, rank=0), partial(TrainerClient, ranks="all")])
def test_figures_are_numbers_by_name_of_the_batch_that_is_trained(service: Service, run_name: str, make: Any) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        fill(client)
    with make(service.grpc_address, run_name) as trainer:
        collected = []
        for batch in trainer:
            metrics = trainer.metrics()
            assert {type(value) for value in metrics.values()} <= {int, float}
            for name, value in batch.plan["metrics"].items():
                assert metrics[f"gristmill/{name}"] == value
            collected.append(metrics)
            batch.ack()
    assert [one["gristmill/batch"] for one in collected] == [0, 1]
    assert [one["gristmill/score_mean"] for one in collected] == [0.5, 1.5]
    assert collected[0]["gristmill/tags/math/trajectories"] == 2
    assert collected[0]["gristmill/counts/misaligned_groups"] == 0
    assert collected[1]["gristmill/waited_s"] >= 0
    assert not any("/tags/" in name for name in collected[1])


def test_the_prefix_may_be_another(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        fill(client)
    with TrainerClient(service.grpc_address, run_name, rank=0) as trainer:
        with pytest.raises(FailedPreconditionError, match="has no batch yet; call metrics"):
            trainer.metrics()
        next(iter(trainer))
        assert trainer.metrics(prefix="")["rows"] == 2


def documented() -> list[str]:
    """The names in the guide's table, with words in capitals as patterns."""
    text = (Path(__file__).parents[2] / "docs/guides/own-trainer.md").read_text(encoding="utf-8")
    names = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)))
    return [re.sub(r"\b[A-Z]+\b", "[^/]+", name) for name in names]


def test_the_guide_names_every_metric() -> None:
    names: set[str] = set()
    for seed in range(60):
        rows, config = drawn(f"metrics {seed}")
        parsed = parse_config(config)
        # A file may have several batches; names are those of the first.
        uids = list(dict.fromkeys((row.get("round", 0), row["uid"]) for row in rows))[: parsed.train_batch_size]
        first = [row for row in rows if (row.get("round", 0), row["uid"]) in uids]
        with suppress(InvalidArgumentError):
            plan = build_batch(from_rows(first, step_wise=parsed.step_wise), parsed, run="r", batch=0).plan
            names |= batch_metrics(json.loads(encode_plan(plan)), 0.0, "").keys()
    assert len(names) > 30
    assert [name for name in sorted(names) if not any(re.fullmatch(one, name) for one in documented())] == []
