"""Rows as they are submitted: whole, and with what the service has already left out."""

from __future__ import annotations

import zlib
from functools import cache
from random import Random
from typing import Any

import numpy as np

from gristmill._wire.codecs.row_codec import Prefixes, Sent
from gristmill._wire.codecs.submit_codec import Submission, compressed, encode
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps, check
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rollout_pb2
from gristmill_service.api.row_requests import RowsCheck, RowsRequest
from gristmill_service.run.machine.answers import Outcome, Taken
from gristmill_service.run.machine.described_rows import row_digests
from tests.rows import make_row
from tests.run.harness import Bench
from tests.tools.fuzz.mutate import changed_bytes, changed_message
from tests.tools.fuzz.targets import Target

_MOST_BYTES = 1 << 20


def _row(uid: str = "a", sample: int = 0, step: int = 0, **more: Any) -> dict[str, Any]:
    row = make_row(uid=uid, sample=sample, step=step, last=False, prompt=[1, 2, 3], response=[4, 5], loss_mask=[1, 0])
    return row | more


def _seeds() -> list[bytes]:
    tables = [
        [_row()],
        [_row(), _row("b", 1), _row("é", 2, 3)],
        [_row(reward=[0.5, 1.0], rollout_logprobs=[-0.1, -0.2], stop_reason="stop", policy_version=3)],
        [_row(reward=None, policy_versions=[2, 3], policy_version=2), _row(sample=1, attempt=2, round=4)],
        [_row(advantage=[0.1, 0.2]), _row(sample=1, advantage=[0.3, 0.4])],
    ]
    bodies = [encode("r", [from_rows(rows, step_wise=True)]) for rows in tables]
    return [*bodies, compressed(bodies[1])]


def _change(random: Random, data: bytes) -> bytes:
    if random.random() < 0.7:
        message = rollout_pb2.SubmitRowsRequest.FromString(data)
        for _ in range(random.randint(1, 3)):
            changed_message(random, message.rows)
        data = message.SerializeToString()
        if random.random() < 0.7:
            return compressed(data) if random.random() < 0.1 else data
    return changed_bytes(random, data)


def _read(data: bytes) -> None:
    sent = Submission(data, _MOST_BYTES).rows()
    if sent.prefixes is None:
        _check_whole(check(sent.steps))


def _check_whole(steps: Steps) -> None:
    """Of rows that were taken: every column has what its rows say, and they can be described."""
    assert len(steps) == len(steps.uids) == len(steps.samples)
    responses = steps.response_lengths
    assert (responses >= 0).all()
    for column in (steps.loss_mask, steps.logprobs, steps.token_rewards, steps.token_advantages, steps.token_versions):
        assert column is None or np.array_equal(column.lengths, responses) or not column.total
    lengths = steps.tokens.lengths if steps.prefix_lengths is None else steps.tokens.lengths + steps.prefix_lengths
    assert np.array_equal(lengths, steps.prompt_lengths + responses)
    assert len(row_digests(steps)) == len(steps)


@cache
def _bench() -> Bench:
    bench = Bench(train_batch_size=4, n_samples_per_prompt=4)
    for sample in range(4):
        bench.run.submit(from_rows([_row(sample=sample)], step_wise=True))
    return bench


def _delta_seeds() -> list[bytes]:
    bodies = []
    history = np.array([1, 2, 3, 4, 5], np.int32)
    for lengths in ([5], [5, 5], [3]):
        prompt = [*history.tolist(), 9]
        rows = [_row(sample=at, step=1, prompt_token_ids=prompt) for at in range(len(lengths))]
        checksums = [zlib.crc32(history[:length].tobytes()) for length in lengths]
        prefixes = Prefixes(np.array(lengths, np.int64), np.array(checksums, np.uint32))
        bodies.append(encode("r", [from_rows(rows, step_wise=True)], prefixes))
    return bodies


def _read_delta(data: bytes) -> None:
    """Takes what the run takes of the rows, and refuses each other one alone."""
    run, submission = _bench().run, Submission(data, _MOST_BYTES)
    check = RowsCheck(
        lambda: RowsRequest.of(submission.rows(), by_row=True), lambda sent: Sent(run.checked(sent), sent.prefixes)
    )
    try:
        rows = check.whole()
    except InvalidArgumentError as error:
        rows = check.good(error)
    taken = Taken([])
    if rows.sent is not None:
        _check_whole(rows.sent.steps)
        taken = run.submit(*rows.sent, by_row=True)
    outcomes, refused = rows.answer(taken)
    assert [row for row, outcome in enumerate(outcomes) if outcome is Outcome.REFUSED] == [*refused]


SUBMISSIONS = Target("submissions", _seeds, _change, _read)
DELTAS = Target("deltas", _delta_seeds, _change, _read_delta)
