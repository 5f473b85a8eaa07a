"""What holds of a placement that the specification leaves open: `balance` (section 6), `layout: prefix_tree` (13)."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

from tests.reference_model.merging import Merged, in_common
from tests.reference_model.scheduling import PADDING, Config, MiniBatch, align_to, cap


def may_share(row: Merged, config: Config) -> int:
    """The tokens before the first that the row is the first to have sampled, or whose observation it weighs."""
    own = zip(row.trains, row.observes, strict=True)
    weighs = config["observation_weight"] > 0
    return row.prompt + [trains or (weighs and observes) for trains, observes in own].index(True)


def check_shared(rows: list[Merged | None], shared: list[int], config: Config) -> None:
    """How many first tokens each row of a micro-batch shares with the row before it: no more than it may, and no fewer
    than rows of a trajectory have in common, and samples of their prompts."""
    assert shared[0] == 0, "the first row shares nothing"
    for count, (before, row) in zip(shared[1:], pairwise(rows), strict=True):
        if before is None or row is None or _group(before) != _group(row):
            assert count == 0, "only rows of a group share"
            continue
        most = min(may_share(row, config), in_common(before.tokens, row.tokens))
        is_one = before.trajectory is row.trajectory
        assert count <= most, "a position is trained once"
        assert count == most or (not is_one and count >= min(most, before.prompt, row.prompt)), (
            "what is shared is there once"
        )


def _group(row: Merged) -> tuple[int, str]:
    return row.trajectory.round, row.trajectory.uid


def _check_partitions(
    ranks: list[list[list[int]]], part: MiniBatch, found: list[str], rows: list[Merged], is_open: bool
) -> None:
    """is_open: whether the service chooses how many micro-batches a partition has."""
    # A mini-batch that is only padding has one, too.
    order = dict.fromkeys(row.partition for row in rows[part.start : part.kept_end]) or [""]
    assert [name for name, _ in groupby(found)] == [*order], "one after another, by first appearance"
    assert found == part.partitions or is_open, "micro-batches of each partition"
    for rank in ranks:
        for micro_batch, name in zip(rank, found, strict=True):
            assert {rows[row].partition for row in micro_batch if row != PADDING} <= {name}, "one partition"
    if is_open:
        part.partitions = found


def check_placed(
    part: MiniBatch, found: dict[str, Any], rows: list[Merged], bounds: list[int], config: Config
) -> dict[tuple[int, ...], list[int]]:
    """Takes the placement that was found, where it is one that the specification allows. Returns what the rows of each
    micro-batch share."""
    ranks = [
        [[rank["rows"][place] for place in micro_batch] for micro_batch in rank["micro_batches"]]
        for rank in found["ranks"]
    ]
    shares = {
        tuple(rank["rows"][place] for place in micro_batch): [rank["shared"][place] for place in micro_batch]
        for rank in found["ranks"]
        for micro_batch in (rank["micro_batches"] if "shared" in rank else [])
    }
    for members, shared in shares.items():
        check_shared([None if row == PADDING else rows[row] for row in members], shared, config)
    is_tree, limit = config["layout"] == "prefix_tree", config["micro_batch"]
    if is_tree and config["on_misaligned"] == "drop_trailing" and "max_tokens" in limit:
        # How many rows can be aligned depends on how they are packed.
        part.groups += part.dropped
        part.groups, part.dropped = part.groups[: found["prompts"]], part.groups[found["prompts"] :]
        part.kept_end = bounds[part.groups[-1] + 1]
    _check_partitions(
        ranks, part, found.get("partitions", [""] * len(ranks[0])), rows, is_tree and "max_tokens" in limit
    )
    placed = [row for rank in ranks for micro_batch in rank for row in micro_batch]
    assert sorted(row for row in placed if row != PADDING) == list(range(part.start, part.kept_end)), "each row once"
    counts = {len(rank) for rank in ranks}
    assert len(counts) == 1, "equally many micro-batches"
    assert counts.pop() * len(ranks) % align_to(config) == 0, "aligned"
    if "size" in limit:
        mine = [[len(micro_batch) for micro_batch in rank] for rank in part.ranks]
        assert [[len(micro_batch) for micro_batch in rank] for rank in ranks] == mine, "rows of micro-batches"
    if "count" in limit:
        assert {len(rank) for rank in ranks} == {limit["count"]}, "micro-batches of each rank"
    if "max_tokens" in limit:
        for micro_batch in (micro_batch for rank in ranks for micro_batch in rank):
            multiple = config["pad_rows_to_multiple_of"]
            tokens = sum(-(-len(rows[row].tokens) // multiple) * multiple for row in micro_batch if row != PADDING)
            tokens -= sum(count // multiple * multiple for count in shares.get(tuple(micro_batch), []))
            assert len(micro_batch) == 1 or tokens <= cap(config), "the cap"
        if not is_tree:
            assert [len(rank) for rank in ranks] == [len(rank) for rank in part.ranks], "micro-batches of each rank"
            pads = sum(row == PADDING for row in placed)
            assert pads == sum(row == PADDING for rank in part.ranks for rows_ in rank for row in rows_), "padding rows"
    if config["balance"] != "none" and "size" in limit:
        padding, of_none = (
            [sum(row == PADDING for micro_batch in rank for row in micro_batch) for rank in each]
            for each in (ranks, part.ranks)
        )
        is_even = max(padding) - min(padding) <= len(set(part.partitions))
        # A tree has rows that share tokens next to each other also without balance.
        is_plain = padding == of_none if is_tree else ranks == part.ranks
        assert is_even or is_plain, "padding rows are dealt evenly, or as without balance"
    part.ranks = ranks
    return shares
