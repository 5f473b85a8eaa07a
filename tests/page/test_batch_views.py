"""The page's pictures of batches, held against the shards themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from gristmill._wire.codecs import tensor_file
from gristmill._wire.column_spec import specs_of
from gristmill._wire.columns import Ragged
from gristmill._wire.context_parallel import own_tokens
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Extra, Steps
from gristmill_service.config import Model, RunConfig, parse_config
from gristmill_service.monitoring.views.batch_view import BatchBreaks, BatchPicture, BatchScores, BatchView
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.credit.kl import credit_columns
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.plan_document import encode_plan
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.recent_tables import BatchNumbers
from tests.on_loop import Service
from tests.page import stage
from tests.reference_model.drawing import drawn
from tests.reference_model.rows import batches_of
from tests.tools.bench.workloads import uniform, workload

PARTS = ("prompt", "observation", "trained", "padding")


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.http_url, trust_env=False, timeout=240) as session:
        yield session


def agents() -> Steps:
    """48 trajectories of several turns, some of which do not merge and some of which go on from an earlier turn, with
    tokens that are not trained and rewards that are alike in some groups."""
    steps = workload("agent").steps
    rows = np.array([row for row, uid in enumerate(steps.uids) if int(uid[1:]) < 6])
    steps = stage.scored(steps.take(rows))
    mask = steps.loss_mask.compact()
    return replace(
        steps, loss_mask=Ragged(mask.values * (np.arange(len(mask.values)) % 5 > 0), mask.starts, mask.lengths)
    )


CONFIG: dict[str, Any] = {
    "train_batch_size": 6,
    "n_samples_per_prompt": 8,
    "policy_mini_batch_size": 2,
    "step_wise": True,
    "merge": "prefix",
    "micro_batch": {"size": 3},
    "dp_size": 3,
}

# Of large batches, which have FLOPs to compare; small ones of all settings are drawn below.
CONFIGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a tree": {"merge": "tree", "retokenized_tail": 3},
    "a width a micro-batch": {"pad_width": "micro_batch"},
    "a prefix tree": {"layout": "prefix_tree", "merge": "none", "flops": {"linear": 1.0, "quadratic": 0.001}},
    "packed, with padding": {
        "layout": "packed",
        "pad_rows_to_multiple_of": 64,
        "pad_packed_to": [32_000, 64_000],
        "micro_batch": {"max_tokens": 24_000},
    },
    "a prefix tree with padding": {"layout": "prefix_tree", "merge": "none", "pad_rows_to_multiple_of": 64},
    "costs in a column": {
        "flops": {"linear": 1.0, "column": "patches"},
        "columns": [{"name": "patches", "dtype": "float32", "scope": "row", "merge": "sum"}],
    },
    "a prefix tree of paths": {"layout": "prefix_tree", "merge": "tree", "retokenized_tail": 3},
    "groups dropped": {"micro_batch": {"max_tokens": 24_000}, "on_misaligned": "drop_trailing", "dp_size": 7},
    "a critic": {"critic_mini_batch_size": 3},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bars_are_the_rows_of_the_shards(case: str) -> None:
    steps = agents()
    if case == "costs in a column":
        ones = np.ones(len(steps), np.int64)
        patches = Extra(Ragged.from_lengths((100 * (np.arange(len(steps)) % 7)).astype(np.float32), ones), ones == 1)
        steps = replace(steps, extras={"patches": patches})
    config = parse_config({**CONFIG, **CONFIGS[case]})
    batch = build_batch(steps, config, run="r", batch=0)
    check(batch, config)
    for model in config.models:
        picture = view_of(batch, config).picture(model, None)
        assert picture.rows_per_bar == 1
        alone = view_of(batch, config).picture(model, picture.mini_batches_in_all - 1)
        assert alone.mini_batches == picture.mini_batches[-1:]
    assert barrier(picture_of(batch, config)) == pytest.approx(batch.plan.metrics["barrier_ratio"])


BATCHES = 60


@pytest.mark.parametrize("seed", range(BATCHES))
def test_what_is_shown_of_any_batch_is_what_the_shards_have_and_sums_to_the_plans_metrics(seed: int) -> None:
    rows, settings = drawn(f"page/{seed}")
    config = parse_config(settings)
    for some in batches_of(rows, settings):
        steps = from_rows(some, step_wise=config.step_wise, columns=config.columns)
        with suppress(MisalignedError):
            check(build_batch(steps, config, run="r", batch=0), config)


def view_of(batch: BuiltBatch, config: RunConfig) -> BatchView:
    return BatchView("r", 0, config, BatchNumbers(encode_plan(batch.plan), batch.table.encode()))


def picture_of(batch: BuiltBatch, config: RunConfig, model: Model = "policy") -> dict[str, Any]:
    return view_of(batch, config).picture(model, None).model_dump()


def check(batch: BuiltBatch, config: RunConfig) -> None:
    """Holds what is shown against the shards, the plan and the figures."""
    shards = {(one.address.model, one.address.mini_batch, one.address.rank): one for one in batch.shards}
    sums = {model: dict.fromkeys(PARTS, 0) for model in config.models}
    for model in config.models:
        for part in picture_of(batch, config, model)["mini_batches"]:
            for rank, shard in enumerate(part["shards"]):
                assert shown(shard) == in_file(join(shards[model, part["index"], rank].iovec()))
                for name in PARTS:
                    sums[model][name] += sum(shard[name])
        assert sums[model]["trained"] == sum(one.loss_tokens for one in batch.plan.mini_batches if one.model == model)
    metrics, padding = batch.plan.metrics, sums["policy"].pop("padding")
    assert padding == metrics["padding_tokens"]
    assert sum(sums["policy"].values()) == metrics.get("distinct_tokens", metrics["tokens"])

    view, figures = view_of(batch, config), batch.stats()
    groups, spread = view.scores(0).groups, view.distributions()
    every = [score for group in groups for score in group.scores]
    assert view.breaks().in_all == figures.breaks
    assert sum(every) == pytest.approx(figures.groups.score_sum)
    assert {sum(one.counts) for one in spread.histograms} == {len(every)}
    assert sum(spread.stop_reasons.values()) == len(every)
    assert {group.advantages is None for group in groups} <= {bool(batch.awaits & credit_columns(config))}


def shown(shard: dict[str, Any]) -> list[list[int]]:
    return [
        list(row) for row in zip(*(shard[name] for name in (*PARTS, "row", "sample", "first", "last")), strict=True)
    ]


def in_file(data: bytes) -> list[list[int]]:
    """For each row of a shard, its tokens of each kind, and which row it is."""
    tensors = tensor_file.decode(data)
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    rows = len(tensors["row"])
    micro_batches = json.loads(head["micro_batches"]) if "sequences" not in tensors else [list(range(rows))]
    counts = np.zeros((rows, 4), np.int64)
    for index, positions in enumerate(micro_batches):
        prefix = "" if "sequences" in tensors else f"micro_batch_{index:03d}/"
        counts[positions] = block({name: tensors[prefix + name] for name in NAMES if prefix + name in tensors})
    real = tensors["is_padding"] == 0
    # A padding row is all padding.
    counts[~real] = np.stack([0 * counts[~real].sum(1)] * 3 + [counts[~real].sum(1)], axis=1)
    labels = np.stack([tensors[name] for name in ("row", "sample", "step_first", "step_last")], axis=1)
    pairs: list[list[int]] = np.concatenate([counts, labels], axis=1).tolist()
    return pairs


NAMES = (
    "sequences",
    "attention_mask",
    "response_mask",
    "loss_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "row_ends",
    "parents",
)


def block(tensors: dict[str, Any]) -> Any:
    if "attention_mask" not in tensors:
        # Of a tree what each row brings.
        if "cu_seqlens" in tensors:
            edges = tensors.get("cu_seqlens_padded", tensors["cu_seqlens"])
            starts, lengths = edges[:-1], np.diff(tensors["cu_seqlens"])
        else:
            starts, lengths = own_tokens(tensors["parents"], tensors["row_ends"])
        widths = np.diff(np.append(starts, len(tensors["sequences"])))
        responses, trained = (
            np.add.reduceat(tensors[name].astype(int), starts) for name in ("response_mask", "loss_mask")
        )
    else:
        lengths = tensors["attention_mask"].sum(axis=1, dtype=int)
        widths = np.full(len(lengths), tensors["sequences"].shape[1])
        responses, trained = (tensors[name].sum(axis=1, dtype=int) for name in ("response_mask", "loss_mask"))
    return np.stack([lengths - responses, responses - trained, trained, widths - lengths], axis=1)


def barrier(picture: dict[str, Any]) -> float:
    loads = [np.array([shard["load"] for shard in part["shards"]]) for part in picture["mini_batches"]]
    return float(sum(load.max(axis=0).sum() for load in loads) / sum(load.sum() / len(load) for load in loads))


def test_breaks_are_those_of_the_plan_with_the_tokens_around_them(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    steps = agents()
    run = stage.published(service.runs, run_name, CONFIG, [steps])
    breaks = client.get(f"/v1/runs/{run_name}/batches/0/breaks").json()
    BatchBreaks.model_validate(breaks)
    planned = {
        (one["uid"], one["sample"], one["step"]): one["index"]
        for one in json.loads(run.batch(0).plan)["merge_mismatches"]
    }
    shown = {(one["uid"], one["sample"], one["step"]): one["index"] for one in breaks["breaks"]}
    # Both have the first three of a trajectory.
    assert shown == planned
    assert breaks["in_all"] == breaks["rows"] - len(set(zip(steps.uids, steps.samples.tolist(), strict=True)))
    for one in breaks["breaks"]:
        assert one["was"][0] != one["now"][0]
        assert one["was"][0] + 1 == one["now"][0]
        assert len(one["before"]) == 6
    assert sum(pair["count"] for pair in breaks["pairs"]) <= breaks["in_all"]


def test_a_prompt_that_ends_too_early_is_reported_as_such(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    rows = [
        stage.turn("a", 0, 0, [1, 2], [3, 4], is_last_step=False),
        stage.turn("a", 0, 1, [1, 2, 3], [9]),
    ]
    config = {**stage.CONFIG, "train_batch_size": 1, "n_samples_per_prompt": 1, "dp_size": 1}
    stage.published(service.runs, run_name, config, [from_rows(rows, step_wise=True)])
    [mismatch] = client.get(f"/v1/runs/{run_name}/batches/0/breaks").json()["breaks"]
    assert (mismatch["index"], mismatch["before"], mismatch["was"], mismatch["now"]) == (3, [1, 2, 3], [4], [])


def test_a_break_of_a_tree_is_shown_next_to_the_step_most_like_it(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    rows = [
        stage.turn("a", 0, 0, [1, 2], [3, 4], is_last_step=False),
        stage.turn("a", 0, 1, [7], [8], is_last_step=False),
        stage.turn("a", 0, 2, [1, 2, 3, 9], [5]),
    ]
    config = {**stage.CONFIG, "train_batch_size": 1, "n_samples_per_prompt": 1, "dp_size": 1, "merge": "tree"}
    stage.published(service.runs, run_name, config, [from_rows(rows, step_wise=True)])
    breaks = client.get(f"/v1/runs/{run_name}/batches/0/breaks").json()["breaks"]
    assert [(one["step"], one["against"], one["index"]) for one in breaks] == [(1, 0, 0), (2, 0, 3)]
    assert (breaks[1]["before"], breaks[1]["was"], breaks[1]["now"]) == ([1, 2, 3], [4], [9])


def test_a_column_that_keeps_steps_apart_is_named(service: Service, client: httpx.Client, run_name: str) -> None:
    rows = [
        stage.turn("a", 0, 0, [1], [3], is_last_step=False, x=1),
        stage.turn("a", 0, 1, [1, 3, 9], [5], x=2),
    ]
    columns = [{"name": "x", "dtype": "int8", "scope": "row", "merge": "equal"}]
    config = {**stage.CONFIG, "train_batch_size": 1, "n_samples_per_prompt": 1, "dp_size": 1, "columns": columns}
    table = from_rows(rows, step_wise=True, columns=specs_of(columns))
    stage.published(service.runs, run_name, config, [table])
    breaks = client.get(f"/v1/runs/{run_name}/batches/0/breaks").json()
    assert [(one["step"], one["column"]) for one in breaks["breaks"]] == [(1, "x")]
    assert (breaks["in_all"], breaks["rows"], breaks["pairs"]) == (1, 2, [])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"grpo_std_over": "batch"},
        {"advantage_estimator": "opo", "whiten": "batch"},
        {"whiten": "mini_batch"},
        {"advantage_estimator": "gdpo", "whiten": "trajectories", "component_weights": {"a": 2.0}},
    ],
    ids=str,
)
def test_scores_are_those_that_were_sent_and_advantages_those_of_the_shards(
    service: Service, client: httpx.Client, run_name: str, settings: dict[str, Any]
) -> None:
    table = agents()
    lasts = zip(table.is_last_steps.tolist(), table.samples.tolist(), strict=True)
    texts = [f'{{"a": {sample % 3}.0}}' if is_last else "" for is_last, sample in lasts]
    table = replace(table, reward_components=texts)
    run = stage.published(service.runs, run_name, CONFIG | settings, [table])
    scores = client.get(f"/v1/runs/{run_name}/batches/0/scores").json()
    assert client.get(f"/v1/runs/{run_name}/batches/0/scores", params={"start": 10**30}).status_code == 422
    BatchScores.model_validate(scores)
    assert [group["uid"] for group in scores["groups"]] == [f"p{number}" for number in range(6)]
    assert [len(group["scores"]) for group in scores["groups"]] == [8] * 6
    means = [score for group in scores["groups"] for score in group["scores"]]
    assert np.mean(means) == pytest.approx(json.loads(run.batch(0).plan)["metrics"]["score_mean"])
    advantages = {
        (group["uid"], sample): value
        for group in scores["groups"]
        for sample, value in zip(group["samples"], group["advantages"], strict=True)
    }
    data = b"".join(run.read_shard(0, ShardAddress("policy", 0, 0)))
    tensors, size = load(data), int.from_bytes(data[:8], "little")
    uids = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["uids"])
    for uid, sample, values, mask in zip(
        uids, tensors["sample"].tolist(), tensors["advantages"], tensors["response_mask"], strict=True
    ):
        assert set(values[mask == 1].tolist()) <= {np.float32(advantages[uid, sample])}
    later = client.get(f"/v1/runs/{run_name}/batches/0/scores", params={"start": 4}).json()
    assert later["groups"] == scores["groups"][4:]


def test_of_advantages_that_clients_gave_by_token_the_means_are_shown(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    rows = [stage.turn("a", sample, 0, [1], [2, 3], advantage=[0.5, 1.0]) for sample in range(2)]
    config = {**stage.CONFIG, "train_batch_size": 1, "advantage_estimator": "none"}
    stage.published(service.runs, run_name, config, [from_rows(rows, step_wise=True)])
    scores = client.get(f"/v1/runs/{run_name}/batches/0/scores").json()
    [group] = scores["groups"]
    assert (scores["are_means"], group["scores"], group["advantages"]) == (True, [0.0, 1.0], [0.75, 0.75])


def test_scores_that_hardly_differ_have_bars() -> None:
    rows = [stage.turn("a", sample, 0, [1], [2], reward=sample * 5e-324) for sample in range(40)]
    config = parse_config({**stage.CONFIG, "train_batch_size": 1, "n_samples_per_prompt": 40})
    batch = build_batch(from_rows(rows, step_wise=True), config, run="r", batch=0)
    [scores, *_] = view_of(batch, config).distributions().histograms
    assert sum(scores.counts) == 40
    assert all(low < high for low, high in zip(scores.lows, scores.highs, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_of_forty_thousand_rows_makes_small_pictures(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    work = uniform(40_000, 8)
    config = work.config("prefix", 8).model_dump(exclude_defaults=True) | {"policy_mini_batch_size": 50}
    config |= {"train_batch_size": 5_000}
    stage.published(service.runs, run_name, config, [work.steps])
    answer = client.get(f"/v1/runs/{run_name}/batches/0/picture")
    assert len(answer.content) < 400_000
    picture = answer.json()
    BatchPicture.model_validate(picture)
    shards = [shard for part in picture["mini_batches"] for shard in part["shards"]]
    assert (picture["rows_per_bar"], picture["mini_batches_in_all"], len(shards)) == (10, 100, 800)
    assert sum(sum(shard["trained"]) for shard in shards) == 160_000
    fine = client.get(f"/v1/runs/{run_name}/batches/0/picture", params={"mini_batch": 7}).json()
    assert (fine["rows_per_bar"], len(fine["mini_batches"])) == (1, 1)
    assert len(client.get(f"/v1/runs/{run_name}/batches/0/scores").content) < 100_000


def test_what_cannot_be_shown_is_refused_with_the_reason(service: Service, client: httpx.Client, run_name: str) -> None:
    stage.published(
        service.runs, run_name, stage.CONFIG, [from_rows(stage.group("a") + stage.group("b"), step_wise=True)]
    )
    paths = f"/v1/runs/{run_name}/batches"
    for path, status, words in [
        (f"{paths}/1/picture", 404, "batch 1 is not published yet"),
        (f"{paths}/-1/picture", 422, "numbered from 0"),
        (f"{paths}/0/picture?mini_batch=2", 422, "one of the batch's 2 policy mini-batches"),
        (f"{paths}/0/picture?mini_batch=-1", 422, "mini_batch -1 does not exist"),
        (f"{paths}/0/picture?model=critic", 422, "does not exist in this run"),
        ("/v1/runs/nowhere/health", 404, "does not exist"),
        ("/page/nothing.js", 404, "no file"),
    ]:
        answer = client.get(path)
        assert answer.status_code == status, path
        assert words in answer.json()["error"]["message"]


def test_a_batch_that_is_freed_is_still_shown_without_tokens(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    run = stage.published(
        service.runs, run_name, stage.CONFIG, [from_rows(stage.group("a") + stage.group("b"), step_wise=True)]
    )
    paths = [f"/v1/runs/{run_name}/batches/0/{what}" for what in ("picture", "breaks", "scores", "distributions")]
    before = [client.get(path).raise_for_status().json() for path in paths]
    for mini_batch in range(2):
        for rank in range(2):
            stage.acknowledge(run, rank, mini_batch, commit=True)
    assert run.status().batches_freed == 1
    assert [client.get(path).json() for path in paths] == before
    tokens = client.get(f"/v1/runs/{run_name}/batches/0/rows/1")
    assert tokens.status_code == 404
    assert tokens.json()["error"]["message"].startswith("the tokens of row 1 are gone: batch 0 is freed")
    # Not any more, once a run of that name is another one.
    service.runs.delete(run_name)
    service.runs.create(run_name, stage.CONFIG)
    assert {client.get(path).status_code for path in paths} == {404}


def test_of_a_trainer_that_comes_back_with_other_ranks_their_shards_are_shown(
    service: Service, client: httpx.Client, run_name: str
) -> None:
    run = stage.published(service.runs, run_name, stage.CONFIG, [from_rows(stage.group("a") + stage.group("b"))])

    def ranks() -> int:
        answer = client.get(f"/v1/runs/{run_name}/batches/0/picture").json()
        return len(answer["mini_batches"][0]["shards"]) if "mini_batches" in answer else 0

    assert ranks() == 2
    run.resume("policy", Checkpoint(None), "again", dp_size=1)
    stage.until(lambda: ranks() == 1)


def test_the_page_may_load_and_run_nothing_but_its_own_files(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    rules = answer.headers["content-security-policy"]
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert "https://" not in answer.text
    again = client.get("/", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_a_batch_names_the_columns_that_its_rows_have(service: Service, client: httpx.Client, run_name: str) -> None:
    columns = [
        {"name": "experts", "dtype": "int16", "scope": "token", "shape": [4, 2]},
        {"name": "level", "dtype": "bool", "scope": "row"},
    ]
    config = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
    service.runs.create(run_name, config | {"columns": columns})
    row = {"uid": "a", "sample": 0, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}
    extra = {"experts": [[[1, 2]] * 4] * 2, "level": True}
    client.post(f"/v1/runs/{run_name}/rows", json={"rows": [row | extra]}).raise_for_status()
    client.get(f"/v1/runs/{run_name}/batches/0", params={"wait_s": 20}).raise_for_status()
    picture = client.get(f"/v1/runs/{run_name}/batches/0/picture").raise_for_status().json()
    assert picture["columns"] == ["experts (int16[4, 2] per token)", "level (bool per step)"]
