"""Declared columns from agents to ranks: through every store, by every API, each value once on its own token."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from gristmill import AlreadyExistsError, InvalidArgumentError, RolloutClient, RowOutcome, TrainerClient
from gristmill._wire.codecs.row_codec import Prefixes, Sent, encode
from gristmill._wire.codecs.submit_codec import Submission
from gristmill._wire.rows import from_rows
from gristmill.converters import from_skyrl
from gristmill.torch import MicroBatch, Shard
from gristmill.v1 import rows_pb2
from gristmill_service.run import run as run_module
from gristmill_service.run.machine.described_rows import RowKeys
from tests.cli.terminal import gristmill
from tests.client.faces import Connect
from tests.on_loop import Service
from tests.redis.servers import RedisServer
from tests.rows import make_config, make_row
from tests.serving import StartService

COLUMNS: list[dict[str, Any]] = [
    {"name": "routed_experts", "dtype": "int16", "scope": "token", "shape": [2, 3], "fill": -1},
    {"name": "teacher_logprobs", "dtype": "bfloat16", "scope": "response", "required": False},
    {"name": "pixel_values", "dtype": "uint8", "scope": "items", "shape": [4], "required": False, "merge": "concat"},
    {"name": "difficulty", "dtype": "float64", "scope": "row"},
    {"name": "routes", "dtype": "int16", "scope": "token", "shape": [2, 3], "fill": -1, "required": False}
    | {"partial": True},
    {"name": "support", "dtype": "int32", "scope": "response", "shape": [None], "required": False},
]
CONFIG: dict[str, Any] = make_config(train_batch_size=2, policy_mini_batch_size=2, merge="prefix", columns=COLUMNS)


@pytest.fixture(params=["memory", "shared memory", "journal", "redis"])
def address(
    request: pytest.FixtureRequest, start_service: StartService, service: Service, tmp_path: Path
) -> Iterator[str]:
    if request.param == "memory":
        yield service.grpc_address
    elif request.param == "shared memory":
        yield start_service("--shared-memory-dir", str(tmp_path)).grpc_address
    elif request.param == "journal":
        yield start_service(
            "--shared-memory-dir", str(tmp_path), "--journal-dir", str(tmp_path / "journal")
        ).grpc_address
    else:
        with RedisServer(tmp_path / "redis", appendonly="no") as redis:
            yield start_service("--store", "redis", "--redis-url", redis.url).grpc_address


def experts(begin: int, end: int) -> torch.Tensor:
    """Of the tokens of a trajectory from `begin` to `end`: each has its place in it."""
    return torch.arange(begin, end, dtype=torch.int16).reshape(-1, 1, 1).expand(-1, 2, 3)


def roll_out(client: Any, uid: str, turns: int = 3) -> None:
    """Turns of 20 prompt tokens, 5 response tokens and 2 of observation; the first brings an image, the last two.

    Routes are as an engine gives them: none for the last token, and of sample b only those of new tokens."""
    prompt, routed = list(range(20)), 0
    with client.trajectory(uid, 0) as trajectory:
        for turn in range(turns):
            columns: dict[str, Any] = {"routed_experts": experts(0, len(prompt) + 5), "difficulty": turn / 2}
            columns["routes"] = experts(routed, len(prompt) + 4)
            columns["support"] = [[turn] * count for count in range(5)]
            if uid == "b":
                columns |= {"support": torch.full((10,), turn), "support_offsets": [0, 0, 1, 3, 6, 10]}
            if uid == "b":
                columns["routes_start"], routed = routed, len(prompt) + 4
            if turn == 1:
                columns["teacher_logprobs"] = torch.tensor([-1, -2, -3, -4, -5], dtype=torch.bfloat16)
            if turn != 1:
                columns["pixel_values"] = np.full((1 + turn // 2, 4), turn, np.uint8)
            trajectory.step(prompt, [7] * 5, reward=1.0, is_last_step=turn == turns - 1, columns=columns)
            prompt = [*prompt, *[7] * 5, 8, 9]


def first_shard(address: str, run: str, **options: Any) -> Shard:
    with TrainerClient(address, run, 0, prefetch=0, **options) as trainer:
        [shard] = next(iter(trainer)).mini_batches()
        return shard


def check(micro: MicroBatch, turns: int = 3) -> None:
    length = 20 + 7 * turns - 2
    assert micro["routed_experts"].dtype is torch.int16
    assert torch.equal(micro["routed_experts"][0], experts(0, length))
    teacher = micro["teacher_logprobs"]
    assert teacher.dtype is torch.bfloat16
    assert teacher[0].tolist() == [0] * 7 + [-1, -2, -3, -4, -5] + [0] * 7
    assert micro["teacher_logprobs_given"].tolist() == micro["pixel_values_given"].tolist() == [1]
    assert micro["pixel_values"].tolist() == [[0] * 4, [2] * 4, [2] * 4]
    assert micro["pixel_values_offsets"].tolist() == [0, 3]
    assert micro["difficulty"].tolist() == [1.0]
    assert torch.equal(micro["routes"][0, :-1], experts(0, length - 1))
    assert (micro["routes"][0, -1] == -1).all()
    assert micro.given("routes").tolist() == [[True] * (length - 1) + [False]]
    assert micro["support"].tolist() == [turn for turn in range(turns) for _ in range(10)]
    counts = micro["support_offsets"].diff().view_as(micro["response_mask"])
    assert counts.tolist() == [[*([0, 1, 2, 3, 4, 0, 0] * turns)][:-2]]
    with pytest.raises(
        InvalidArgumentError, match="support has a variable number of values per token or row, assigned by support_off"
    ):
        micro.jagged("support")


def test_values_arrive_on_their_own_tokens_from_turns_that_repeat_nothing(
    address: str, run_name: str, connect: Connect
) -> None:
    client = connect(address, run_name)
    client.create_run(CONFIG)
    with client:
        for uid in "ab":
            roll_out(client, uid)
    shard = first_shard(address, run_name)
    micros = list(shard.micro_batches())
    assert len(micros) == 2
    for micro in micros:
        check(micro)


def test_a_turn_sends_the_values_of_its_new_tokens_only(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Sent] = []
    read = Submission.rows

    def rows(self: Submission) -> Sent:
        sent.append(request := read(self))
        return request

    monkeypatch.setattr(Submission, "rows", rows)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        roll_out(client, "a")
    counts = [count for one in sent for count in one.steps.extras["routed_experts"].values.lengths.tolist()]
    assert counts == [25, 7, 7]
    assert [count for one in sent for count in one.steps.extras["routes"].values.lengths.tolist()] == [24, 7, 7]


PARTIAL = {"name": "routes", "dtype": "int16", "scope": "token", "fill": -1, "partial": True}


def test_a_step_that_another_worker_sends_again_whole_is_the_same_step(service: Service, run_name: str) -> None:
    """With `trajectory.step`, a step leaves out the routes that the step before has, but for its last token's."""
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    with RolloutClient(service.grpc_address, run_name) as one, RolloutClient(service.grpc_address, run_name) as other:
        one.create_run(make_config(train_batch_size=2, merge="prefix", columns=[PARTIAL]))
        with one.trajectory("a", 0) as trajectory:
            for step, prompt in enumerate(prompts):
                routes = {"routes": list(range(len(prompt) + 1))}
                trajectory.step(prompt, [4, 5], reward=0.0, is_last_step=step == 1, columns=routes, policy_version=0)

        def again(step: int, change_at: int | None = None, begin: int = 0) -> RowOutcome:
            """Sends it with other routes at one place, and without those before `begin`."""
            routes = [index + 100 * (index == change_at) for index in range(len(prompts[step]) + 1)]
            columns = {"routes": routes[begin:]} | ({"routes_start": begin} if begin else {})
            sent = make_row("a", 0, step, last=step == 1, prompt=prompts[step], response=[4, 5], reward=0.0, **columns)
            return other.submit([sent | {"policy_version": 0}])[0]

        assert [again(step) for step in range(2)] == [RowOutcome.DUPLICATE] * 2
        assert [again(1, begin=begin) for begin in (3, 6)] == [RowOutcome.DUPLICATE] * 2
        assert again(1, change_at=2) is RowOutcome.DUPLICATE, "the first step's count"
        for step, change_at, begin in ((0, 0, 0), (1, 6, 0), (1, None, 7)):
            with pytest.raises(AlreadyExistsError, match="different content was accepted"):
                again(step, change_at, begin)


def test_a_service_without_the_step_before_gets_all_values(
    service: Service, run_name: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def nothing(state: object, rows: object, sums: object, keys: RowKeys, prefixes: Prefixes | None) -> dict[int, Any]:
        if prefixes is not None:
            refused.append(keys.names[0].step)
        return {}

    monkeypatch.setattr(run_module, "steps_before", nothing)
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        for uid in "ab":
            roll_out(client, uid)
            client.flush()
    assert refused, "rows came without what the service has"
    shard = first_shard(service.grpc_address, run_name)
    for micro in shard.micro_batches():
        check(micro)


def test_a_turn_of_another_partition_brings_its_own_values_of_all_tokens(
    service: Service, run_name: str, connect: Connect
) -> None:
    prompt, values = list(range(20)), experts(0, 33)
    column = {"routed_experts": values[:25]}
    with connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"columns": COLUMNS[:1], "train_batch_size": 1, "policy_mini_batch_size": 1})
        with client.trajectory("a", 0) as trajectory:
            trajectory.step(prompt, [7] * 5, columns=column)
            own = {"routed_experts": values + 100}
            trajectory.step(
                [*prompt, *[7] * 5, 8, 9, 7], [7] * 5, reward=1.0, columns=own, partition="sft", is_last_step=True
            )
    shard = first_shard(service.grpc_address, run_name)
    of_rows = [micro["routed_experts"][0] for micro in shard.micro_batches()]
    assert torch.equal(of_rows[0][-25:], values[:25])
    assert torch.equal(of_rows[1], values + 100)


@pytest.mark.parametrize("shape", [np.asarray, torch.tensor, np.ndarray.tolist])
def test_what_a_caller_does_with_its_arrays_afterwards_changes_nothing(
    service: Service, run_name: str, shape: Callable[[Any], Any]
) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"columns": COLUMNS[:1], "train_batch_size": 1, "policy_mini_batch_size": 1})
        prompt = list(range(20))
        with client.trajectory("a", 0) as trajectory:
            for turn in range(3):
                values = shape(experts(0, len(prompt) + 5).numpy().copy())
                trajectory.step(prompt, [7] * 5, reward=1.0, is_last_step=turn == 2, columns={"routed_experts": values})
                values[:] = values[:1] * len(values) if isinstance(values, list) else values * 0 + 99
                prompt = [*prompt, *[7] * 5, 8, 9]
    shard = first_shard(service.grpc_address, run_name)
    assert torch.equal(shard["routed_experts"][0], experts(0, 39))


@pytest.mark.parametrize("merge", ["none", "prefix"])
def test_a_batch_that_is_exported_is_laid_out_again_to_the_same_tensors(
    service: Service, run_name: str, tmp_path: Path, merge: str
) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"merge": merge})
        for uid in "ab":
            roll_out(client, uid)
    shard = first_shard(service.grpc_address, run_name)
    rollouts, config = tmp_path / "rollouts.jsonl", tmp_path / "run.yaml"
    export = ("export", run_name, 0, "--out", rollouts, "--config", config, "--address", service.grpc_address)
    assert (gristmill(*export).stderr, gristmill(*export).returncode) == ("", 0)
    made = gristmill("batch", rollouts, "--config", config, "--out", tmp_path / "out")
    assert made.returncode == 0, made.stderr
    again = safetensors.torch.load_file(tmp_path / "out/batch-00000/policy-000/rank-000.safetensors")
    assert again.keys() == shard.tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in shard.tensors.items())


def test_a_killed_service_has_the_columns_of_turns_that_left_out_what_it_had(
    start_service: StartService, run_name: str, tmp_path: Path
) -> None:
    flags = ("--shared-memory-dir", str(tmp_path), "--journal-dir", str(tmp_path / "journal"))
    before = start_service(*flags)
    with RolloutClient(before.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        roll_out(client, "a")
    before.process.send_signal(signal.SIGKILL)
    before.process.wait()
    after = start_service(*flags)
    with RolloutClient(after.grpc_address, run_name) as client:
        roll_out(client, "b")
    shard = first_shard(after.grpc_address, run_name)
    for micro in shard.micro_batches():
        check(micro)


@pytest.mark.parametrize("wanted", [[], ["routed_experts"], ["routes"], ["pixel_values", "difficulty"]])
def test_a_rank_gets_the_columns_that_it_names_and_no_others(address: str, run_name: str, wanted: list[str]) -> None:
    with RolloutClient(address, run_name) as client:
        client.create_run(CONFIG)
        for uid in "ab":
            roll_out(client, uid)
    whole = first_shard(address, run_name)
    shard = first_shard(address, run_name, columns=wanted)
    others = {column["name"] for column in COLUMNS} - set(wanted)
    assert {name for name in whole.tensors if not name.startswith(tuple(others))} == shard.tensors.keys()
    for one, other in zip(whole.micro_batches(), shard.micro_batches(), strict=True):
        assert all(torch.equal(one[name], tensor) for name, tensor in other.tensors.items())


def test_a_column_that_nobody_declared_cannot_be_wanted(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
    trainer = TrainerClient(service.grpc_address, run_name, 0, columns=["values"])
    with pytest.raises(InvalidArgumentError, match="columns contains 'values', but the run declares routed_experts, "):
        next(iter(trainer))
    with pytest.raises(InvalidArgumentError, match=r"columns is 'difficulty'; pass a list of names"):
        TrainerClient(service.grpc_address, run_name, 0, columns="difficulty")


def test_a_dtype_of_a_tensor_that_no_column_makes_is_refused(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
    with TrainerClient(service.grpc_address, run_name, 0, dtypes={"difficulty": torch.float32}) as trainer:
        assert trainer.position.batch == 0
    trainer = TrainerClient(service.grpc_address, run_name, 0, dtypes={"dificulty": torch.float32})
    with (
        trainer,
        pytest.raises(InvalidArgumentError, match=r"dtypes contains 'dificulty'; expected one of .*, difficulty"),
    ):
        next(iter(trainer))


def http_row(uid: str) -> dict[str, Any]:
    values = {"routed_experts": experts(0, 3).tolist(), "difficulty": 0.5, "support": [[8, 9]]}
    return make_row(uid=uid, response=[3], **values)


def ask(url: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, body, {"content-type": kind})
    with urllib.request.urlopen(request) as answer:
        document: bytes = answer.read()
        return document


def test_http_takes_and_gives_columns_as_grpc_does(service: Service, run_name: str) -> None:
    runs = f"{service.http_url}/v1/runs"
    ask(runs, json.dumps({"run": run_name, "config": CONFIG}).encode())
    ask(f"{runs}/{run_name}/rows", json.dumps({"rows": [http_row("a")]}).encode())
    specs = service.runs.get(run_name).config.columns
    rows = encode(from_rows([http_row("b")], columns=specs)).SerializeToString()
    ask(f"{runs}/{run_name}/rows", rows, "application/x-protobuf")
    ask(f"{runs}/{run_name}/batches/0?wait_s=20")
    shard = safetensors.torch.load(ask(f"{runs}/{run_name}/batches/0/policy/0/0"))
    assert torch.equal(shard["routed_experts"], experts(0, 3).expand(2, -1, -1, -1))
    assert shard["teacher_logprobs_given"].tolist() == [0, 0]
    assert (shard["support"].tolist(), shard["support_offsets"].tolist()) == ([8, 9, 8, 9], [0, 2, 4])
    chosen = safetensors.torch.load(ask(f"{runs}/{run_name}/batches/0/policy/0/0?columns=difficulty"))
    assert chosen.keys() == {name for name in shard if not name.startswith(("rout", "teacher", "pixel", "support"))}
    assert chosen["difficulty"].tolist() == [0.5, 0.5]
    for query in ("columns=difficulty,routed_experts", "columns=difficulty&columns=routed_experts"):
        both = safetensors.torch.load(ask(f"{runs}/{run_name}/batches/0/policy/0/0?{query}"))
        assert both.keys() == chosen.keys() | {"routed_experts"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{runs}/{run_name}/batches/0/policy/0/0?columns=teacher_logprobs_given")
    known = ", ".join(sorted(column["name"] for column in COLUMNS))
    assert f"no column 'teacher_logprobs_given'; request one of its columns: {known}" in refused.value.read().decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": [[[1, 2, 3], [4, 5, 6]]]}, "routed_experts has 1 values; send 3"),
        ({"routed_experts": None}, "column 'routed_experts' is missing; every row needs it"),
        ({"difficulty": [1.0]}, r"difficulty has values of shape \[1\], but the column declares shape \[\] for each"),
        (
            {"routes": experts(0, 2).tolist(), "routes_start": 2},
            r"2 values from index 2 \(routes_start\), but .* 3 prompt",
        ),
        ({"color": 3}, "unknown field color; expected .* declare other fields as columns of the run"),
    ],
)
def test_rows_that_are_not_as_declared_are_refused_and_nothing_is_kept(
    service: Service, run_name: str, change: dict[str, Any], message: str
) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        with pytest.raises(InvalidArgumentError, match=f"uid 'a' sample 0.*{message}"):
            client.submit([http_row("a") | change])
    assert service.runs.get(run_name).status().rows_accepted == 0


def test_what_another_client_sends_wrongly_is_refused_by_the_service(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
    specs = service.runs.get(run_name).config.columns
    good = encode(from_rows([http_row("a")], columns=specs))

    def refused(change: Callable[[rows_pb2.Rows], object]) -> str:
        rows = rows_pb2.Rows.FromString(good.SerializeToString())
        change(rows)
        with pytest.raises(urllib.request.HTTPError) as error:
            ask(f"{service.http_url}/v1/runs/{run_name}/rows", rows.SerializeToString(), "application/x-protobuf")
        message: str = json.loads(error.value.read())["error"]["message"]
        return message

    def set_dtype(rows: rows_pb2.Rows) -> None:
        rows.columns[0].dtype = "float16"

    def cut(rows: rows_pb2.Rows) -> None:
        rows.column_values[0] = rows.column_values[0][:-1]

    def recount(rows: rows_pb2.Rows) -> None:
        rows.columns[0].counts[0] = 2
        rows.column_values[0] = rows.column_values[0][:24]

    def rename(rows: rows_pb2.Rows) -> None:
        rows.columns[0].name = "paths"

    def repeat(rows: rows_pb2.Rows) -> None:
        rows.columns.append(rows.columns[0])
        rows.column_values.append(rows.column_values[0])

    assert "has float16 values of shape [2, 3], but the column declares int16" in refused(set_dtype)
    assert "has 35 bytes, but its counts need 36" in refused(cut)
    assert "uid 'a' sample 0 step 0: routed_experts has 2 values; send 3" in refused(recount)
    assert "column 'paths' is not declared by the run" in refused(rename)
    assert "columns has 4 entries, but column_values has 3" in refused(lambda rows: rows.column_values.pop())
    assert "is sent twice" in refused(repeat)
    assert service.runs.get(run_name).status().rows_accepted == 0


def test_a_generator_output_has_columns_as_further_lists(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"columns": COLUMNS[:1]})
        output = {
            "uids": ["a", "b"],
            "samples": [0, 0],
            "prompt_token_ids": [[1], [2, 3]],
            "response_ids": [[4], [5]],
            "rewards": [1.0, 2.0],
            "routed_experts": [experts(0, 2), experts(0, 3).tolist()],
        }
        assert client.submit(from_skyrl(output, columns=["routed_experts"])) == [RowOutcome.ACCEPTED] * 2
        with pytest.raises(InvalidArgumentError, match="unknown key values; declare it as a column"):
            from_skyrl(output | {"values": [1, 2]}, columns=["routed_experts"])


@pytest.mark.parametrize(
    "values",
    [np.array(5), torch.tensor(5), dict.fromkeys(range(26)), set(range(26)), torch.arange(26).to_sparse()],
    ids=["number", "tensor", "dict", "set", "sparse"],
)
def test_values_that_are_no_list_are_refused_by_name_in_every_turn(
    service: Service, run_name: str, values: object
) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"columns": [{"name": "ids", "dtype": "int16", "scope": "token"}]})
        trajectory, prompt = client.trajectory("a", 0), list(range(20))
        for turn in range(2):
            with pytest.raises(InvalidArgumentError, match=f"uid 'a' sample 0( step {turn})?: ids "):
                trajectory.step(prompt, [7] * 3, columns={"ids": values})
            trajectory.step(prompt, [7] * 3, columns={"ids": np.arange(len(prompt) + 3)})
            prompt += [7] * 3


def test_steps_that_a_column_keeps_apart_have_their_own_values_of_all_tokens(service: Service, run_name: str) -> None:
    columns = [
        {"name": "ids", "dtype": "int16", "scope": "token"},
        {"name": "tool", "dtype": "int8", "scope": "row", "merge": "equal"},
    ]
    prompt = list(range(20))
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1, "columns": columns})
        with client.trajectory("a", 0) as trajectory:
            trajectory.step(prompt, [7], columns={"ids": np.arange(21), "tool": 0})
            values = 100 + np.arange(22)
            trajectory.step([*prompt, 7], [8], reward=1.0, is_last_step=True, columns={"ids": values, "tool": 1})
    shard = first_shard(service.grpc_address, run_name)
    assert [micro["ids"][0, -21:].tolist() for micro in shard.micro_batches()] == [
        list(range(21)),
        list(range(101, 122)),
    ]


def test_a_client_follows_a_run_that_is_created_anew_with_other_columns(
    service: Service, run_name: str, connect: Connect
) -> None:
    prompt = list(range(20))
    client = connect(service.grpc_address, run_name)
    with client, RolloutClient(service.grpc_address, run_name) as other:
        for number, column in enumerate(
            (
                {"name": "ids", "dtype": "int16", "scope": "token"},
                {"name": "places", "dtype": "int16", "scope": "token"},
                {"name": "places", "dtype": "float64", "scope": "token", "merge": "last"},
            )
        ):
            changes = {"train_batch_size": 1, "policy_mini_batch_size": 1, "columns": [column]}
            (client if number == 2 else other).create_run(CONFIG | changes)
            with client.trajectory("a", 0) as trajectory:
                for length in (20, 30):
                    values = np.arange(length + 1)
                    trajectory.step(
                        [*prompt, *[7] * (length - 20)],
                        [7],
                        is_last_step=length == 30,
                        reward=1.0,
                        columns={column["name"]: values},
                    )
            client.flush()
            shard = first_shard(service.grpc_address, run_name)
            assert shard[column["name"]][0].tolist() == list(range(31))
            service.runs.delete(run_name)
