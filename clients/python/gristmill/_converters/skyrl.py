"""SkyRL's `GeneratorOutput` as rows. `RolloutClient.submit` takes the same output without making rows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gristmill._client.skyrl_output import fields_of_output
from gristmill._converters.keys import Choice, Row


def from_skyrl(
    output: Mapping[str, Any],
    *,
    trajectory_ids: Any = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int = -1,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Rows of what a SkyRL generator's `generate` returns; the output's keys are those of `RolloutClient.submit`.

    trajectory_ids: those of the generator's input, for outputs that have none (all that are not step-wise).
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
    count = len(fields["uid"])
    optional = Choice.of(columns).columns
    return [
        {name: values[row] for name, values in fields.items() if not (name in optional and values[row] is None)}
        for row in range(count)
    ]
