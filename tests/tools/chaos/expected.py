"""What a trajectory has to train as: the specification's merging, masks and columns, written down a second time."""

from __future__ import annotations

from math import fsum
from typing import Any

from tests.naive import Merged, merged
from tests.tools.chaos import written
from tests.tools.chaos.contents import Contents, digest
from tests.tools.chaos.kinds import COLUMNS, KINDS
from tests.tools.chaos.rank_log import Effect


def expected_effects(contents: Contents, uid: str, sample: int, attempt: int, launch: int) -> list[Effect]:
    """The rows that an attempt trains as, rewards that came late included. launch: the one that wrote columns."""
    steps = [row | {"reward": contents.reward(uid, sample, row["step"])} for row in contents.rows(uid, sample, attempt)]
    rows = merged(steps, KINDS[contents.kind]["merge"])
    effects = [_plain(row) for row in rows]
    if contents.kind != COLUMNS:
        return effects
    # Of each response token that is sampled, by step and place: what the row has written that trains it.
    values = {
        source: written.value(uid, sample, row.steps[-1]["step"], index, launch)
        for row in rows
        for index, source in enumerate(row.sources)
        if source is not None and row.trained[index]
    }
    rewards = [step["reward"] for step in steps]
    return [
        effect._replace(
            columns=digest(_columns(row, steps, values)), launch=launch, advantage=_advantage(row, rewards, values)
        )
        for effect, row in zip(effects, rows, strict=True)
    ]


def _plain(row: Merged) -> Effect:
    first, last = row.steps[0], row.steps[-1]
    tokens = digest([*last["prompt_token_ids"], *last["response_ids"]])
    uid, sample, span = first["uid"], first["sample"], (first["step"], last["step"])
    return Effect(uid, sample, *span, tokens, sum(row.trained), fsum(row.rewards()))


def _columns(row: Merged, steps: list[dict[str, Any]], values: dict[tuple[int, int], float]) -> list[Any]:
    """In the order in which `tests.tools.chaos.rank` reads them off a shard."""
    images = [image for step in row.steps for image in step.get("images", [])]
    return [
        [steps[holder]["experts"][place] for place, holder in enumerate(row.holders)],
        [float(value) for value in row.standing(lambda step: step["teacher"])],
        sum(step["calls"] for step, is_first in zip(row.steps, row.first_here, strict=True) if is_first),
        images,
        int(any("images" in step for step in row.steps)),
        [0.0 if source is None else values[source] for source in row.sources],
    ]


def _advantage(row: Merged, rewards: list[float], values: dict[tuple[int, int], float]) -> float:
    """The sum over its trained tokens. With gamma and lambda 1 that of a token is what is paid from its step on, less
    its value."""
    trained = [source for source, is_trained in zip(row.sources, row.trained, strict=True) if source and is_trained]
    return fsum(fsum(rewards[source[0] :]) - values[source] for source in trained)
