"""SkyRL's `GeneratorOutput` as rows. `RolloutClient.submit` takes the same output without making rows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gristmill._client.rollout.skyrl_output import fields_of_output
from gristmill._converters.keys import Choice, Row
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import tagged
from gristmill._wire.lists import size_of

_WHAT = "generator output"


@refusing(_WHAT)
def from_skyrl(
    output: Mapping[str, Any],
    *,
    trajectory_ids: Any = None,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int = -1,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Rows of what a SkyRL generator's `generate` returns; the output's keys are those of `RolloutClient.submit`.

    trajectory_ids: those of the generator's input, for outputs that have none (all that are not step-wise).
    tags: one a row, such as the input's `env_classes`.
    columns: such as `rollout_expert_indices` (scope `token`), `pixel_values` and `image_grid_thw` (`items`). A row that
        has no image leaves these out.

        output = await generator.generate(input_batch)
        client.submit_rows(from_skyrl(output, trajectory_ids=input_batch["trajectory_ids"]))
    """
    fields = fields_of_output(
        output,
        trajectory_ids=trajectory_ids,
        round=round,
        attempt=attempt,
        policy_version=policy_version,
        choice=Choice.of(columns, ignore),
    )
    if "loss_mask" not in fields:
        fields["loss_mask"] = _all_ones([size_of(response) for response in fields["response_ids"]])
    own_tags, optional = tagged(tags, len(fields["uid"]), _WHAT), Choice.of(columns).columns
    return [
        {name: values[row] for name, values in fields.items() if not (name in optional and values[row] is None)} | tag
        for row, tag in enumerate(own_tags)
    ]


def _all_ones(lengths: Sequence[int]) -> list[Any]:
    """Views of one array, as nobody changes it."""
    ones = np.ones(max(lengths, default=0), np.uint8)
    return [ones[:length] for length in lengths]
