"""What trainers write back, as tests make it: a column's tensors of shards, and the same batch built of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import load

from gristmill._wire.columns import Array
from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config, with_dp_size
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from tests.strategies import Row, rollouts, settings_for

NAMES = ("values", "ref_logprobs", "old_logprobs")


def column(name: str, source: str = "trainer", **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "scope": "response", "source": source} | more


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], dict[str, Any]]:
    """Rows with columns, one of them a row's; and the settings of a run whose trainer writes some of the columns."""
    rows = [dict(row) for row in draw(rollouts(most_prompts=3))]
    numbers = st.sampled_from([-1.5, -0.25, 0.5])
    for row in rows:
        count = len(row["response_ids"])
        row |= {name: draw(st.lists(numbers, min_size=count, max_size=count)) for name in NAMES}
        row["verdict"] = draw(numbers)
        row["stop_reason"] = draw(st.sampled_from(["stop", "length"]))
    written = draw(st.sets(st.sampled_from([*NAMES, "verdict"]), min_size=1))
    columns = [column(name, "trainer" if name in written else "rollout") for name in NAMES]
    columns.append(column("verdict", "trainer" if "verdict" in written else "rollout", scope="row"))
    config = draw(
        settings_for(
            rows,
            columns=columns,
            advantage_estimator=draw(st.sampled_from(["gae", "reinforce++", "grpo"])),
            bootstrap=draw(st.sampled_from([None, {"column": "verdict", "stop_reasons": ["length"]}])),
            kl_in_reward=draw(st.sampled_from([None, {"coef": 0.5, "estimator": "k3"}])),
        )
    )
    return rows, config | {"whiten": draw(st.sampled_from(["none", "batch", "mini_batch"]))}


def of_rollouts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings where rollout workers send all columns."""
    return {**config, "columns": [{**spec, "source": "rollout"} for spec in config["columns"]]}


def built(
    rows: list[Row],
    settings: Mapping[str, Any],
    tensors: Mapping[ShardAddress, Mapping[str, Array]] | None = None,
    ranks: int | None = None,
) -> BuiltBatch:
    """tensors: of the policy's shards, what trainers wrote; None: nothing yet. ranks: how many wrote them; None: those
    of the settings."""
    config = parse_config(dict(settings))
    sent = [spec for spec in config.columns if spec.source == "rollout"]
    names = {spec.name for spec in config.written_columns}
    steps = from_rows(
        [{k: v for k, v in row.items() if k not in names} for row in rows], step_wise=config.step_wise, columns=sent
    )
    written = None
    if tensors is not None:
        forms = build_batch(steps, with_dp_size(config, ranks or config.dp_size), run="r", batch=0).forms
        written = {
            address: {spec.name: form.own_values(spec, tensors[address], "shard") for spec in config.written_columns}
            for address, form in forms.items()
        }
    return build_batch(steps, config, run="r", batch=0, written=written, written_ranks=ranks or config.dp_size)


def files(batch: BuiltBatch) -> dict[ShardAddress, bytes]:
    return {shard.address: join(shard.iovec()) for shard in batch.shards}


def computed(batch: BuiltBatch, noise: float = 9.0) -> dict[ShardAddress, dict[str, Array]]:
    """The tensors of the policy's shards of a batch, as a trainer would compute them: with something everywhere, also
    on padding, prompts and padding rows."""
    columns = {}
    for address, data in files(batch).items():
        tensors = load(data)
        for name, values in tensors.items():
            if name.rpartition("/")[2] in NAMES:
                prefix = name.rpartition("/")[0]
                mask = tensors[f"{prefix}/response_mask" if prefix else "response_mask"]
                tensors[name] = np.where(mask == 1, values, np.float32(noise))
            elif name == "verdict":
                tensors[name] = np.where(tensors["row"] < 0, np.float32(noise), values)
        if address.model == "policy":
            columns[address] = tensors
    return columns
