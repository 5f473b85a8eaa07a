"""A real run over gRPC is scraped, and its metrics are those of its rows and shards."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load

from tests.api.apis import GrpcApi, Json
from tests.metrics.scraping import Scrape, scrape
from tests.run.harness import wait_until

if TYPE_CHECKING:
    from tests.on_loop import Service

BATCHES, PROMPTS, SAMPLES, RANKS = 3, 4, 2, 2
CONFIG: Json = {
    "train_batch_size": PROMPTS,
    "n_samples_per_prompt": SAMPLES,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
    "step_wise": True,
    "merge": "prefix",
    "dp_size": RANKS,
    "max_buffered_batches": BATCHES,
}


class Worker:
    """Makes trajectories whose steps extend each other or not, and notes what it made."""

    def __init__(self) -> None:
        self._random = random.Random(5)
        self.rows: list[Json] = []
        self.causes: Counter[str] = Counter()

    def group(self, uid: str) -> list[Json]:
        rows = [row for sample in range(SAMPLES) for row in self._trajectory(uid, sample)]
        self.rows += rows
        return rows

    def _trajectory(self, uid: str, sample: int) -> list[Json]:
        rows: list[Json] = []
        prompt, count = self._tokens(4), self._random.randint(1, 9)
        for step in range(count):
            response = self._tokens(3)
            rows.append(
                {
                    "uid": uid,
                    "sample": sample,
                    "step": step,
                    "is_last_step": step == count - 1,
                    "prompt_token_ids": prompt,
                    "response_ids": response,
                    "loss_mask": [self._random.randint(0, 1) for _ in response],
                    "reward": self._random.random(),
                    "policy_version": self._random.randint(0, 3),
                }
            )
            prompt = self._next(prompt, response, rows, is_over=step == count - 1)
        return rows

    def _next(self, prompt: list[int], response: list[int], rows: list[Json], is_over: bool) -> list[int]:
        whole = [*prompt, *response]
        cause = self._random.choice(["", "", "prompt", "response", "truncated"])
        at = {"prompt": len(prompt) - 1, "response": len(whole) - 1}.get(cause)
        if at is not None:
            whole[at] += 1000
        if cause and not is_over:
            breaks = sum(row.get("breaks", False) for row in rows)
            rows[-1]["breaks"] = True
            self.causes[cause if breaks < 3 else "further"] += 1
        return whole[:-1] if cause == "truncated" else [*whole, *self._tokens(2)]

    def _tokens(self, most: int) -> list[int]:
        return [self._random.randrange(1, 1000) for _ in range(self._random.randint(1, most))]


TrainedRun = tuple[Scrape, Worker, list[dict[str, NDArray[Any]]], float]


@pytest.fixture(scope="module")
def trained_run(service: Service) -> TrainedRun:
    """A scrape of a run that was trained to its end, its rows, its shards, and how long it took."""
    api, worker, shards = GrpcApi(service.grpc_address), Worker(), []
    api.create("real", CONFIG)
    api.announce("real", 4)
    begun = time.monotonic()
    for rank in range(RANKS):
        api.shard("real", rank)
    for batch in range(BATCHES):
        groups = [worker.group(f"{batch}-{prompt}") for prompt in range(PROMPTS)]
        for rows in groups:
            sent = [{name: value for name, value in row.items() if name != "breaks"} for row in rows]
            # Submitted twice, within one request and by two.
            api.submit("real", [*sent, sent[0]])
            api.submit("real", sent[:1])
        assert api.batch("real", batch, wait_s=20)["state"] == "published"
        for rank in range(RANKS):
            for mini_batch in range(PROMPTS // 2):
                place = {"batch": batch, "epoch": 0, "mini_batch": mini_batch}
                assert api.shard("real", rank)["state"] == "published"
                shards.append(load(api.read("real", batch, mini_batch, rank)))
                api.acknowledge("real", rank, place, commit=True)
    api.begin("real", ["straggler"])
    # A worker of the service's removes what is freed, soon after.
    wait_until(lambda: scrape(service.http_url).of("gristmill_store_seconds_count").get("free") == BATCHES)
    real_run = scrape(service.http_url), worker, shards, time.monotonic() - begun
    api.close()
    return real_run


def test_rows_and_tokens_received(trained_run: TrainedRun) -> None:
    metrics, worker, _, _ = trained_run
    tokens = [len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in worker.rows]
    assert metrics.one("gristmill_rows_total", run="real", outcome="accepted") == len(worker.rows)
    assert metrics.one("gristmill_tokens_total", run="real", outcome="accepted") == sum(tokens)
    firsts = [row for row in worker.rows if row["sample"] == row["step"] == 0]
    again = sum(len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in firsts)
    rows = metrics.of("gristmill_rows_total", run="real")
    # Also those of a batch's last group, of which the second time comes after the seal: they were taken.
    assert (rows["duplicate"], rows["sealed"]) == (2 * len(firsts), 0)
    repeated = metrics.of("gristmill_tokens_total", run="real")
    assert repeated["duplicate"] + repeated["sealed"] == 2 * again


def test_rows_and_tokens_merged_trained_and_padded(trained_run: TrainedRun) -> None:
    metrics, worker, shards, _ = trained_run
    real = [shard["is_padding"] == 0 for shard in shards]
    tokens = sum(len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in worker.rows)
    trained_rows = sum(int(rows.sum()) for rows in real)
    trained = sum(int(shard["attention_mask"][rows].sum()) for shard, rows in zip(shards, real, strict=True))
    elements = sum(shard["sequences"].size for shard in shards)
    assert metrics.of("gristmill_batch_rows_total", run="real") == {
        "submitted": len(worker.rows),
        "merged": len(worker.rows) - trained_rows,
        "trained": trained_rows,
        "padding": sum(int((shard["is_padding"] == 1).sum()) for shard in shards),
    }
    assert metrics.of("gristmill_batch_tokens_total", run="real") == {
        "submitted": tokens,
        "merged": tokens - trained,
        "trained": trained,
        # With prefix trees, every token counts.
        "distinct": trained,
        "padding": elements - trained,
        "loss": sum(int(shard["loss_mask"].sum()) for shard in shards),
        "realigned": 0,
    }
    assert trained_rows < len(worker.rows)
    assert sum(metrics.of("gristmill_rows_dropped_total", run="real").values()) == 0


def test_what_padding_takes_at_each_level(trained_run: TrainedRun) -> None:
    metrics, _, shards, _ = trained_run
    last = shards[-RANKS * PROMPTS // 2 :]
    # Read rank by rank, and each mini-batch is of both.
    lengths = [[shard["attention_mask"].sum(1) for shard in last[mini::2]] for mini in range(2)]
    every = [shard for mini_batch in lengths for shard in mini_batch]
    kept = sum(int(shard["attention_mask"][shard["is_padding"] == 0].sum()) for shard in last)

    def share(blocks: Iterable[NDArray[Any]]) -> Any:
        return pytest.approx(1 - kept / sum(len(block) * int(block.max()) for block in blocks))

    assert metrics.of("gristmill_padding_share", run="real") == {
        "laid_out": share(every),
        "packed": pytest.approx(1 - kept / sum(int(shard.sum()) for shard in every)),
        "micro_batch": share([shard[at : at + 2] for shard in every for at in range(0, len(shard), 2)]),
        "shard": share(every),
        "mini_batch": share([np.concatenate(mini_batch) for mini_batch in lengths]),
        "batch": share([np.concatenate(every)]),
    }


def test_mismatches_by_cause(trained_run: TrainedRun) -> None:
    metrics, worker, _, _ = trained_run
    counts = metrics.of("gristmill_prefix_mismatches_total", run="real")
    assert counts.pop("column") == 0, "the run declares none"
    assert counts == {cause: worker.causes[cause] for cause in ("prompt", "response", "truncated", "further")}
    assert min(counts.values()) > 0


def test_staleness_of_each_trajectory_by_its_oldest_step(trained_run: TrainedRun) -> None:
    metrics, worker, _, _ = trained_run
    oldest: dict[tuple[str, int], int] = {}
    for row in worker.rows:
        key = row["uid"], row["sample"]
        oldest[key] = min(oldest.get(key, 9), row["policy_version"])
    behind = [4 - version for version in oldest.values()]
    assert metrics.one("gristmill_staleness_versions_count", run="real") == len(behind)
    assert metrics.one("gristmill_staleness_versions_sum", run="real") == sum(behind)
    assert metrics.one("gristmill_staleness_versions_bucket", run="real", le="2.0") == sum(one <= 2 for one in behind)


def test_groups_batches_and_bytes(trained_run: TrainedRun) -> None:
    metrics, _, _, seconds = trained_run
    assert metrics.of("gristmill_batches_total", run="real") == {
        "sealed": BATCHES, "published": BATCHES, "failed": 0, "freed": BATCHES
    }  # fmt: skip
    assert metrics.of("gristmill_held_bytes", run="real") == {"rows": 0, "shards": 0}
    assert metrics.one("gristmill_batches_buffered", run="real") == 0
    assert metrics.one("gristmill_groups", run="real", state="open") == 1
    assert 0 < metrics.one("gristmill_oldest_open_group_seconds", run="real") < seconds


def test_stages_and_latencies(trained_run: TrainedRun) -> None:
    metrics, _, _, seconds = trained_run
    stages = metrics.of("gristmill_stage_seconds_sum", run="real")
    assert set(metrics.of("gristmill_stage_seconds_count", run="real").values()) == {BATCHES}
    published = metrics.one("gristmill_publish_seconds_sum", run="real")
    assert 0 < sum(stages.values()) <= published < seconds
    assert metrics.one("gristmill_publish_seconds_count", run="real") == BATCHES
    assert 0 < metrics.one("gristmill_seal_seconds_sum", run="real") < seconds


def test_ranks(trained_run: TrainedRun) -> None:
    metrics, _, shards, seconds = trained_run
    each = len(shards) // RANKS
    for rank in map(str, range(RANKS)):
        of = {"run": "real", "model": "policy", "rank": rank}
        assert metrics.one("gristmill_rank_pulls_total", **of) == each
        assert metrics.one("gristmill_rank_acknowledged_total", **of) == each
        assert metrics.one("gristmill_rank_lag_shards", **of) == 0
        assert 0 < metrics.one("gristmill_rank_wait_seconds_total", **of) < seconds
        assert metrics.one("gristmill_rank_pulled_bytes_total", **of) > 0


def test_the_service_itself(trained_run: TrainedRun) -> None:
    import gristmill

    metrics, _, _, _ = trained_run
    stores = metrics.of("gristmill_store_seconds_count")
    assert (stores["publish"], stores["free"]) == (BATCHES, BATCHES)
    assert stores["append"] == 0, "in memory there is no log"
    assert sum(metrics.of("gristmill_store_errors_total").values()) == 0
    assert metrics.of("gristmill_leases") == {"own": 1, "lost": 0, "elsewhere": 0, "nobody": 0, "dormant": 0}
    assert metrics.one("gristmill_store_unhealthy") == 0
    assert metrics.one("gristmill_build_info", version=gristmill.__version__) == 1
    assert metrics.one("gristmill_call_seconds_count", api="grpc", call="SubmitRows", status="OK") == 24


def test_no_label_names_a_prompt(trained_run: TrainedRun) -> None:
    metrics, worker, _, _ = trained_run
    assert not any(f'"{row["uid"]}"' in metrics.text for row in worker.rows)
