"""`gristmill plan`, `batch` and `show` on real files; one test of each starts a process, as a person does."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests.cli.terminal import GRISTMILL, gristmill, gristmill_process
from tests.rows import make_config
from tests.strategies import Row

CONFIG = make_config(train_batch_size=2, n_samples_per_prompt=2, merge="prefix", dp_size=2)


def rollouts(prompts: int = 4) -> list[Row]:
    """Two samples per prompt that answer differently, of two steps each that merge."""
    rows = []
    for prompt in range(prompts):
        for sample in range(2):
            said = [5, 6 + 3 * sample]
            first: Row = {"prompt_token_ids": [1, prompt], "response_ids": said, "is_last_step": False, "reward": 0.0}
            second: Row = {
                "prompt_token_ids": [1, prompt, *said, 7],
                "response_ids": [8],
                "is_last_step": True,
                "reward": 1.0,
            }
            for step, row in enumerate((first, second)):
                mask = [1] * len(row["response_ids"])
                rows.append({"uid": f"p{prompt}", "sample": sample, "step": step, "loss_mask": mask, **row})
    return rows


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(CONFIG))
    return path


def lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(lines(rollouts()))
    return path


def run(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return gristmill(*arguments, expect=expect)


@pytest.mark.slow
def test_a_plan_is_utf_8_whatever_the_terminal_takes(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    rows = rollouts(2)
    for row in rows:
        row.update(uid=row["uid"].replace("p", "プロンプト"), policy_version=0 if row["uid"] == "p0" else 9)
    config.write_text(json.dumps(CONFIG | {"max_staleness": 1, "stale": "drop"}))
    file = tmp_path / "rollouts.jsonl"
    file.write_text(lines(rows))
    command = [GRISTMILL, "plan", str(file), "--config", str(config)]
    done = subprocess.run(command, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode())["dropped_groups"] == [{"uid": "プロンプト0", "round": 0}]


@pytest.mark.parametrize("command", ["plan", "batch"])
def test_replacing_groups_is_refused_as_a_file_has_no_next_group(
    command: str, config: Path, file: Path, tmp_path: Path
) -> None:
    config.write_text(json.dumps(CONFIG | {"zero_variance_filter": "replace"}))
    out = tmp_path / "out"
    done = run(command, file, "--config", config, *(["--out", out] if command == "batch" else []), expect=1)
    assert done.stdout == ""
    assert "zero_variance_filter: replace" in done.stderr
    assert "use zero_variance_filter: mask" in done.stderr
    assert not out.exists()


def test_columns_that_a_trainer_writes_are_planned_and_not_laid_out(config: Path, file: Path, tmp_path: Path) -> None:
    columns = [{"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}]
    config.write_text(json.dumps({**CONFIG, "advantage_estimator": "gae", "columns": columns}))
    assert run("plan", file, "--config", config).stdout
    said = run("batch", file, "--config", config, "--out", tmp_path / "out", expect=1).stderr
    assert "values has source: trainer" in " ".join(said.split())


def test_plan_prints_one_document_a_batch_on_standard_output_and_nothing_else(config: Path, file: Path) -> None:
    done = run("plan", file, "--config", config)
    plans = [json.loads(line) for line in done.stdout.splitlines()]
    assert [plan["batch"] for plan in plans] == [0, 1]
    assert [(plan["rows_received"], plan["rows"], plan["prompts"], plan["optimizer_steps"]) for plan in plans] == [
        (8, 4, 2, 2)
    ] * 2
    first = plans[0]["mini_batches"][0]
    assert (first["model"], first["index"], first["start"], first["end"]) == ("policy", 0, 0, 2)
    assert first["ranks"] == [
        {"rank": 0, "rows": [0], "micro_batches": [[0]]},
        {"rank": 1, "rows": [1], "micro_batches": [[0]]},
    ]
    assert first["loss_tokens"] == 6


def test_batch_writes_the_plan_and_the_shards_that_plan_printed(config: Path, file: Path, tmp_path: Path) -> None:
    planned = [json.loads(line) for line in run("plan", file, "--config", config).stdout.splitlines()]
    assert run("batch", file, "--config", config, "--out", tmp_path / "out").stdout == ""
    for number, plan in enumerate(planned):
        directory = tmp_path / "out" / f"batch-{number:05d}"
        written = json.loads((directory / "plan.json").read_text())
        assert written["mini_batches"] == plan["mini_batches"]
        names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.safetensors"))
        assert names == [f"policy-{m:03d}/rank-{r:03d}.safetensors" for m in range(2) for r in range(2)]
        with safe_open(directory / names[0], framework="np") as shard:
            assert json.loads(shard.metadata()["run"]) == "rollouts"
            assert json.loads(shard.metadata()["batch"]) == number
            assert shard.get_tensor("loss_mask").tolist() == [[1, 1, 0, 1]]


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_gzip_and_parquet_give_the_same_plans_as_json_lines(
    config: Path, file: Path, tmp_path: Path, kind: str
) -> None:
    other = tmp_path / f"rollouts.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rollouts()), other)
    else:
        other.write_bytes(gzip.compress(lines(rollouts()).encode()))
    assert run("plan", other, "--config", config).stdout == run("plan", file, "--config", config).stdout


def test_the_order_of_rows_in_the_file_does_not_matter_beyond_the_order_of_prompts(
    config: Path, file: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed.jsonl"
    rows = rollouts()
    mixed.write_text(lines([*rows[::4], *[row for index, row in enumerate(rows) if index % 4][::-1]]))
    assert run("plan", mixed, "--config", config).stdout == run("plan", file, "--config", config).stdout


def test_a_lengths_file_is_planned_and_not_laid_out(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    rows = [
        {"uid": f"p{prompt}", "sample": sample, "step": 0, "is_last_step": True, "prompt_len": 9, "response_len": 4}
        for prompt in range(2)
        for sample in range(2)
    ]
    file.write_text(lines(rows))
    refused = run("plan", file, "--config", config, expect=1)
    assert "is a lengths file" in refused.stderr
    assert "set merge: none" in refused.stderr
    config.write_text(json.dumps(CONFIG | {"merge": "none", "zero_variance_filter": "mask"}))
    plan = json.loads(run("plan", file, "--config", config).stdout)
    assert [part["loss_tokens"] for part in plan["mini_batches"]] == [8, 8]
    assert "use gristmill plan" in run("batch", file, "--config", config, "--out", tmp_path / "o", expect=1).stderr


@pytest.mark.slow
def test_show_prints_rows_tokens_padding_and_loss_tokens_of_each_shard(
    config: Path, file: Path, tmp_path: Path
) -> None:
    run("batch", file, "--config", config, "--out", tmp_path / "out")
    shown = gristmill_process("show", tmp_path / "out").stdout
    assert "batch-00001/policy-001/rank-001.safetensors" in shown
    header, first = shown.splitlines()[:2]
    assert header.split() == ["shard", "rows", "padding", "rows", "tokens", "padding", "share", "loss", "tokens"]
    assert first.split() == ["batch-00000/policy-000/rank-000.safetensors", "1", "0", "6", "0.0%", "3"]
    assert shown.splitlines()[-1].split()[:4] == ["total", "8", "0", "48"]


@pytest.mark.parametrize("layout", [{}, {"layout": "packed"}, {"pad_width": "micro_batch"}])
def test_show_counts_rows_and_tokens_of_each_tag(config: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    config.write_text(json.dumps(CONFIG | {"dp_size": 3} | layout))
    file = tmp_path / "rollouts.jsonl"
    file.write_text(lines(row | ({"tag": "[b]math"} if row["uid"] == "p0" else {}) for row in rollouts(prompts=2)))
    run("batch", file, "--config", config, "--out", tmp_path / "out")
    shown = [line.split() for line in run("show", tmp_path / "out").stdout.splitlines()]
    assert shown[:3] == [
        ["tag", "rows", "tokens", "loss", "tokens"],
        ["(none)", "2", "12", "6"],
        ["[b]math", "2", "12", "6"],
    ]


@pytest.mark.parametrize("layout", [{"layout": "packed"}, {"pad_width": "micro_batch"}, {"pad_to_multiple_of": 4}])
def test_show_counts_padding_of_every_layout(config: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    config.write_text(json.dumps(CONFIG | {"dp_size": 3, "micro_batch": {"size": 2}} | layout))
    file = tmp_path / "rollouts.jsonl"
    file.write_text(lines(rollouts(prompts=2)))
    run("batch", file, "--config", config, "--out", tmp_path / "out")
    total = run("show", tmp_path / "out").stdout.splitlines()[-1].split()
    tokens, padding_tokens = 24, {"packed": 2 * 2, "micro_batch": 2 * 2}.get(next(iter(layout.values())), 4 * 2 + 2 * 4)
    assert total[1:4] == ["6", "2", str(tokens)]
    assert total[4] == f"{padding_tokens / (tokens + padding_tokens):.1%}"
    assert total[5] == "12"


@pytest.mark.parametrize("multiple", [1, 8])
def test_show_counts_the_tokens_that_stand_in_shards_of_a_prefix_tree(
    config: Path, tmp_path: Path, multiple: int
) -> None:
    settings = {"layout": "prefix_tree", "merge": "none", "micro_batch": {"size": 8}}
    config.write_text(json.dumps(CONFIG | settings | {"pad_rows_to_multiple_of": multiple}))
    file = tmp_path / "rollouts.jsonl"
    file.write_text(lines(rollouts(prompts=2)))
    (plan,) = [json.loads(line) for line in run("plan", file, "--config", config).stdout.splitlines()]
    run("batch", file, "--config", config, "--out", tmp_path / "out")
    shown = run("show", tmp_path / "out").stdout.splitlines()
    assert shown[0].split()[-2:] == ["distinct", "tokens"]
    total, metrics = shown[-1].split(), plan["metrics"]
    assert [total[3], total[-1]] == [str(metrics["tokens"]), str(metrics["distinct_tokens"])]
    assert metrics["distinct_tokens"] < metrics["tokens"]
    assert (total[4] == "0.0%") == (multiple == 1)


def test_a_lengths_file_is_not_planned_as_a_prefix_tree(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(CONFIG | {"layout": "prefix_tree", "merge": "none", "step_wise": False}))
    file = tmp_path / "lengths.jsonl"
    file.write_text(lines({"uid": f"p{n // 2}", "sample": n % 2, "prompt_len": 3, "response_len": 2} for n in range(4)))
    said = run("plan", file, "--config", config, expect=1).stderr
    assert "needs tokens to find shared prefixes" in " ".join(said.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b'{"uid": "a", "sample"', "line 1 is not valid JSON"),
        (b"[1, 2]\n", "row 0 is a list; pass a list of dicts, one per row"),
        (b"null\n[1]\n", "row 0 is a NoneType; pass a list of dicts, one per row"),
        (b"[" * 200_000, "line 1 is not valid JSON"),
        (b'{"a":' * 200_000, "line 1 is not valid JSON"),
        (b'{"uid": ' + b"1" * 5000 + b"}", "line 1 is not valid JSON"),
        (lines(rollouts()).replace("1.0", "1" + "0" * 400, 1).encode(), "uid 'p0' sample 0 step 1: reward is inf"),
        (lines(rollouts()).replace("p3", "\\ud800").encode(), "not valid Unicode"),
        (b"\x00\x01\x02\xff\xfe", "line 1 is not valid JSON"),
        (lines(rollouts(3)).encode(), "has 3 prompt groups, that is 1 batches of train_batch_size: 2 and 1 extra"),
        (
            lines(rollouts()).replace('"reward": 1.0', '"reward": NaN', 1).encode(),
            "uid 'p0' sample 0 step 1: reward is nan",
        ),
        (lines(rollouts()).replace('"loss_mask": [1]', '"loss_mask": [1, 1]', 1).encode(), "loss_mask has 2 values"),
        (lines(rollouts()[1:]).encode(), "uid 'p0' sample 0: step 1 is there and step 0 is missing"),
        (lines(rollouts() + rollouts()[:1]).encode(), "uid 'p0' sample 0: step 0 occurs twice"),
    ],
)
def test_a_wrong_file_is_one_clear_message_and_leaves_nothing_behind(
    config: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(content)
    for command in (["plan"], ["batch", "--out", tmp_path / "out"]):
        done = run(command[0], file, "--config", config, *command[1:], expect=1)
        assert message in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "foreign.jsonl.gz", "cut.parquet", "foreign.parquet"])
def test_a_truncated_or_foreign_file_is_refused_by_name(config: Path, tmp_path: Path, name: str) -> None:
    whole = tmp_path / f"whole.{name.partition('.')[2]}"
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rollouts()), whole)
    else:
        whole.write_bytes(gzip.compress(lines(rollouts()).encode()))
    data = whole.read_bytes()
    file = tmp_path / name
    file.write_bytes(b"not at all" * 20 if name.startswith("foreign") else data[: len(data) // 2])
    assert f"refused: {file}: " in run("plan", file, "--config", config, expect=1).stderr


def test_a_refused_second_batch_leaves_no_first_one(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(CONFIG | {"on_misaligned": "error", "vpp_size": 2, "microbatch_group_size": 2}))
    file = tmp_path / "rollouts.jsonl"
    rows = rollouts()
    # Batch 0 does not merge and aligns, batch 1 merges into too few rows.
    for row in rows[:8]:
        row["prompt_token_ids"] = [9, row["step"]]
    file.write_text(lines(rows))
    done = run("batch", file, "--config", config, "--out", tmp_path / "out", expect=1)
    assert "policy mini-batch 0" in done.stderr
    assert not (tmp_path / "out").exists()


def test_existing_output_is_not_overwritten(config: Path, file: Path, tmp_path: Path) -> None:
    run("batch", file, "--config", config, "--out", tmp_path / "out")
    done = run("batch", file, "--config", config, "--out", tmp_path / "out", expect=1)
    assert "batch-00000 already exists; remove it or set another --out" in done.stderr


def test_the_summary_says_in_how_many_trajectories_merging_broke_and_why(config: Path, file: Path) -> None:
    rows = rollouts()
    file.write_text(lines(rows))
    assert "merging broke" not in run("plan", file, "--config", config).stderr
    for row in rows:
        if row["step"] == 1 and row["sample"] == 0:
            row["prompt_token_ids"] = [9, *row["prompt_token_ids"][1:]]
        elif row["step"] == 1 and row["uid"] == "p0":
            row["prompt_token_ids"] = row["prompt_token_ids"][:2]
    file.write_text(lines(rows))
    done = run("plan", file, "--config", config)
    changed, cut = ("where the earlier prompt was changed", "where the prompt ends before the earlier response does")
    assert f"merging broke in 5 trajectories: 4 {changed}, 1 {cut}" in " ".join(done.stderr.split())
    assert "uid 'p0' sample 0 step 1: after [], [1, 0, 5, 6] of step 0 came back as [9, 0, 5, 6, 7]" in done.stderr
    causes = [one["cause"] for line in done.stdout.splitlines() for one in json.loads(line)["merge_mismatches"]]
    assert sorted(causes) == ["prompt"] * 4 + ["truncated"]


def test_warnings_and_counts_go_to_standard_error(config: Path, file: Path) -> None:
    config.write_text(json.dumps(CONFIG | {"loss_reduction": "sequence_mean", "max_seq_len": 3}))
    done = run("plan", file, "--config", config)
    assert "scale of the loss depends on how many steps merge" in done.stderr
    assert "batch 1: 4 rows exceed max_seq_len" in done.stderr


def test_a_tree_is_planned_with_its_paths_and_laid_out(config: Path, file: Path, tmp_path: Path) -> None:
    rows = rollouts(2)
    for row in rows:
        if row["step"] == 1:
            row |= {"is_last_step": False}
            # Behind step 1, whose only response token came back as another.
            fork = {"prompt_token_ids": [*row["prompt_token_ids"], 9], "response_ids": [4], "loss_mask": [1]}
            rows.append({**row, **fork, "step": 2, "is_last_step": True})
    file.write_text(lines(rows))
    config.write_text(json.dumps(CONFIG | {"merge": "tree"}))
    plan = json.loads(run("plan", file, "--config", config).stdout)
    assert plan["steps"] == [[0, 1], [0, 2]] * 4
    config.write_text(json.dumps(CONFIG | {"merge": "tree", "retokenized_tail": 1}))
    done = run("batch", file, "--config", config, "--out", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "batch-00000" / "plan.json").read_text())
    assert written["steps"] == [[0, 1, 2]] * 4
    assert "4 sampled tokens were retokenized in the next prompt" in done.stderr
    assert "total" in run("show", tmp_path / "out").stdout


def test_the_summary_says_what_was_made(config: Path, file: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(CONFIG | {"merge": "none", "micro_batch": {"size": 4}}))
    output = run("batch", file, "--config", config, "--out", tmp_path / "out").stderr
    assert "8 shards, " in output
    assert "2 batches; 4 prompt groups; 16 rows sent; 4 optimizer steps on 2 ranks" in output


@pytest.fixture
def other(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration that differs by these settings."""

    def write(name: str, **settings: object) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIG | settings))
        return path

    return write


def test_configurations_are_compared(config: Path, other: Callable[..., Path], file: Path) -> None:
    """Each of two batches has two groups of equal scores; merged, a trajectory is one row instead of two."""
    every = [config, other("unmerged", merge="none"), other("gdpo", advantage_estimator="gdpo")]
    every += [other("wrong", merge="rebase"), other("large", train_batch_size=3, policy_mini_batch_size=1, dp_size=1)]
    options = [text for one in every for text in ("-c", one)]
    done = run("plan", file, *options, "--json", expect=1)
    own, unmerged, *refused, large = json.loads(done.stdout)["configurations"]
    plans = [json.loads(line) for line in run("plan", file, "-c", config).stdout.splitlines()]
    assert own["steps"] == sum(plan["optimizer_steps"] for plan in plans) == 4
    parts = [part for plan in plans for part in plan["mini_batches"]]
    assert own["micro_batches"] == sum(part["micro_batches_per_rank"] for part in parts) > 0
    assert (own["config"], own["rows"], own["zero_share"], own["advantage_largest"]) == (str(config), 8, 1.0, 0.0)
    assert (unmerged["rows"], unmerged["groups"], unmerged["reason"]) == (16, 4, "")
    # The last batch has one group, as when a run is finished.
    assert (large["groups"], large["steps"]) == (4, 4)
    reasons = ["reward_components is missing", "merge: input should be"]
    for one, path, reason in zip(refused, every[2:-1], reasons, strict=True):
        assert one["config"] == str(path)
        assert reason in one["reason"]
        assert f"refused: {path}: {one['reason']}" in done.stderr
    # Short names, so that nothing is cut.
    heads, *table = run("plan", file, *options, expect=1).stdout.splitlines()
    cells = {line[:14].strip(): line[14:].split() for line in table}
    assert len(heads.split()) == 5
    assert cells["rows"] == ["8", "16", "-", "-", "8"]
    assert cells["zero groups"] == ["100.0%", "100.0%", "-", "-", "100.0%"]


def test_one_configuration_is_summed_up_on_request(config: Path, other: Callable[..., Path], file: Path) -> None:
    (alone,) = json.loads(run("plan", file, "-c", config, "--json").stdout)["configurations"]
    packed, again = json.loads(run("plan", file, "-c", other("p", layout="packed"), "-c", config, "--json").stdout)[
        "configurations"
    ]
    assert again == alone
    assert packed["padding_share"] == 0.0


def test_lengths_have_no_advantages_to_compare(other: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    rows = [{"uid": f"p{n // 2}", "sample": n % 2, "prompt_len": 3, "response_len": 4 + n} for n in range(4)]
    file.write_text(lines(rows))
    plain: dict[str, object] = {"merge": "none", "step_wise": False}
    every = [other("a", **plain), other("b", **plain, layout="packed", zero_variance_filter="mask"), other("c")]
    done = run("plan", file, *(text for one in every for text in ("-c", one)), "--json", expect=1)
    compared = json.loads(done.stdout)["configurations"]
    assert [one.get("advantage_mean") for one in compared] == [None] * 3
    assert [one.get("padding_share") for one in compared][1:] == [0.0, None]
    assert "is a lengths file, without tokens for merge: prefix" in compared[2]["reason"]


@pytest.mark.slow
def test_a_plan_whose_reader_has_enough_ends_quietly(config: Path, file: Path) -> None:
    file.write_text(lines(rollouts(400)))
    command = f"{GRISTMILL} plan {file} --config {config} | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=240)
    assert "failed" not in done.stderr
    assert "Traceback" not in done.stderr


def test_show_refuses_what_is_no_shard(tmp_path: Path) -> None:
    assert "no shards" in run("show", tmp_path, expect=1).stderr
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert "broken.safetensors is not a complete shard" in run("show", tmp_path, expect=1).stderr


def test_a_missing_file_or_configuration_is_named(config: Path, tmp_path: Path) -> None:
    assert "absent.jsonl" in run("plan", tmp_path / "absent.jsonl", "--config", config, expect=1).stderr
    assert "absent.yaml: cannot read" in run("plan", config, "--config", tmp_path / "absent.yaml", expect=1).stderr


def test_help_teaches_with_an_example() -> None:
    for command in ("plan", "batch", "show"):
        assert "Example: gristmill" in run(command, "--help").stdout


@pytest.mark.slow
def test_ctrl_c_ends_a_batch_without_a_traceback_or_a_half_written_batch(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    os.mkfifo(file)
    command = [GRISTMILL, "batch", str(file), "--config", str(config), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with file.open("w") as pipe:  # opens when the command does, which then waits for the rest
        pipe.write(lines(rollouts()))
        pipe.flush()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "stopped\n")
    assert not list(tmp_path.glob("out/.*"))


def test_rollouts_may_come_through_a_pipe(config: Path, file: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", str(file), str(pipe)]):
        planned = run("plan", pipe, "--config", config)
    assert planned.stdout == run("plan", file, "--config", config).stdout


def test_groups_of_a_file_are_as_large_as_their_rows_say(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(CONFIG | {"max_samples_per_prompt": 3, "surplus": 1}))
    file = tmp_path / "rollouts.jsonl"
    one = {"step": 0, "is_last_step": True, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1]}
    sizes = {"a": (0, 1, 3), "b": (2,)}
    rows = [{**one, "uid": uid, "sample": sample, "reward": sample} for uid in sizes for sample in sizes[uid]]
    file.write_text(lines(rows))
    plan = json.loads(run("plan", file, "--config", config).stdout)
    assert [(part["rows"], part["prompts"]) for part in plan["mini_batches"]] == [(3, 1), (1, 1)]
    assert plan["counts"] == {"misaligned_groups": 0, "incomplete_groups": 0, "lone_survivors": 1}
    file.write_text(lines([*rows, {**one, "uid": "a", "sample": 2, "reward": 1}]))
    refused = run("plan", file, "--config", config, expect=1).stderr
    assert "uid 'a': the group has 4 samples, and the limit is 3 (max_samples_per_prompt: 3 with surplus: 1)" in refused
    file.write_text(lines([*rows, {**one, "uid": "b", "sample": 4, "reward": 1}]))
    refused = run("plan", file, "--config", config, expect=1).stderr
    assert "uid 'b' sample 4 step 0: sample 4 is not in 0..3 (max_samples_per_prompt: 3 with surplus: 1)" in refused


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_samples_of_a_file_that_were_aborted_are_left_out(config: Path, tmp_path: Path, kind: str) -> None:
    one = {"step": 0, "is_last_step": True, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1]}
    lost = {"uid": "a", "sample": 1, "aborted": "failed"}
    rows = [{"uid": "a", "sample": 0, "reward": 1.0, **one}, lost, {"uid": "b", "sample": 0, "reward": 0.0, **one}]
    file = tmp_path / f"rollouts.{kind}"
    if kind == "jsonl":
        file.write_text(lines(rows))
    else:
        columns = {name: pa.array([row.get(name) for row in rows]) for name in {**rows[0], **lost}}
        pq.write_table(pa.table(columns), file)
    plan = json.loads(run("plan", file, "--config", config).stdout)
    assert (plan["rows"], plan["counts"]["incomplete_groups"]) == (2, 2)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_a_file_may_name_their_task(config: Path, tmp_path: Path, kind: str) -> None:
    rows = [row | {"tag": "math" if row["uid"] in ("p0", "p3") else ""} for row in rollouts()]
    rows = [row | {"policy_versions": [row["step"]] * len(row["response_ids"])} for row in rows]
    config.write_text(json.dumps(CONFIG | {"stale": "mask", "max_staleness": 0}))
    file = tmp_path / f"rollouts.{kind}"
    if kind == "jsonl":
        file.write_text(lines(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    plans = [json.loads(line) for line in run("plan", file, "--config", config).stdout.splitlines()]
    assert [plan["tags"] for plan in plans] == [["math", ""], ["", "math"]]
    assert plans[0]["tag_metrics"]["math"]["trajectories"] == 2
    assert [plan["counts"]["stale_tokens"] for plan in plans] == [8, 8]


def test_a_file_with_a_tag_a_prompt_is_refused(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text(lines(row | {"tag": row["uid"]} for row in rollouts(66)))
    refused = run("plan", file, "--config", config, expect=1).stderr
    assert "has 66 tags, and the limit is 64" in refused


@pytest.mark.parametrize("inner", [pa.list_(pa.int16(), 2), pa.list_(pa.int16()), pa.large_list(pa.int16())], ids=str)
def test_columns_of_a_shape_may_be_lists_of_a_fixed_size_or_large_ones(
    config: Path, tmp_path: Path, inner: pa.DataType
) -> None:
    config.write_text(
        json.dumps(CONFIG | {"columns": [{"name": "experts", "dtype": "int16", "scope": "response", "shape": [2]}]})
    )
    rows = rollouts()
    experts = [[[token, token + 1] for token in row["response_ids"]] for row in rows]
    table = pa.Table.from_pylist(rows).append_column("experts", pa.array(experts, pa.list_(inner)))
    pq.write_table(table, tmp_path / "rollouts.parquet")
    lines_file = tmp_path / "rollouts.jsonl"
    lines_file.write_text(lines(row | {"experts": values} for row, values in zip(rows, experts, strict=True)))
    for file in (lines_file, lines_file.with_suffix(".parquet")):
        run("batch", file, "--config", config, "--out", tmp_path / file.suffix)
    for shard in sorted((tmp_path / ".jsonl").rglob("*.safetensors")):
        assert shard.read_bytes() == (tmp_path / ".parquet" / shard.relative_to(tmp_path / ".jsonl")).read_bytes()


def test_a_plan_has_a_table_of_its_rows(config: Path, file: Path, tmp_path: Path) -> None:
    done = run("plan", file, "--config", config, "--table", tmp_path / "rows.parquet", expect=0)
    assert done.stdout == run("plan", file, "--config", config).stdout
    table = pq.read_table(tmp_path / "rows.parquet").to_pydict()
    assert table["batch"] == [0] * 4 + [1] * 4
    assert table["uid"] == [f"p{prompt}" for prompt in range(4) for _ in range(2)]
    assert (table["step_first"], table["step_last"], table["tokens"]) == ([0] * 8, [1] * 8, [6] * 8)
    refused = run("plan", file, "-c", config, "--json", "--table", tmp_path / "rows.parquet", expect=1)
    assert "--table is for the plans of one configuration" in refused.stderr
    assert "is not a .parquet file" in run("plan", file, "-c", config, "--table", "rows.csv", expect=1).stderr


def test_a_table_of_lengths_has_no_rewards(config: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "lengths.jsonl", tmp_path / "rows.parquet"
    rows = [{"uid": f"p{n // 2}", "sample": n % 2, "prompt_len": 3, "response_len": 4 + n} for n in range(4)]
    file.write_text(lines(rows))
    config.write_text(json.dumps(CONFIG | {"merge": "none", "step_wise": False}))
    run("plan", file, "--config", config, "--table", out, expect=0)
    table = pq.read_table(out)
    assert table["tokens"].to_pylist() == [7, 8, 9, 10]
    assert all(map(math.isnan, (*table["score"].to_pylist(), *table["advantage"].to_pylist())))


def test_a_table_needs_pyarrow(config: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = run("plan", file, "--config", config, "--table", tmp_path / "rows.parquet", expect=1)
    assert (done.stdout, "--table needs pyarrow, not installed; pip install pyarrow" in done.stderr) == ("", True)
