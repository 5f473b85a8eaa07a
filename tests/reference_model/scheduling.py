"""Mini-batches, ranks and micro-batches (specification, sections 5 and 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, lcm
from typing import Any

Config = dict[str, Any]
Ranks = list[list[list[int]]]
"""Of each rank, its micro-batches: row numbers, -1 for padding rows."""

PADDING = -1


class Misaligned(Exception):
    """A mini-batch cannot be aligned, and may not be padded."""


@dataclass
class MiniBatch:
    """start, end: its rows before any drop; kept_end: the end of those kept. groups, dropped: numbers. padding: rows
    that fill it up with `mini_batch_unit: sequence`. partitions: of each micro-batch of a rank."""

    model: str
    index: int
    start: int
    end: int
    kept_end: int
    groups: list[int]
    dropped: list[int]
    padding: int
    ranks: Ranks
    partitions: list[str] = field(default_factory=list)


def align_to(config: Config) -> int:
    group = config["microbatch_group_size"] if config["vpp_size"] > 1 else 1
    return int(config["dp_size"] * group)


def models(config: Config) -> list[str]:
    return ["policy"] + (["critic"] if config["critic_mini_batch_size"] else [])


def mini_batches(bounds: list[int], lengths: list[int], partitions: list[str], config: Config) -> list[MiniBatch]:
    """bounds: of the groups' rows, one more than groups. partitions: of each row. Ranks are those without balance."""
    parts = [part for model in models(config) for part in _parts(bounds, model, config)]
    for part in parts:
        _align(part, bounds, lengths, partitions, config)
    return parts


def _parts(bounds: list[int], model: str, config: Config) -> list[MiniBatch]:
    size, groups = config[f"{model}_mini_batch_size"], len(bounds) - 1
    if config["mini_batch_unit"] != "sequence":
        return [
            MiniBatch(model, index, bounds[first], end, end, list(range(first, last)), [], 0, [])
            for index, first in enumerate(range(0, groups, size))
            for last in [min(first + size, groups)]
            for end in [bounds[last]]
        ]
    multiple = lcm(*(config[f"{name}_mini_batch_size"] for name in models(config)))
    count = ceil(bounds[-1] / multiple) * multiple // size
    parts, start = [], 0
    for index in range(count):
        end = start + bounds[-1] // count + (index < bounds[-1] % count)
        held = [group for group in range(groups) if bounds[group] < end and bounds[group + 1] > start]
        parts.append(MiniBatch(model, index, start, end, end, held, [], size - (end - start), []))
        start = end
    return parts


def _align(part: MiniBatch, bounds: list[int], lengths: list[int], partitions: list[str], config: Config) -> None:
    kept = list(part.groups)
    while not all(
        _is_aligned(rows, lengths, config) for rows in apart(range(part.start, part.kept_end), partitions).values()
    ):
        # How what shares tokens is packed is for the service to choose, and with it what can be aligned.
        is_open = config["layout"] == "prefix_tree" and "max_tokens" in config["micro_batch"]
        if config["on_misaligned"] == "pad" or is_open:
            break
        if config["on_misaligned"] == "error" or len(kept) == 1:
            raise Misaligned
        kept.pop()
        part.kept_end = bounds[kept[-1] + 1]
        if part.kept_end - part.start < align_to(config):
            raise Misaligned
    part.groups, part.dropped = kept, part.groups[len(kept) :]
    every = apart(range(part.start, part.kept_end), partitions)
    counts = _counts([len(rows) for rows in every.values()], config)
    part.ranks = [[] for _ in range(config["dp_size"])]
    for (partition, rows), count in zip((every or {"": []}).items(), counts or [None], strict=True):
        ranks = _ranks(rows, part.padding, count, lengths, config)
        for rank, more in zip(part.ranks, ranks, strict=True):
            rank += more
        part.partitions += [partition] * len(ranks[0])


def apart(rows: Iterable[int], partitions: list[str]) -> dict[str, list[int]]:
    """The rows of each partition, by first appearance."""
    every: dict[str, list[int]] = {}
    for row in rows:
        every.setdefault(partitions[row], []).append(row)
    return every


def _counts(rows: list[int], config: Config) -> list[int | None]:
    """The micro-batches of each partition on a rank, where their number is set."""
    if "count" not in config["micro_batch"]:
        return [None] * len(rows)
    counts = [1] * len(rows)
    while sum(counts) < config["micro_batch"]["count"] and rows:
        fullest = max(range(len(rows)), key=lambda place: (rows[place] / counts[place], -place))
        counts[fullest] += 1
    return [*counts]


def _ranks(rows: list[int], padding: int, count: int | None, lengths: list[int], config: Config) -> Ranks:
    dp, limit = config["dp_size"], config["micro_batch"]
    if "max_tokens" in limit:
        packed = _packed(rows, lengths, config)
        return [packed[rank::dp] for rank in range(dp)]
    if "count" in limit:
        return [[cut or [PADDING] for cut in _chunks(chunk, count or limit["count"])] for chunk in _chunks(rows, dp)]
    return _by_size(rows, padding, config)


def _is_aligned(rows: list[int], lengths: list[int], config: Config) -> bool:
    limit = config["micro_batch"]
    if "max_tokens" in limit:
        packed = len(_first_fit(rows, lengths, config))
        return ceil(packed / align_to(config)) * align_to(config) <= len(rows)
    if "count" in limit:
        return True
    per_rank = ceil(ceil(len(rows) / config["dp_size"]) / limit["size"])
    return per_rank * config["dp_size"] % align_to(config) == 0


def _chunks(rows: list[int], count: int) -> list[list[int]]:
    """Contiguous and equal; the first ones have one row more."""
    each, more = divmod(len(rows), count)
    ends = [0]
    for index in range(count):
        ends.append(ends[-1] + each + (index < more))
    return [rows[ends[index] : ends[index + 1]] for index in range(count)]


def _by_size(rows: list[int], padding: int, config: Config) -> Ranks:
    dp, size = config["dp_size"], config["micro_batch"]["size"]
    padded = rows + [PADDING] * padding
    # The fewest padding rows with which every rank has equally many rows, in a number of micro-batches that fits.
    while len(padded) % dp or ceil(len(padded) // dp / size) * dp % align_to(config):
        padded.append(PADDING)
    each = len(padded) // dp
    ranks = []
    for rank in range(dp):
        chunk = padded[rank * each : (rank + 1) * each]
        cut = [chunk[begin : begin + size] for begin in range(0, each, size)]
        if config["micro_batch"].get("full"):
            cut[-1] += [PADDING] * (size - len(cut[-1]))
        ranks.append(cut)
    return ranks


def cap(config: Config) -> int:
    return int(config["micro_batch"]["max_tokens"] * config["cp_size"])


def _first_fit(rows: list[int], lengths: list[int], config: Config) -> list[list[int]]:
    packed: list[list[int]] = []
    for row in rows:
        for others in packed:
            if sum(lengths[other] for other in others) + lengths[row] <= cap(config):
                others.append(row)
                break
        else:
            packed.append([row])
    return packed


def _packed(rows: list[int], lengths: list[int], config: Config) -> list[list[int]]:
    """First fit, split until aligned; the missing ones are padding rows."""

    def tokens(members: list[int]) -> int:
        return sum(lengths[row] for row in members)

    packed = _first_fit(rows, lengths, config)
    while len(packed) % align_to(config):
        several = [place for place, members in enumerate(packed) if len(members) > 1]
        if not several:
            packed.append([PADDING])
            continue
        place = max(several, key=lambda place: (tokens(packed[place]), place))
        halves: tuple[list[int], list[int]] = ([], [])
        for row in sorted(packed[place], key=lambda row: -lengths[row]):
            halves[tokens(halves[1]) < tokens(halves[0])].append(row)
        packed[place] = halves[0]
        packed.append(halves[1])
    return packed
