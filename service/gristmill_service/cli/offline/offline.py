"""The offline commands: `gristmill plan`, `gristmill batch` and `gristmill show`.

They write results to standard output or a directory, and progress and messages to standard error. An error is one
message and exit status 1.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from gristmill._wire.batch_table import BatchTable, Break
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import InvalidArgumentError
from gristmill_service.cli.offline.comparison import Compared, numbers_of, print_comparison
from gristmill_service.cli.offline.rollout_files import read_batches
from gristmill_service.cli.offline.table_files import check_table, write_table
from gristmill_service.cli.terminal import counted, messages, refusals, screen
from gristmill_service.config import RunConfig, read_config, warnings_of
from gristmill_service.pipeline import BuiltBatch, build_batch, plan_batch
from gristmill_service.pipeline.credit.baselines import NO_BASELINES
from gristmill_service.pipeline.plan_document import PlanDocument, baselines_after, encode_plan
from gristmill_service.storage.shard_files import write_shards

RolloutsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Rollouts: .jsonl, .jsonl.gz or .parquet, one row per step.", show_default=False
    ),
]
ConfigOption = Annotated[
    Path,
    typer.Option("-c", "--config", metavar="CONFIG", help="The run's configuration, YAML or JSON.", show_default=False),
]

_Advance = Callable[[int], None]
_SHOWN_BREAKS = 3


def register(app: typer.Typer) -> None:
    """Adds the offline commands to the command line."""
    app.command()(plan)
    app.command()(batch)
    app.command()(show)


def plan(
    file: RolloutsArgument,
    configs: Annotated[
        list[Path],
        typer.Option(
            "-c",
            "--config",
            metavar="CONFIG",
            help="The configuration of FILE's run, YAML or JSON. Repeat the option to compare several.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what the batches become as one document.")] = False,
    table_file: Annotated[
        Path | None,
        typer.Option(
            "--table",
            metavar="FILE.parquet",
            help="Also write the table of the batches: for each training row its length, place, score and advantage.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the plan of each batch in FILE, one JSON document per line, and a summary on standard error.

    With several configurations, or --json, prints instead what the batches become with each: steps, tokens, padding,
    advantages.

    FILE may also be a lengths file, with prompt_len and response_len instead of tokens, masks and rewards.

    Example: gristmill plan rollouts.jsonl --config run.yaml | jq .optimizer_steps

    Example: gristmill plan rollouts.jsonl -c run.yaml -c packed.yaml

    Example: gristmill plan rollouts.jsonl -c run.yaml --table rows.parquet
    """
    with refusals():
        if table_file is not None:
            check_table(table_file)
        if as_json or len(configs) > 1:
            if table_file is not None:
                raise InvalidArgumentError("--table is for the plans of one configuration; omit --json and other -c")
            every = [_compared(file, config) for config in configs]
            print_comparison(every, as_json)
            raise typer.Exit(int(any(one.reason for one in every)))
        batches, settings = _planned_batches(file, _read_settings(configs[0]))
        plans = []
        for document, table in _plans(batches, settings):
            plans.append((document, table))
            _warn(document)
            sys.stdout.buffer.write(encode_plan(document) + b"\n")
        sys.stdout.flush()
        if table_file is not None:
            write_table(table_file, ((document.batch, table) for document, table in plans))
        _summarize(plans)


def batch(
    file: RolloutsArgument,
    config: ConfigOption,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The directory in which batch-00000/ and so on are written.")
    ],
) -> None:
    """Build the shards of each batch in FILE, like the service.

    Writes DIR/batch-00000/plan.json and next to it MODEL-MINI_BATCH/rank-RANK.safetensors. A batch is written
    completely or not at all, and nothing is written if any batch of FILE is invalid. Prints a summary on standard
    error.

    Example: gristmill batch rollouts.jsonl --config run.yaml --out shards
    """
    with refusals():
        settings = _read_settings(config)
        _refuse_written(config, settings)
        batches, is_lengths = _read(file, settings)
        if is_lengths:
            raise InvalidArgumentError(f"{file} is a lengths file, which has no tokens; use gristmill plan")
        targets = [out / f"batch-{number:05d}" for number in range(len(batches))]
        for target in targets:
            if target.exists():
                raise InvalidArgumentError(f"{target} already exists; remove it or set another --out")
        with _bar("Building batches", len(batches), MofNCompleteColumn()) as advance:
            built = list(_build_all(batches, settings, file.name.split(".")[0], advance))
        sizes = [shard.size for one in built for shard in one.shards]
        with _bar("Writing shards", sum(sizes), DownloadColumn()) as advance:
            for target, one in zip(targets, built, strict=True):
                _write(target, one, advance)
        messages.print(f"{counted(len(sizes), 'shard')}, {decimal(sum(sizes))}, in {out}", markup=False)
        _summarize([(one.plan, one.table) for one in built])


def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that gristmill batch wrote.")],
) -> None:
    """Show rows, tokens, padding share and loss tokens of the shards under DIR, per shard and per tag.

    Example: gristmill show shards
    """
    from gristmill_service.cli.offline.show import shard_tables

    with refusals():
        for table in shard_tables(directory):
            screen(pipe_width=120).print(table)


def _compared(file: Path, config: Path) -> Compared:
    try:
        plans = _plans(*_planned_batches(file, _read_settings(config), takes_remainder=True))
        return Compared(str(config), numbers_of(plans))
    except InvalidArgumentError as error:
        return Compared(str(config), None, str(error).removeprefix(f"{config}: "))


def _planned_batches(file: Path, config: RunConfig, takes_remainder: bool = False) -> tuple[list[Steps], RunConfig]:
    """Returns the file's batches and their configuration: for lengths, without the filters that read tokens."""
    batches, is_lengths = _read(file, config, takes_remainder)
    if not is_lengths:
        return batches, config
    stale = "count" if config.stale == "mask" else config.stale
    return batches, config.model_copy(update={"zero_variance_filter": None, "overlong_filter": (), "stale": stale})


def _read_settings(path: Path) -> RunConfig:
    """Reads the run's settings. Also raises InvalidArgumentError for settings that only a service supports."""
    config = read_config(path)
    for warning in warnings_of(config):
        messages.print(f"[yellow]warning:[/] {escape(str(path))}: {warning}")
    if config.zero_variance_filter == "replace":
        raise InvalidArgumentError(
            f"{path}: zero_variance_filter: replace replaces a group with equal scores by the next group, and a file "
            "has no next group; use zero_variance_filter: mask, or omit this setting"
        )
    return config


def _refuse_written(path: Path, config: RunConfig) -> None:
    for column in config.written_columns:
        raise InvalidArgumentError(
            f"{path}: columns: {column.name} has source: trainer, but for a file no trainer writes it; set source: "
            "rollout and add the column to the file, or use gristmill plan"
        )


def _read(file: Path, config: RunConfig, takes_remainder: bool = False) -> tuple[list[Steps], bool]:
    size = file.stat().st_size if file.is_file() else None
    with _bar("Reading rollouts", size, DownloadColumn()) as advance:
        done = 0

        def read(position: int) -> None:
            nonlocal done
            if position - done >= 1 << 20:
                advance(position - done)
                done = position

        return read_batches(file, config, read, takes_remainder)


def _plans(batches: list[Steps], config: RunConfig) -> Iterator[tuple[PlanDocument, BatchTable]]:
    baselines = NO_BASELINES
    for number, steps in enumerate(batches):
        document, table = plan_batch(steps, config, batch=number, baselines=baselines)
        baselines = baselines_after(document)
        yield document, table


def _build_all(batches: list[Steps], config: RunConfig, run: str, advance: _Advance) -> Iterator[BuiltBatch]:
    baselines = NO_BASELINES
    for number, steps in enumerate(batches):
        built = build_batch(steps, config, run=run, batch=number, baselines=baselines)
        baselines = baselines_after(built.plan)
        _warn(built.plan)
        advance(1)
        yield built


def _summarize(plans: Sequence[tuple[PlanDocument, BatchTable]]) -> None:
    """Prints the totals of the plans, where merging broke, and the tokens around the first breaks."""
    documents = [document for document, _ in plans]
    messages.print(_totals(documents))
    if any(document.merge_mismatches for document in documents):
        messages.print(_broken(documents))
        for one in islice(chain.from_iterable(table.shown_breaks() for _, table in plans), _SHOWN_BREAKS):
            messages.print(f"  {_shown_break(one)}", markup=False)


def _shown_break(one: Break) -> str:
    difference = (
        f"{one.column} differs from step {one.against}"
        if one.column
        else f"after {one.before}, {one.was} of step {one.against} came back as {one.now}"
    )
    return f"{TrajectoryKey(one.round, one.uid, one.sample)} step {one.step}: {difference}"


def _totals(plans: Sequence[PlanDocument]) -> str:
    received, rows = sum(plan.rows_received for plan in plans), sum(plan.rows for plan in plans)
    parts = [
        counted(len(plans), "batch", "batches"),
        counted(sum(plan.prompts for plan in plans), "prompt group", "prompt groups"),
        f"{counted(received, 'row', 'rows')} sent" + (f", {rows:,} after merging" if rows < received else ""),
        f"{counted(sum(plan.optimizer_steps for plan in plans), 'optimizer step', 'optimizer steps')} on "
        f"{counted(plans[0].dp_size, 'rank', 'ranks')}",
    ]
    return "; ".join(parts)


def _broken(plans: Sequence[PlanDocument]) -> str:
    """Returns how many trajectories became several rows, and at how many of their steps for each cause."""
    mismatches = [(plan.batch, one) for plan in plans for one in plan.merge_mismatches]
    trajectories = len({(batch, one.uid, one.round, one.sample) for batch, one in mismatches})
    causes = Counter(one.cause for _, one in mismatches)
    steps = ", ".join(f"{count:,} {_CAUSES[cause]}" for cause, count in causes.most_common())
    return f"merging broke in {counted(trajectories, 'trajectory', 'trajectories')}: {steps}"


_CAUSES = {
    "prompt": "where the earlier prompt was changed",
    "response": "where the earlier response came back as other tokens",
    "truncated": "where the prompt ends before the earlier response does",
    "column": "where a column with merge: equal differs",
}


def _warn(plan: PlanDocument) -> None:
    counts, warning = plan.counts, f"[yellow]warning:[/] batch {plan.batch}:"
    if counts.get("rows_over_max_seq_len"):
        messages.print(f"{warning} {counts['rows_over_max_seq_len']} rows exceed max_seq_len, and are not truncated")
    if counts.get("maxrl_nonpositive_groups"):
        messages.print(
            f"{warning} {counts['maxrl_nonpositive_groups']} groups have a mean score of 0 or less, "
            "for which maxrl reinforces the worse samples"
        )
    if counts.get("realigned_tokens"):
        messages.print(
            f"{warning} {counts['realigned_tokens']} sampled tokens were retokenized in the next prompt "
            f"(retokenized_tail) and are not trained; {counts['realigned_loss_tokens']} of them had loss_mask 1"
        )


def _write(target: Path, built: BuiltBatch, advance: _Advance) -> None:
    """Writes the batch directory completely, or not at all."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_shards(partial, built.shards, advance)
        (partial / "plan.json").write_bytes(encode_plan(built.plan) + b"\n")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _bar(label: str, total: int | None, done: ProgressColumn) -> Iterator[_Advance]:
    """Shows a progress bar on a terminal, and yields a function that advances it. total: None if unknown."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
