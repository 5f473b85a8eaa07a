"""Measures what a rollout worker pays to hand rows over: from arrays to the service's answer, over bare gRPC."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from gristmill import RolloutClient, TrainerClient
from gristmill._client.connection.transport import Transport
from gristmill._client.rollout import requests
from gristmill._wire.codecs.submit_codec import encode
from gristmill._wire.rows import columns_of
from gristmill.converters import from_skyrl
from gristmill.v1 import run_pb2
from tests.redis.proxy import Proxy
from tests.tools.bench.bare import Bare, bare
from tests.tools.bench.figures import Figure, seconds
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.processes import served
from tests.tools.bench.submissions import config

ROUNDS = 21
LONG_ROWS, LONG = 512, (2_000, 16_000)
SHORT_ROWS, SHORT = 4_096, (64, 1_024)
TRANSFER_QUEUE_SHORT_ROWS_S = 5_270.0
"""Its put of the same rows on two cores like these, as the issue gives it; `make bench-peers` measures it here."""
TURNS, TURN_PROMPT, TURN_RESPONSE = 2_000, 600, 200
SAMPLES = 8

Output = dict[str, Any]


def figures() -> Iterator[Figure]:
    with ExitStack() as opened:
        limit = opened.enter_context(bare())
        journal = opened.enter_context(tempfile.TemporaryDirectory(dir=TMPFS))
        addresses = [opened.enter_context(served(flags)).grpc_address for flags in ([], ["--journal-dir", journal])]
        yield from _long(limit, addresses)
        yield _short(addresses[0])
        yield from _turns(limit, addresses[0])
        yield _turns_while_sealing(addresses[0])
    yield _delta()


def _long(limit: Bare, addresses: list[str]) -> Iterator[Figure]:
    output = generator_output(LONG_ROWS, LONG)
    messages = _messages(output)
    size = sum(map(len, messages)) / 1e6
    work = [_submitting(address, output) for address in addresses]
    rounds = [(seconds(lambda: limit.send(messages)), *(once() for once in work)) for _ in range(ROUNDS)][1:]
    bound, *ours = (statistics.median(side) for side in zip(*rounds, strict=True))
    for name, reach, at in (("submit.long_ratio", 0.5, 1), ("submit.long_journal_ratio", 0.2, 2)):
        ratio = statistics.median(each[0] / each[at] for each in rounds)
        yield Figure(name, ratio, "x bare gRPC", reach, size / bound, "MB/s", at_most=False)
    yield Figure("submit.long_mb_s", size / ours[0], "MB/s", None, size / bound, "MB/s")


def _short(address: str) -> Figure:
    once = _submitting(address, generator_output(SHORT_ROWS, SHORT))
    elapsed = statistics.median([once() for _ in range(ROUNDS)][1:])
    reach = 10 * TRANSFER_QUEUE_SHORT_ROWS_S
    return Figure("submit.short_rows_s", SHORT_ROWS / elapsed, "rows/s", reach, at_most=False)


def _submitting(address: str, output: Output) -> Callable[[], float]:
    """Seconds of one submission of all rows to a run of its own, by one client that is connected."""
    numbers = iter(range(1_000))

    def once() -> float:
        with RolloutClient(address, f"submit-{len(output['uids'])}-{next(numbers)}") as client:
            client.create_run(_config())
            taken = seconds(lambda: client.submit(from_skyrl(output)))
            assert client.status().rows_accepted == len(output["uids"])
        _delete(address, client.run)
        return taken

    return once


def _turns(limit: Bare, address: str) -> Iterator[Figure]:
    """One turn at a time, each waited for, followed by a bare call of the same bytes."""
    rows = turn_rows(TURNS)
    [message] = _messages(generator_output(1, (TURN_PROMPT + TURN_RESPONSE, TURN_PROMPT + TURN_RESPONSE + 1)))
    ours, bound = [], []
    with RolloutClient(address, "turns") as client:
        client.create_run(_config())
        for row in rows:
            ours.append(seconds(lambda row=row: client.submit([row])))  # type: ignore[misc]
            bound.append(seconds(lambda: limit.send([message])))
        rate = TURNS / seconds(lambda: _step_on(client))
    _delete(address, "turns")
    for name, quantile, reach in (("turn.p50_ratio", 0.5, 2.0), ("turn.p99_ratio", 0.99, 3.0)):
        mine, theirs = float(np.quantile(ours[50:], quantile)), float(np.quantile(bound[50:], quantile))
        yield Figure(name, mine / theirs, "x bare call", reach, theirs * 1e3, "ms")
    yield Figure("turn.rate", rate, "turns/s", 2_000.0, 1 / statistics.median(bound), "calls/s", at_most=False)


def _turns_while_sealing(address: str) -> Figure:
    """p99 of single turns while batches of long rows are sealed one after another, by another process."""
    with RolloutClient(address, "turns") as client, _sealing(address) as sealed:
        client.create_run(_config())
        times = [seconds(lambda row=row: client.submit([row])) for row in turn_rows(TURNS)]  # type: ignore[misc]
        assert sealed() > 2, "batches were sealed meanwhile"
    _delete(address, "turns")
    return Figure("turn.p99_sealing_ms", float(np.quantile(times, 0.99)) * 1e3, "ms", 10.0)


def _step_on(client: RolloutClient) -> None:
    """One producer hands its turns over, and waits for them at the end."""
    for row in turn_rows(TURNS, "rate"):
        with client.trajectory(row["uid"], row["sample"]) as trajectory:
            trajectory.step(
                row["prompt_token_ids"],
                row["response_ids"],
                rollout_logprobs=row["rollout_logprobs"],
                reward=row["reward"],
                is_last_step=True,
            )
    client.flush()


@contextmanager
def _sealing(address: str) -> Iterator[Callable[[], int]]:
    """Gives the number of batches that were sealed so far."""
    process = subprocess.Popen([sys.executable, "-m", "tests.tools.bench.submit", address], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "it is sealing"
        with RolloutClient(address, "sealed") as client:
            yield lambda: int(client.status().batches_sealed)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        _delete(address, "sealed")


def _seal_on_and_on(address: str) -> None:
    """Runs in the process of `_sealing`: the same rows as batch after batch, each of which is trained at once."""
    output = generator_output(256, LONG)
    settings = _config(train_batch_size=256 // SAMPLES, policy_mini_batch_size=256 // SAMPLES, max_buffered_batches=2)
    with RolloutClient(address, "sealed") as client, TrainerClient(address, "sealed", 0) as trainer:
        client.create_run(settings)
        for number in range(1_000_000):
            client.submit(from_skyrl(output | {"uids": [f"{number}-{uid}" for uid in output["uids"]]}))
            for shard in next(iter(trainer)).mini_batches():
                shard.ack()
            print(number, flush=True)


def _delta() -> Figure:
    """Bytes of a 12-turn trajectory on the wire, turn by turn, over those of its tokens and logprobs, each sent once.
    What connecting costs is not counted."""
    turns, once = _conversation(12)
    with ExitStack() as opened:
        service = opened.enter_context(served())
        proxy = opened.enter_context(Proxy(int(service.grpc_address.rpartition(":")[2])))
        client = opened.enter_context(RolloutClient(f"127.0.0.1:{proxy.port}", "delta"))
        client.create_run(_config())
        before = proxy.carried["requests"]
        for turn in turns:
            client.submit([turn])
        sent = proxy.carried["requests"] - before
    return Figure("wire.delta_ratio", sent / once, "x its tokens", 1.1, once / 1e3, "kB")


def _conversation(turns: int) -> tuple[list[Output], int]:
    """Rows of a trajectory whose prefixes hold, and the bytes of all that is new in each."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 150_000, 1_000, dtype=np.int32)
    rows, new = [], prompt.nbytes
    for step in range(turns):
        row = _row("uid", 0, prompt, 400, rng) | {"step": step, "is_last_step": step == turns - 1}
        observation = rng.integers(0, 150_000, 200, dtype=np.int32)
        prompt = np.concatenate([prompt, row["response_ids"], observation])
        rows.append(row)
        new += row["response_ids"].nbytes + row["rollout_logprobs"].nbytes + observation.nbytes
    return rows, new - observation.nbytes


def generator_output(rows: int, lengths: tuple[int, int]) -> Output:
    """Single-turn trajectories, a quarter of each a response, as arrays."""
    rng = np.random.default_rng(11)
    totals = rng.integers(*lengths, rows)
    made = [_row("", 0, rng.integers(0, 150_000, t - t // 4, dtype=np.int32), t // 4, rng) for t in totals.tolist()]
    return {
        "uids": [f"prompt-{row // SAMPLES}" for row in range(rows)],
        "samples": [row % SAMPLES for row in range(rows)],
        "rewards": [1.0] * rows,
        **{name: [row[name] for row in made] for name in ("prompt_token_ids", "response_ids", "rollout_logprobs")},
    }


def turn_rows(count: int, name: str = "turn") -> list[Output]:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 150_000, TURN_PROMPT, dtype=np.int32)
    return [_row(f"{name}-{row // SAMPLES}", row % SAMPLES, prompt, TURN_RESPONSE, rng) for row in range(count)]


def _row(uid: str, sample: int, prompt: np.ndarray, response: int, rng: np.random.Generator) -> Output:
    return {
        "uid": uid,
        "sample": sample,
        "prompt_token_ids": prompt,
        "response_ids": rng.integers(0, 150_000, response, dtype=np.int32),
        "loss_mask": np.ones(response, np.uint8),
        "rollout_logprobs": -rng.random(response, dtype=np.float32),
        "reward": 1.0,
    }


def _messages(output: Output) -> list[bytes]:
    """The same rows as requests of about the size that the client sends."""
    columns = columns_of(from_skyrl(output), step_wise=True)
    return [encode("run", [table]) for table in requests.tables(columns, requests.limits(1024, 4 << 20))]


def _config(**more: object) -> dict[str, Any]:
    settings: dict[str, Any] = config(**more).model_dump(mode="json", exclude_defaults=True)
    return settings


def _delete(address: str, run: str) -> None:
    transport = Transport(address, 60.0, "bench")
    transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))
    transport.close()


if __name__ == "__main__":
    _seal_on_and_on(sys.argv[1])
