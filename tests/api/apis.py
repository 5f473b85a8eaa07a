"""The service's two APIs, behind one interface, so that a test can be put to both.

Neither checks what it sends: that is what the service is tested for.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc
import httpx
import numpy as np

from gristmill._wire.batch_table import BatchTable
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc, rows_pb2, run_pb2, run_pb2_grpc, trainer_pb2, trainer_pb2_grpc

Json = dict[str, Any]

TIMEOUT_S = 30.0
STATES = ("", "pending", "published", "end", "forward")
OUTCOMES = ("", "accepted", "duplicate", "sealed", "dropped", "superseded", "refused")
ADMISSIONS = ("", "admitted", "no_room", "sealed", "dropped")

CONFIG: Json = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 4},
    "step_wise": True,
    "merge": "prefix",
    "dp_size": 2,
}


def hangs_up(wire: socket.socket) -> bool:
    """Whether the service closes the connection, politely or not, within 20 s."""
    wire.settimeout(20)
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True


class Refused(Exception):
    def __init__(self, code: str, kind: str, message: str, retry_after_s: float | None, status: int = 0) -> None:
        super().__init__(f"{code} {kind}: {message}")
        self.code, self.kind, self.message, self.retry_after_s, self.status = code, kind, message, retry_after_s, status


def row(uid: str, sample: int, step: int = 0, *, last: bool = True, **fields: Any) -> Json:
    """A row whose step extends the one before, so that merging joins them."""
    values = {
        "uid": uid,
        "sample": sample,
        "step": step,
        "is_last_step": last,
        "prompt_token_ids": list(range(1, 4 + 2 * step)),
        "response_ids": [4 + 2 * step, 5 + 2 * step],
        "loss_mask": [1, 1],
        "reward": float(sample),
    }
    return {name: value for name, value in {**values, **fields}.items() if value is not ...}


def group(uid: str, samples: int = 2, steps: int = 2) -> list[Json]:
    """All rows of a complete group."""
    return [row(uid, sample, step, last=step == steps - 1) for sample in range(samples) for step in range(steps)]


def rows_message(rows: Sequence[Mapping[str, Any]]) -> rows_pb2.Rows:
    """Rows as they are, right or wrong."""
    tokens = [[*one["prompt_token_ids"], *one["response_ids"]] for one in rows]
    per_token = [one["reward"] for one in rows if isinstance(one.get("reward"), list)]
    pending = [one.get("reward") is None for one in rows]
    return rows_pb2.Rows(
        uids=[one["uid"] for one in rows],
        rounds=[one.get("round", 0) for one in rows],
        samples=[one["sample"] for one in rows],
        steps=[one.get("step", 0) for one in rows],
        attempts=[one.get("attempt", 0) for one in rows],
        is_last_steps=[one.get("is_last_step", True) for one in rows],
        prompt_lengths=[len(one["prompt_token_ids"]) for one in rows],
        response_lengths=[len(one["response_ids"]) for one in rows],
        tokens=_buffer(tokens, np.int32),
        loss_mask=_buffer([one["loss_mask"] for one in rows], np.uint8),
        rollout_logprobs=_buffer([one.get("rollout_logprobs", []) for one in rows], np.float32),
        rewards=() if per_token else [one.get("reward") or 0.0 for one in rows],
        token_rewards=_buffer(per_token, np.float64),
        rewards_pending=pending if any(pending) else (),
        stop_reasons=[one.get("stop_reason", "") for one in rows],
        policy_versions=[one.get("policy_version", -1) for one in rows],
        tags=[one.get("tag", "") for one in rows],
        step_keys=[one.get("step_key", "") for one in rows],
        agents=[one.get("agent", "") for one in rows],
        episodes=[one.get("episode", "") for one in rows],
        partitions=[one.get("partition", "") for one in rows],
        reward_components=[rows_pb2.RewardComponents(values=one.get("reward_components", {})) for one in rows],
        token_policy_versions=_buffer([one.get("policy_versions", []) for one in rows], np.int32),
    )


def _buffer(rows: Sequence[Sequence[float]], dtype: Any) -> bytes:
    return np.array([value for values in rows for value in values], dtype).tobytes()


class Api(Protocol):
    def create(self, run: str, config: Any) -> Json: ...
    def get(self, run: str) -> Json: ...
    def names(self) -> list[str]: ...
    def delete(self, run: str) -> None: ...
    def finish(self, run: str) -> int: ...
    def begin(self, run: str, uids: Sequence[str], wait_s: float = 0.0, **more: Any) -> list[str]: ...
    def submit(self, run: str, rows: Sequence[Mapping[str, Any]]) -> list[str]: ...
    def submit_by_row(self, run: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[int, Refused]]: ...
    def set_rewards(self, run: str, rewards: Sequence[Json]) -> int: ...
    def abort_trajectories(self, run: str, keys: Sequence[Json], reason: str) -> int: ...
    def abort_groups(self, run: str, uids: Sequence[str], reason: str) -> int: ...

    def groups(self, run: str, uids: Sequence[str] = (), round_: int = 0) -> list[Json]: ...
    def archived(self, run: str) -> int: ...
    def seal(self, run: str, batch: int | None = None) -> Json: ...
    def batch(self, run: str, batch: int, wait_s: float = 0.0, ranks: Sequence[int] = ()) -> Json: ...
    def shard(self, run: str, rank: int, *, wait_s: float = 0.0, **fields: Any) -> Json: ...
    def read(self, run: str, batch: int, mini_batch: int, rank: int, model: str = "policy") -> bytes: ...
    def table(self, run: str, batch: int) -> dict[str, list[Any]]: ...
    def write(self, run: str, place: tuple[int, int, int], incarnation: int, tensors: bytes) -> int: ...
    def acknowledge(self, run: str, rank: int, position: Json, *, commit: bool = False, **fields: Any) -> Json: ...
    def commit(self, run: str, position: Json, incarnation: int = 0) -> Json: ...
    def resume(self, run: str, launch: str, position: Json | None = None) -> Json: ...
    def announce(self, run: str, version: int) -> None: ...
    def policy_version(self, run: str, at_least: int = -1, wait_s: float = 0.0) -> int: ...
    def close(self) -> None: ...


class GrpcApi:
    def __init__(self, address: str) -> None:
        limit = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options=limit)
        self.runs = run_pb2_grpc.RunServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.rollouts = rollout_pb2_grpc.RolloutServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.trainers = trainer_pb2_grpc.TrainerServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.channel.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise refused(error) from None

    def create(self, run: str, config: Any) -> Json:
        request = run_pb2.CreateRunRequest(run=run, config_json=json.dumps(config))
        answer = self._call(self.runs.CreateRun, request)
        return {"warnings": list(answer.warnings), "created": answer.created}

    def get(self, run: str) -> Json:
        status = self._call(self.runs.GetRun, run_pb2.GetRunRequest(run=run)).status
        names = [field.name for field in status.DESCRIPTOR.fields]
        left = ("config_json", "resolved_config_json", "ranks", "models", "health")
        values = {name: getattr(status, name) for name in names if name not in left}
        values["tags"] = {
            tag: {name: getattr(counts, name) for name in ("open", "complete", "sealed", "dropped")}
            for tag, counts in status.tags.items()
        }
        values["groups_dropped"], values["failed_batches"] = dict(status.groups_dropped), dict(status.failed_batches)
        models = [{"model": one.model, "next": []} | _progress(one) for one in status.models]
        for rank in status.ranks:
            models[rank.model - 1]["next"].append(_place(rank.next))
        for one in models:
            one["model"] = ("policy", "critic")[one["model"] - 1]
        values["config"] = json.loads(status.config_json)
        values["resolved_config"] = json.loads(status.resolved_config_json)
        return {**values, "models": models}

    def groups(self, run: str, uids: Sequence[str] = (), round_: int = 0) -> list[Json]:
        pages = self._call(self.runs.ListGroups, run_pb2.ListGroupsRequest(run=run, uids=uids, round=round_))
        return [
            {
                "uid": one.uid,
                "round": one.round,
                "state": run_pb2.GroupState.Name(one.state).removeprefix("GROUP_STATE_").lower(),
                "batch": one.batch if one.state == run_pb2.GROUP_STATE_SEALED else None,
                "reason": one.reason,
                "tag": one.tag,
            }
            for page in pages
            for one in page.groups
        ]

    def archived(self, run: str) -> int:
        pages = self._call(self.runs.ListGroups, run_pb2.ListGroupsRequest(run=run))
        return sum(page.archived for page in pages)

    def names(self) -> list[str]:
        return list(self._call(self.runs.ListRuns, run_pb2.ListRunsRequest()).runs)

    def delete(self, run: str) -> None:
        self._call(self.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    def finish(self, run: str) -> int:
        return int(self._call(self.runs.FinishRun, run_pb2.FinishRunRequest(run=run)).batches)

    def begin(self, run: str, uids: Sequence[str], wait_s: float = 0.0, **more: Any) -> list[str]:
        request = rollout_pb2.BeginGroupsRequest(run=run, uids=uids, wait_s=wait_s, **more)
        return [ADMISSIONS[one] for one in self._call(self.rollouts.BeginGroups, request).admissions]

    def submit(self, run: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        request = rollout_pb2.SubmitRowsRequest(run=run, rows=rows_message(rows))
        return [OUTCOMES[one] for one in self._call(self.rollouts.SubmitRows, request).outcomes]

    def submit_by_row(self, run: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[int, Refused]]:
        request = rollout_pb2.SubmitRowsRequest(run=run, rows=rows_message(rows), refuse_by_row=True)
        answer = self._call(self.rollouts.SubmitRows, request)
        errors = {
            one.row: Refused(one.code, one.type, one.message, one.retry_after_s or None) for one in answer.refused
        }
        return [OUTCOMES[one] for one in answer.outcomes], errors

    def set_rewards(self, run: str, rewards: Sequence[Json]) -> int:
        messages = [
            rollout_pb2.Reward(
                trajectory=_key(one),
                step=one.get("step"),
                **(
                    {"token_values": _buffer([one["reward"]], np.float64)}
                    if isinstance(one["reward"], list)
                    else {"value": one["reward"]}
                ),
            )
            for one in rewards
        ]
        request = rollout_pb2.SetRewardsRequest(run=run, rewards=messages)
        return int(self._call(self.rollouts.SetRewards, request).changed)

    def abort_trajectories(self, run: str, keys: Sequence[Json], reason: str) -> int:
        trajectories = [_key(key) for key in keys]
        request = rollout_pb2.AbortTrajectoriesRequest(run=run, trajectories=trajectories, reason=reason)
        return int(self._call(self.rollouts.AbortTrajectories, request).changed)

    def abort_groups(self, run: str, uids: Sequence[str], reason: str) -> int:
        request = rollout_pb2.AbortGroupsRequest(run=run, uids=uids, reason=reason)
        return int(self._call(self.rollouts.AbortGroups, request).changed)

    def seal(self, run: str, batch: int | None = None) -> Json:
        answer = self._call(self.rollouts.SealBatch, rollout_pb2.SealBatchRequest(run=run, batch=batch))
        return {"batch": answer.batch, "prompts": answer.prompts}

    def batch(self, run: str, batch: int, wait_s: float = 0.0, ranks: Sequence[int] = ()) -> Json:
        request = trainer_pb2.GetBatchRequest(run=run, batch=batch, wait_s=wait_s, ranks=ranks)
        answer = self._call(self.trainers.GetBatch, request)
        plan = {"plan": json.loads(answer.plan_json)} if answer.plan_json else {}
        awaits = {"awaits": [_awaited(one) for one in answer.awaits]} if answer.awaits else {}
        return {"state": STATES[answer.state], **plan, **awaits}

    def shard(self, run: str, rank: int, *, wait_s: float = 0.0, **fields: Any) -> Json:
        place = {name: fields.pop(name) for name in ("batch", "epoch", "mini_batch") if name in fields}
        request = trainer_pb2.GetShardRequest(
            run=run,
            rank=rank,
            wait_s=wait_s,
            position=run_pb2.Position(**place) if place else None,
            model=_model(fields.pop("model", "policy")),
            **fields,
        )
        answer = self._call(self.trainers.GetShard, request)
        return {
            "state": STATES[answer.state],
            "position": _place(answer.position) if answer.HasField("position") else None,
            "size_bytes": answer.size_bytes,
            "shared_memory_path": answer.shared_memory_path or None,
            "incarnation": answer.incarnation,
        }

    def read(self, run: str, batch: int, mini_batch: int, rank: int, model: str = "policy") -> bytes:
        request = trainer_pb2.ReadShardRequest(
            run=run, batch=batch, mini_batch=mini_batch, rank=rank, model=_model(model)
        )
        try:
            return b"".join(piece.data for piece in self.trainers.ReadShard(request, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            raise refused(error) from None

    def table(self, run: str, batch: int) -> dict[str, list[Any]]:
        request = trainer_pb2.ReadTableRequest(run=run, batch=batch)
        try:
            file = b"".join(piece.data for piece in self.trainers.ReadTable(request, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            raise refused(error) from None
        return {name: values.tolist() for name, values in BatchTable.decode(file).by_row().items()}

    def write(self, run: str, place: tuple[int, int, int], incarnation: int, tensors: bytes) -> int:
        batch, mini_batch, rank = place
        return self.write_messages(
            {
                "run": run,
                "batch": batch,
                "mini_batch": mini_batch,
                "rank": rank,
                "incarnation": incarnation,
                "tensors": tensors,
            }
        )

    def write_messages(self, *messages: Json) -> int:
        """Writes columns by these messages of one call."""
        requests = [trainer_pb2.WriteColumnsRequest(**message) for message in messages]
        return int(self._call(self.trainers.WriteColumns, iter(requests)).lacking)

    def acknowledge(self, run: str, rank: int, position: Json, *, commit: bool = False, **fields: Any) -> Json:
        request = trainer_pb2.AcknowledgeRequest(
            run=run, rank=rank, position=run_pb2.Position(**position), commit=commit, **fields
        )
        return _place(self._call(self.trainers.Acknowledge, request).next)

    def commit(self, run: str, position: Json, incarnation: int = 0) -> Json:
        request = trainer_pb2.CommitRequest(run=run, position=run_pb2.Position(**position), incarnation=incarnation)
        return _place(self._call(self.trainers.Commit, request).committed)

    def resume(self, run: str, launch: str, position: Json | None = None) -> Json:
        place = None if position is None else run_pb2.Position(**position)
        answer = self._call(self.trainers.Resume, trainer_pb2.ResumeRequest(run=run, launch=launch, position=place))
        return {"incarnation": answer.incarnation, "position": _place(answer.position)}

    def announce(self, run: str, version: int) -> None:
        self._call(self.runs.AnnouncePolicyVersion, run_pb2.AnnouncePolicyVersionRequest(run=run, version=version))

    def policy_version(self, run: str, at_least: int = -1, wait_s: float = 0.0) -> int:
        request = run_pb2.WaitPolicyVersionRequest(run=run, at_least=at_least, wait_s=wait_s)
        return int(self._call(self.runs.WaitPolicyVersion, request).version)


class HttpApi:
    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        self.client.close()

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        # Not httpx's own JSON: it refuses NaN, which the service must do.
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        answer = self.client.request(
            method, f"/v1{path}", content=content, params=query, headers={"Content-Type": "application/json"}
        )
        if answer.is_error:
            error = answer.json()["error"]
            retry = answer.headers.get("Retry-After")
            raise Refused(
                error["code"],
                error["type"],
                error["message"],
                None if retry is None else float(retry),
                answer.status_code,
            )
        return answer

    def create(self, run: str, config: Any) -> Json:
        created: Json = self.call("POST", "/runs", {"run": run, "config": config}).json()
        return created

    def get(self, run: str) -> Json:
        values = self.call("GET", f"/runs/{run}").json()
        return {**values, "failed_batches": {int(batch): why for batch, why in values["failed_batches"].items()}}

    def groups(self, run: str, uids: Sequence[str] = (), round_: int = 0) -> list[Json]:
        listed: list[Json] = self.call("GET", f"/runs/{run}/groups", uids=[*uids], round=round_).json()["groups"]
        return listed

    def archived(self, run: str) -> int:
        return int(self.call("GET", f"/runs/{run}/groups").json()["archived"])

    def names(self) -> list[str]:
        runs: list[str] = self.call("GET", "/runs").json()["runs"]
        return runs

    def delete(self, run: str) -> None:
        self.call("DELETE", f"/runs/{run}")

    def finish(self, run: str) -> int:
        batches: int = self.call("POST", f"/runs/{run}/finish").json()["batches"]
        return batches

    def begin(self, run: str, uids: Sequence[str], wait_s: float = 0.0, **more: Any) -> list[str]:
        body = {"uids": uids, "wait_s": wait_s, **more}
        admissions: list[str] = self.call("POST", f"/runs/{run}/groups", body).json()["admissions"]
        return admissions

    def submit(self, run: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        outcomes: list[str] = self.call("POST", f"/runs/{run}/rows", {"rows": rows}).json()["outcomes"]
        return outcomes

    def submit_by_row(self, run: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[int, Refused]]:
        answer = self.call("POST", f"/runs/{run}/rows", {"rows": rows, "refuse_by_row": True}).json()
        errors = {
            one["row"]: Refused(one["code"], one["type"], one["message"], one.get("retry_after_s"))
            for one in answer.get("refused", [])
        }
        return answer["outcomes"], errors

    def set_rewards(self, run: str, rewards: Sequence[Json]) -> int:
        changed: int = self.call("POST", f"/runs/{run}/rewards", {"rewards": rewards}).json()["changed"]
        return changed

    def abort_trajectories(self, run: str, keys: Sequence[Json], reason: str) -> int:
        body = {"trajectories": keys, "reason": reason}
        changed: int = self.call("POST", f"/runs/{run}/trajectories:abort", body).json()["changed"]
        return changed

    def abort_groups(self, run: str, uids: Sequence[str], reason: str) -> int:
        changed: int = self.call("POST", f"/runs/{run}/groups:abort", {"uids": uids, "reason": reason}).json()[
            "changed"
        ]
        return changed

    def seal(self, run: str, batch: int | None = None) -> Json:
        sealed: Json = self.call("POST", f"/runs/{run}/seal", {"batch": batch}).json()
        return sealed

    def batch(self, run: str, batch: int, wait_s: float = 0.0, ranks: Sequence[int] = ()) -> Json:
        answer: Json = self.call("GET", f"/runs/{run}/batches/{batch}", wait_s=wait_s, rank=ranks).json()
        return answer

    def shard(self, run: str, rank: int, *, wait_s: float = 0.0, **fields: Any) -> Json:
        answer: Json = self.call("GET", f"/runs/{run}/shards", rank=rank, wait_s=wait_s, **fields).json()
        del answer["path"]
        return answer

    def read(self, run: str, batch: int, mini_batch: int, rank: int, model: str = "policy") -> bytes:
        content: bytes = self.call("GET", f"/runs/{run}/batches/{batch}/{model}/{mini_batch}/{rank}").content
        return content

    def table(self, run: str, batch: int) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = self.call("GET", f"/runs/{run}/batches/{batch}/table").json()
        return columns

    def write(self, run: str, place: tuple[int, int, int], incarnation: int, tensors: bytes) -> int:
        path = f"/runs/{run}/batches/{place[0]}/policy/{place[1]}/{place[2]}"
        lacking: int = self.call("PUT", path, tensors, incarnation=incarnation).json()["lacking"]
        return lacking

    def acknowledge(self, run: str, rank: int, position: Json, *, commit: bool = False, **fields: Any) -> Json:
        body = {"rank": rank, "position": position, "commit": commit, **fields}
        following: Json = self.call("POST", f"/runs/{run}/ack", body).json()["next"]
        return following

    def commit(self, run: str, position: Json, incarnation: int = 0) -> Json:
        body = {"position": position, "incarnation": incarnation}
        committed: Json = self.call("POST", f"/runs/{run}/commit", body).json()["committed"]
        return committed

    def resume(self, run: str, launch: str, position: Json | None = None) -> Json:
        resumed: Json = self.call("POST", f"/runs/{run}/resume", {"launch": launch, "position": position}).json()
        return resumed

    def announce(self, run: str, version: int) -> None:
        self.call("PUT", f"/runs/{run}/policy-version", {"version": version})

    def policy_version(self, run: str, at_least: int = -1, wait_s: float = 0.0) -> int:
        version: int = self.call("GET", f"/runs/{run}/policy-version", at_least=at_least, wait_s=wait_s).json()[
            "version"
        ]
        return version


def refused(error: Any) -> Refused:
    """What a gRPC error says."""
    trailers = dict(error.trailing_metadata() or ())
    retry = trailers.get("grpc-retry-pushback-ms")
    return Refused(
        error.code().name,
        trailers.get("gristmill-error", ""),
        error.details(),
        None if retry is None else float(retry) / 1000,
    )


def _key(one: Json) -> rollout_pb2.TrajectoryKey:
    return rollout_pb2.TrajectoryKey(uid=one["uid"], round=one.get("round", 0), sample=one["sample"])


def _model(name: str) -> Any:
    return run_pb2.MODEL_CRITIC if name == "critic" else run_pb2.MODEL_POLICY


def _awaited(one: trainer_pb2.AwaitedColumn) -> Json:
    return {"mini_batch": one.mini_batch, "rank": one.rank, "column": one.column}


def _place(position: run_pb2.Position) -> Json:
    return {"batch": position.batch, "epoch": position.epoch, "mini_batch": position.mini_batch}


def _progress(progress: run_pb2.ModelProgress) -> Json:
    return {
        "committed": _place(progress.committed),
        "incarnation": progress.incarnation,
        "resumes": progress.resumes,
    }
