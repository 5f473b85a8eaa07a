"""The tokens of one training row, as sampled and merged, and their texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import numpy as np
from pydantic import Field

from gristmill._wire.batch_table import BatchTable
from gristmill._wire.steps import Steps, TrajectoryKey, concat
from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.config import RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.pipeline.rows.merge import merge_rows
from gristmill_service.pipeline.rows.validate import receive
from gristmill_service.rollout_lines import CONVERSATION

SHOWN_TOKENS = 2_000


class ShownTokens(Document):
    """At most 2,000 tokens of a row, from `start`. loss_mask: one value per token, -1 in the prompt."""

    run: str
    uid: str
    round: int
    sample: int
    prompt_tokens: int
    tokens_in_all: int
    start: int
    tokens: list[int]
    loss_mask: list[int]
    texts: dict[int, str] = Field(default={}, description="The text of each token, if the service has a tokenizer.")
    conversation: str = Field(
        default="",
        description="What was said, one line of JSON per step: the column `conversation`, as a recorder writes it.",
    )


class RowTokens(ShownTokens):
    """A training row. tokens: at most 2,000, from `start`. loss_mask: one value per token, -1 in the prompt."""

    batch: int
    row: int = Field(description="The row's number in the plan.")


def key_of(table: BatchTable, row: int) -> tuple[TrajectoryKey, int]:
    """Returns the row's trajectory, and the row's index in that trajectory.

    Raises NotFoundError if the batch has no such row.
    """
    owners = table.rows["trajectory"]
    if not 0 <= row < len(owners):
        raise NotFoundError(f"the batch has no row {row}; request one of 0..{len(owners) - 1}")
    trajectory = owners[row]
    group, sample = (int(table.trajectories[name][trajectory]) for name in ("group", "sample"))
    key = TrajectoryKey(int(table.groups["round"][group]), table.texts["uids"][group], sample)
    return key, row - int(np.searchsorted(owners, trajectory))


async def rows_of(tables: AsyncIterator[Steps], key: TrajectoryKey) -> Steps:
    """Returns the trajectory's rows. tables: the batch's rows in order, read until the trajectory ends."""
    parts: list[Steps] = []
    async for table in tables:
        matches = [index for index in range(len(table)) if table.key(index) == key]
        if matches:
            parts.append(table.take(np.array(matches)))
        elif parts:
            # The rows of a trajectory are contiguous in a batch.
            break
    return concat(parts)


def conversation_of(steps: Steps, indices: Iterable[int]) -> str:
    """Returns the column `conversation` of these steps; "" if the run has none."""
    column = steps.extras.get(CONVERSATION)
    if column is None:
        return ""
    return b"".join(column.values[index].tobytes() for index in indices).decode(errors="replace")


def tokens_of(trajectory: Steps, row: int, config: RunConfig) -> tuple[list[int], list[int], str]:
    """Returns the tokens of this row of the trajectory, the loss mask of each, -1 in the prompt, and what was said."""
    received = receive(trajectory, config)
    rows = merge_rows(received, config)
    prompt = int(rows.prompt_lengths[row])
    tokens = received.steps.tokens[int(rows.last[row])][: int(rows.lengths[row])].tolist()
    mask = np.concatenate([np.full(prompt, -1), np.zeros(len(tokens) - prompt, np.int64)])
    trained = rows.trained(received.steps.loss_mask)
    for visit in range(int(rows.edges[row]), int(rows.edges[row + 1])):
        begin = prompt + int(rows.starts[visit]) + int(rows.shared[visit])
        mask[begin : begin + int(trained.lengths[visit])] = trained[visit]
    visited = rows.steps[int(rows.edges[row]) : int(rows.edges[row + 1])].tolist()
    return tokens, mask.tolist(), conversation_of(received.steps, visited)


class TokenTexts:
    """Decodes tokens with a tokenizer of the tokenizers library, read from a file. Downloads nothing.

    path: a tokenizer.json, or the directory that contains one. Raises InvalidArgumentError if the file does not exist,
    or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InvalidArgumentError(
                f"tokenizer {path} needs tokenizers, which is not installed; pip install tokenizers"
            ) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more definite
            raise InvalidArgumentError(
                f"tokenizer: {file} cannot be read: {error}; set it to the tokenizer.json of the trained model"
            ) from None

    def of(self, tokens: Iterable[int]) -> dict[int, str]:
        """Returns the text of each single token. Omits tokens that are unknown to the tokenizer."""
        size = self._tokenizer.get_vocab_size()
        known = (token for token in tokens if 0 <= token < size)
        return {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in known}
