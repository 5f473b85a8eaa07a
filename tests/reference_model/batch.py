"""A batch from its rows to its plan and its shards (specification, section 10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.reference_model import credit as credits
from tests.reference_model import layout, plan, scheduling
from tests.reference_model.credit import Credit, Denominators, denominators
from tests.reference_model.layout import Line, Tensors, Widths
from tests.reference_model.merging import Merged, Mismatch, merged
from tests.reference_model.placement import check_placed
from tests.reference_model.rows import DEFAULTS, Config, Group, Row, Trajectory, filtered, groups_of, mask_steps
from tests.reference_model.scheduling import PADDING, MiniBatch


@dataclass
class Expected:
    """shards: tensors and metadata, by model, mini-batch and rank."""

    plan: plan.Plan
    shards: dict[tuple[str, int, int], tuple[Tensors, dict[str, Any]]]


def expected(
    rows: list[Row],
    config: Config,
    *,
    run: str,
    number: int,
    got: plan.Plan | None,
    announced: int | None = None,
    baselines: dict[tuple[str, str], float] | None = None,
) -> Expected:
    """baselines: the run's before the batch, which are changed to those after it. got: the plan to judge, whose
    placement of rows is taken where the specification leaves it open (`balance`, `layout: prefix_tree`), once it is
    checked. announced: the current policy version; None: the batch's newest."""
    batch = Batch(rows, DEFAULTS | config, announced, {} if baselines is None else baselines)
    batch.schedule(got)
    shards = batch.shards(run, number)
    return Expected(plan.document(batch, number, shards), shards)


@dataclass
class Batch:
    """received: rows. stale: groups dropped as stale. rows: merged ones, in order. bounds: of the groups' rows.
    padding: next to each row in the policy's shards. shares: what the rows of each micro-batch share."""

    received: list[Row]
    config: Config
    announced: int | None
    baselines: dict[tuple[str, str], float]
    padding: dict[int, int] = field(default_factory=dict)
    parts: list[MiniBatch] = field(default_factory=list)
    shares: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups, self.stale, self.counts, self.current = filtered(
            groups_of(self.received), self.config, self.announced
        )
        self.trajectories: list[Trajectory] = [one for group in self.groups for one in group.trajectories]
        every = [merged(one, self.config) for one in self.trajectories]
        self.rows_of: list[list[Merged]] = [rows for rows, _ in every]
        self.mismatches: list[list[Mismatch]] = [found for _, found in every]
        self.rows = [row for rows in self.rows_of for row in rows]
        if self.config["retokenized_tail"]:
            self.counts |= _realigned(self.rows_of)
        self.counts |= mask_steps(self.groups, self.config)
        self.before = dict(self.baselines)
        self.credit: Credit = credits.credit(self.groups, self.rows_of, self.config, self.baselines)
        self.lengths = [len(row.tokens) for row in self.rows]
        multiple = self.config["pad_rows_to_multiple_of"]
        self.padded = [-(-length // multiple) * multiple for length in self.lengths]
        self.partitions = [row.partition for row in self.rows]
        sizes = [sum(self.group(row) is group for row in self.rows) for group in self.groups]
        self.bounds = [sum(sizes[:end]) for end in range(len(sizes) + 1)]

    def group(self, row: Merged) -> Group:
        one = row.trajectory
        return next(group for group in self.groups if (group.round, group.uid) == (one.round, one.uid))

    def shared(self, rows: list[int]) -> list[int]:
        """How many first tokens each row of a micro-batch shares with the row before it."""
        return self.shares.get(tuple(rows), [0] * len(rows))

    def schedule(self, got: plan.Plan | None) -> None:
        self.parts = scheduling.mini_batches(self.bounds, self.padded, self.partitions, self.config)
        is_open = self.config["balance"] != "none" or self.config["layout"] == "prefix_tree"
        for part, found in zip(self.parts, got["mini_batches"], strict=True) if is_open and got else ():
            self.shares |= check_placed(part, found, self.rows, self.bounds, self.config)

    def shards(self, run: str, number: int) -> dict[tuple[str, int, int], tuple[Tensors, dict[str, Any]]]:
        shards = {}
        form = layout.form_of(
            self.config,
            has_logprobs=any(row.get("rollout_logprobs") is not None for row in self.received),
            has_versions=any(row.get("policy_versions") is not None for row in self.received),
            has_returns=self.config["advantage_estimator"] in credits.PER_TOKEN,
        )
        for model in scheduling.models(self.config):
            parts = [part for part in self.parts if part.model == model]
            lines, divided = self._lines(parts, form)
            for part, divisors in zip(parts, divided, strict=True):
                for rank, micro_batches in enumerate(part.ranks):
                    widths = self._widths(parts, part, micro_batches, lines)
                    placed = [
                        list(zip([lines[row] for row in rows], self.shared(rows), strict=True))
                        for rows in micro_batches
                    ]
                    tensors = layout.tensors_of(placed, widths, form, self.config)
                    labels = {"run": run, "batch": number, **self._labels(part, rank, divisors)}
                    shards[model, part.index, rank] = tensors, labels
                    if model == "policy" and self.config["layout"] == "left_padded":
                        for rows, (width, _) in zip(micro_batches, widths, strict=True):
                            self.padding |= {row: width - lines[row].length for row in rows}
                    elif model == "policy":
                        for rows, of_rows in zip(micro_batches, placed, strict=True):
                            self.padding |= dict(zip(rows, layout.tails_of(of_rows, self.config), strict=True))
        return shards

    def _lines(self, parts: list[MiniBatch], form: layout.Form) -> tuple[dict[int, Line], list[Denominators]]:
        """Each row as the shards of a model have it, and the denominators of its mini-batches."""
        lines, divided = {PADDING: layout.padding_line(form, self.config)}, []
        by_token = self._by_token(parts)
        for part in parts:
            kept = {number: self.rows[number] for number in range(part.start, part.kept_end)}
            divided.append(divisors := denominators(kept, self.config))
            whitened = self._whitener(part) if self.credit.advantages else None
            for number, row in kept.items():
                scale = divisors.scale(number, self.config) if part.model == "policy" else 1.0
                one = whitened(self._of_trajectory(row)) * scale if whitened else 0.0
                responses = self._responses(row, one, by_token, scale)
                lines[number] = layout.line_of(number, row, responses, form, self.config)
            if "loss_weight" in form.responses:
                divisors.loss_weight = sum(sum(lines[number].responses["loss_weight"]) for number in kept)
        return lines, divided

    def _by_token(self, parts: list[MiniBatch]) -> dict[Any, float]:
        """The advantages of estimators with credit per token, by trajectory and token, whitened."""
        by_token = {
            (id(one), token): advantage
            for one, of_one in zip(self.trajectories, self.credit.of_tokens, strict=False)
            for token, (advantage, _) in of_one.items()
        }
        if not by_token:
            return by_token
        wholes = [list(by_token)] if self.config["whiten"] == "batch" else []
        if self.config["whiten"] == "mini_batch":
            wholes = [
                [
                    (id(row.trajectory), source)
                    for row in self.rows[part.start : part.kept_end]
                    for source, trains in zip(row.sources, row.trains, strict=True)
                    if trains and source is not None and (id(row.trajectory), source) in by_token
                ]
                for part in parts
            ]
        for keys in wholes:
            whitened = credits.whitener([by_token[key] for key in keys])
            by_token |= {key: whitened(by_token[key]) for key in keys}
        return by_token

    def _whitener(self, part: MiniBatch) -> Callable[[float], float]:
        """What `whiten` makes of the advantage of a trajectory in a mini-batch."""
        match self.config["whiten"]:
            case "trajectories":
                return credits.whitener(self.credit.advantages)
            case "batch":
                rows = self.rows
            case "mini_batch":
                rows = self.rows[part.start : part.kept_end]
            case _:
                return lambda one: one
        return credits.whitener(
            [self._of_trajectory(row) for row in rows for is_trained in row.loss_mask if is_trained]
        )

    def _of_trajectory(self, row: Merged) -> float:
        """The advantage of the row's trajectory, before whitening."""
        return next(
            advantage
            for one, advantage in zip(self.trajectories, self.credit.advantages, strict=True)
            if one is row.trajectory
        )

    def _responses(self, row: Merged, own: float, by_token: dict[Any, float], scale: float) -> dict[str, list[float]]:
        """The row's rewards, advantages and returns. own: the advantage of its trajectory."""
        one, credit = row.trajectory, self.credit
        place = next(place for place, other in enumerate(self.trajectories) if other is one)
        responses = {"rewards": row.of_tokens(credit.rewards[place], 0.0, only_trained=True)}
        if credit.of_tokens:
            of_one = credit.of_tokens[place]
            trained = [
                source if trains and source in of_one else None
                for source, trains in zip(row.sources, row.trains, strict=True)
            ]
            responses["advantages"] = [0.0 if token is None else by_token[id(one), token] * scale for token in trained]
            if self.config["advantage_estimator"] in credits.PER_TOKEN:
                responses["returns"] = [0.0 if token is None else of_one[token][1] for token in trained]
        elif credit.advantages:
            responses["advantages"] = [own] * len(row.sources)
        else:
            given = [[value * scale for value in step["advantage"]] for step in one.steps]
            responses["advantages"] = row.of_tokens(given, 0.0)
        return responses

    def _widths(
        self, parts: list[MiniBatch], part: MiniBatch, shard: list[list[int]], lines: dict[int, Line]
    ) -> list[Widths]:
        """Of each micro-batch of a shard: that of the longest row among those that `pad_width` names."""
        over = {
            "batch": [rows for other in parts for rank in other.ranks for rows in rank],
            "mini_batch": [rows for rank in part.ranks for rows in rank],
            "shard": shard,
        }.get(self.config["pad_width"])
        groups = [[rows] for rows in shard] if over is None else [over] * len(shard)
        return [layout.widths_of([lines[row] for rows in group for row in rows], self.config) for group in groups]

    def _labels(self, part: MiniBatch, rank: int, divisors: Denominators) -> dict[str, Any]:
        """A shard's metadata, without its run and batch."""
        rows = [row for micro_batch in part.ranks[rank] for row in micro_batch]
        padding, taken = "padding", {group.uid for group in [*self.groups, *self.stale]}
        while padding in taken:
            padding = f"_{padding}"

        def each(of_row: Any, otherwise: Any) -> list[Any]:
            return [otherwise if row == PADDING else of_row(self.rows[row]) for row in rows]

        totals = {name: getattr(divisors, name) for name in ("loss_tokens", "rows", "prompts", "trajectories")}
        if divisors.loss_weight is not None:
            totals["loss_weight"] = divisors.loss_weight
        by_row = {
            name: [1 if row == PADDING else divisors.of_rows[row][at] for row in rows]
            for at, name in enumerate(("row_tokens", "prompt_tokens", "trajectory_tokens"))
        }
        labels = {
            "model": part.model,
            "mini_batch": part.index,
            "rank": rank,
            "dp_size": len(part.ranks),
            "uids": each(lambda row: row.trajectory.uid, padding),
            "rounds": each(lambda row: row.trajectory.round, -1),
            "stop_reasons": each(lambda row: row.trajectory.steps[row.path[-1]]["stop_reason"], "padding"),
            "micro_batches": plan.places(part.ranks[rank]),
            "loss_denominators": totals | by_row,
        }
        if any(self.partitions):
            labels["partitions"] = part.partitions
        if any(group.tag for group in self.groups):
            labels["tags"] = each(lambda row: self.group(row).tag, "")
        for name in ("agent", "episode"):
            if any(one.steps[0][name] for one in self.trajectories):
                labels[f"{name}s"] = each(lambda row, name=name: row.trajectory.steps[0][name], "")
        if any(step["step_key"] for one in self.trajectories for step in one.steps):
            labels["step_keys"] = each(lambda row: [row.trajectory.steps[step]["step_key"] for step in row.path], None)
        if any("reward_components" in one.steps[-1] for one in self.trajectories):
            labels["reward_components"] = each(lambda row: row.trajectory.steps[-1].get("reward_components", {}), None)
        if self.config["cp_shards"] != "none":
            declared = [column["name"] for column in self.config["columns"] if column["scope"] == "token"]
            labels["context_parallel"] = {
                "size": self.config["cp_size"],
                "shards": self.config["cp_shards"],
                "token_tensors": ["sequences", "position_ids", *declared],
            }
        if self.config["layout"] == "prefix_tree":
            labels["response_lengths"] = each(lambda row: len(row.sources), 0)
        return labels


def _realigned(rows_of: list[list[Merged]]) -> dict[str, int]:
    """Counts sampled tokens that no row has, and those of them with loss_mask 1."""
    lost = trained = 0
    for rows in rows_of:
        kept = {source for row in rows for source in row.sources}
        for step, mask in enumerate(rows[0].trajectory.masks):
            gone = [index for index in range(len(mask)) if (step, index) not in kept]
            lost, trained = lost + len(gone), trained + sum(mask[index] for index in gone)
    return {"realigned_tokens": lost, "realigned_loss_tokens": trained}
