"""Draws files of batches, has the commands make them, and compares what they made with the reference."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.cli.terminal import gristmill
from tests.reference_model.batch import Expected, expected
from tests.reference_model.comparing import Disagreement, compare
from tests.reference_model.drawing import drawn
from tests.reference_model.rows import Config, Row, batches_of, group_of
from tests.reference_model.scheduling import Misaligned
from tests.reference_model.table import check_table

Check = Callable[[list[Row], Config], int]
"""Raises Disagreement. Returns the number of batches that it compared."""


def campaign(check: Check, seed: int, batches: int) -> Iterator[int]:
    """Compares at least this number of batches, and yields how many of them each time."""
    done = number = 0
    while done < batches:
        rows, config = drawn(f"{seed}/{number}")
        try:
            done += (count := check(rows, config))
        except Exception as error:
            raise Disagreement(f"seed {seed}/{number}: {error}") from error
        yield count
        number += 1


def by_command(rows: list[Row], config: Config) -> int:
    """`gristmill batch` for a file of these rows, and `gristmill plan` for every third."""
    with tempfile.TemporaryDirectory() as directory:
        path = _written(rows, Path(directory))
        settings, out = Path(directory) / "run.json", Path(directory) / "out"
        settings.write_text(json.dumps(config))
        made = gristmill("batch", path, "--config", settings, "--out", out)
        plans: list[Any] = [json.loads(one.read_text()) for one in sorted(out.glob("*/plan.json"))]
        wanted = _wanted(rows, config, plans)
        if (wanted is None) != ("cannot make a number of micro-batches" in made.stderr) or bool(made.returncode) != (
            wanted is None
        ):
            raise Disagreement(f"the reference {'refuses' if wanted is None else 'takes'} it; {made.stderr}")
        for number, want in enumerate(wanted or []):
            compare(want, plans[number], _shards(out / f"batch-{number:05d}"))
        if len(rows) % 3 == 0:
            table = Path(directory) / "table.parquet"
            planned = gristmill("plan", path, "--config", settings, "--table", table)
            if planned.returncode != made.returncode:
                raise Disagreement(f"plan: {planned.stderr}; batch: {made.stderr}")
            for number, want in enumerate(wanted or []):
                plan = json.loads(planned.stdout.splitlines()[number])
                compare(want, plan, None)
                of_batch = pq.read_table(table, filters=[("batch", "=", number)]).to_pydict()
                is_scaled = config.get("loss_reduction", "none") != "none"
                check_table(of_batch, plan, _shards(out / f"batch-{number:05d}"), is_scaled=is_scaled)
    return len(wanted or [])


def _written(rows: list[Row], directory: Path) -> Path:
    """A file of the rows, in one of the formats."""
    # Of lists that are all empty pyarrow does not know what they are of.
    has_empty = any(value == [] for row in rows for value in row.values())
    path = directory / f"rows.{('jsonl' if has_empty else 'parquet', 'jsonl.gz', 'jsonl', 'jsonl')[len(rows) % 4]}"
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        names = dict.fromkeys(name for row in rows for name in row)
        pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def _wanted(rows: list[Row], config: Config, plans: list[Any]) -> list[Expected] | None:
    """What the file's batches are; None where one cannot be aligned."""
    batches = batches_of(rows, config)
    if not plans and config.get("layout") == "prefix_tree":
        # Whether what shares tokens can be aligned depends on how it is packed.
        return None
    baselines: dict[tuple[str, str], float] = {}
    try:
        return [
            expected(
                batch,
                config,
                run="rows",
                number=number,
                got=plans[number] if plans else None,
                baselines=baselines,
            )
            for number, batch in enumerate(batches)
        ]
    except Misaligned:
        return None


def _shards(directory: Path) -> dict[tuple[str, int, int], bytes]:
    shards: dict[tuple[str, int, int], bytes] = {}
    for path in directory.glob("*/*.safetensors"):
        model, mini_batch = path.parent.name.split("-")
        shards[model, int(mini_batch), int(path.stem.split("-")[1])] = path.read_bytes()
    return shards


def smallest(rows: list[Row], config: Config, check: Check) -> tuple[list[Row], Config]:
    """Leaves out groups, samples, steps, columns and settings as long as something disagrees."""
    case: tuple[list[Row], Config] | None = (rows, config)
    kind = _kind(rows, config, check)
    while case is not None:
        rows, config = case
        case = next((smaller for smaller in _smaller(rows, config) if _kind(*smaller, check) == kind), None)
    return rows, config


def _kind(rows: list[Row], config: Config, check: Check) -> str:
    """What a case's disagreement begins with; "" for none."""
    try:
        check(rows, config)
    except Exception as error:  # noqa: BLE001 - a traceback is a finding, too
        return re.sub(r"\d+", "#", repr(error).split(":")[0].split("[")[0])
    return ""


_ONE_GROUP = {"train_batch_size": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 8}}
_OPTIONAL = ("agent", "episode", "policy_versions", "policy_version", "rollout_logprobs", "stop_reason", "tag", "round")


def _smaller(rows: list[Row], config: Config) -> Iterator[tuple[list[Row], Config]]:
    required = {"n_samples_per_prompt", "columns", *_ONE_GROUP}
    for key in dict.fromkeys(map(group_of, rows)):
        of_uid = [row for row in rows if group_of(row) == key]
        rest = [row for row in rows if group_of(row) != key]
        if rest and config["train_batch_size"] > 1:
            yield of_uid, {name: value for name, value in config.items() if "mini_batch" not in name} | _ONE_GROUP
        elif rest:
            yield rest, config
    for sample in {row["sample"] for row in rows}:
        if rest := [row for row in rows if row["sample"] != sample]:
            yield rest, config
    if last := max(row.get("step", 0) for row in rows):
        kept = [row for row in rows if row["step"] < last]
        yield [row | {"is_last_step": row["is_last_step"] or row["step"] == last - 1} for row in kept], config
    for column in config.get("columns", []):
        less = config | {"columns": [other for other in config["columns"] if other is not column]}
        yield [_without(_without(row, column["name"]), f"{column['name']}_start") for row in rows], less
    for name in sorted(config.keys() - required):
        yield rows, _without(config, name)
    for name in _OPTIONAL:
        if any(name in row for row in rows):
            yield [_without(row, name) for row in rows], config


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in values.items() if other != name}
