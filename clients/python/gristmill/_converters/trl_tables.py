"""What TRL's `GRPOTrainer` generated as tables of steps: the rows of `from_trl`, made a column at a time.

A generation has thousands of rows in a few padded tensors. A mapping a row, whose fields are looked at one by one and
joined again, takes longer than all their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._converters.trl import TrlOutput
from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Int64s, Ragged
from gristmill._wire.steps import Extra, Steps, check


@dataclass(frozen=True)
class TrlTables:
    """Rows of one step each, in the order of the output's.

    columns: those of the run that the output has. uids, samples, rewards: one a row; samples int32, rewards float64.
    ends: token ids with which a completion ends that was not cut off. is_wanted: bool (rows,), which there are.
    """

    output: TrlOutput
    columns: Sequence[ColumnSpec]
    uids: Sequence[str]
    samples: NDArray[np.int32]
    rewards: NDArray[np.float64]
    ends: Sequence[int]
    is_wanted: NDArray[np.bool_]
    policy_version: int
    attempt: int

    def tables(self, most_rows: int, most_bytes: int) -> Iterator[Steps]:
        """The rows as checked tables of at most so much, unless one row has more; no table is made before it is asked
        for. Raises InvalidArgumentError as `gristmill._wire.steps.check` does."""
        begin, ends = 0, np.cumsum(self._row_bytes())
        while begin < len(ends):
            room = most_bytes + (int(ends[begin - 1]) if begin else 0)
            fitting = int(np.searchsorted(ends, room, "right"))
            end = min(max(fitting, begin + 1), begin + most_rows)
            yield from self._wanted(slice(begin, end))
            begin = end

    def _wanted(self, rows: slice) -> Iterator[Steps]:
        table, is_wanted = check(self._table(rows)), self.is_wanted[rows]
        if is_wanted.all():
            yield table
        elif is_wanted.any():
            yield table.take(np.flatnonzero(is_wanted))

    def _row_bytes(self) -> Int64s:
        padding = self.output.padding
        of_response = 1 + 4 * self.output.has_logprobs + sum(column.element_bytes for column in self.columns)
        found: Int64s = 4 * padding.prompt_lengths + (4 + of_response) * padding.response_lengths
        return found

    def _table(self, rows: slice) -> Steps:
        output, padding, uids = self.output, self.output.padding, self.uids[rows]
        prompts, responses, count = padding.prompt_lengths[rows], padding.response_lengths[rows], len(uids)
        ids = padding.sequences(output.tensors["prompt_ids"], output.tensors["completion_ids"], rows, np.int32)
        tokens = Ragged.from_lengths(ids, prompts + responses)
        logprobs = None
        if output.has_logprobs:
            logprobs = padding.responses(output.tensors["sampling_per_token_logps"], rows, np.float32)
        return Steps(
            uids=uids,
            rounds=np.zeros(count, np.int32),
            samples=self.samples[rows],
            steps=np.zeros(count, np.int32),
            attempts=np.full(count, self.attempt, np.int32),
            is_last_steps=np.ones(count, np.bool_),
            stop_reasons=self._stop_reasons(ids[tokens.starts + tokens.lengths - 1]),
            policy_versions=np.full(count, self.policy_version, np.int32),
            tokens=tokens,
            prompt_lengths=prompts,
            loss_mask=Ragged.from_lengths(padding.responses(output.loss_mask, rows, np.uint8), responses),
            logprobs=None if logprobs is None else Ragged.from_lengths(logprobs, responses),
            rewards=self.rewards[rows],
            token_rewards=None,
            rewards_pending=np.zeros(count, np.bool_),
            extras={column.name: self._extra(column, rows) for column in self.columns},
        )

    def _stop_reasons(self, last: Array) -> list[str]:
        found: list[str] = np.where(np.isin(last, self.ends), "stop", "length").tolist()
        return found

    def _extra(self, column: ColumnSpec, rows: slice) -> Extra:
        output, padding = self.output, self.output.padding
        values, is_given = output.tensors[column.name], np.ones(rows.stop - rows.start, np.bool_)
        if column.scope == "response" and values.shape == output.loss_mask.shape:
            of_tokens = column.array(padding.responses(values, rows, values.dtype), self._where(rows.start))
            return Extra(Ragged.from_lengths(of_tokens, padding.response_lengths[rows]), is_given)
        places = range(rows.start, rows.stop)
        arrays = [column.array(output.columns(row)[column.name], self._where(row)) for row in places]
        return Extra(Ragged.from_arrays(arrays, column.storage), is_given)

    def _where(self, row: int) -> str:
        return f"uid {self.uids[row]!r} sample {self.samples[row]}"
