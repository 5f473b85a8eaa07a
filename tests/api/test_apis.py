"""What a run does through either API; each test is put to both."""

from __future__ import annotations

import json
import struct
import time

import pytest

from gristmill_service.run import recent_tables
from tests.api.apis import CONFIG, Api, GrpcApi, HttpApi, Json, Refused, group, row

FIRST: Json = {"batch": 0, "epoch": 0, "mini_batch": 0}
SECOND: Json = {"batch": 0, "epoch": 0, "mini_batch": 1}
NEXT_BATCH: Json = {"batch": 1, "epoch": 0, "mini_batch": 0}
WAIT_S = 60.0


def fill_batch(api: Api, run: str, *uids: str) -> None:
    for uid in uids or ("a", "b"):
        api.submit(run, group(uid))


def metadata(shard: bytes) -> Json:
    """The safetensors file's own."""
    size = struct.unpack("<Q", shard[:8])[0]
    entries: Json = json.loads(shard[8 : 8 + size])["__metadata__"]
    return entries


def code_once_removed(api: Api, run: str) -> str:
    """How reading a shard of batch 0 is refused once it is removed, which a worker does soon after it is freed."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            api.read(run, 0, 0, 0)
        except Refused as refused:
            return refused.code
        time.sleep(0.01)
    return "never"


def test_creating_a_run_again_is_answered_alike(api: Api, run_name: str) -> None:
    assert api.create(run_name, CONFIG) == {"warnings": [], "created": True}
    assert api.create(run_name, CONFIG) == {"warnings": [], "created": False}
    assert run_name in api.names()


def test_creating_a_run_warns_of_what_is_probably_not_meant(api: Api, run_name: str) -> None:
    warnings = api.create(run_name, {**CONFIG, "loss_reduction": "sequence_mean"})["warnings"]
    assert len(warnings) == 1
    assert "counts rows" in warnings[0]


def test_rows_become_a_batch_that_ranks_train_on(api: Api, run: str) -> None:
    assert api.begin(run, ["a", "b"]) == ["admitted", "admitted"]
    fill_batch(api, run)
    batch = api.batch(run, 0, wait_s=WAIT_S)
    assert batch["state"] == "published"
    assert (batch["plan"]["rows_received"], batch["plan"]["rows"], batch["plan"]["prompts"]) == (8, 4, 2)
    for rank in range(2):
        shard = api.shard(run, rank)
        assert (shard["state"], shard["position"]) == ("published", FIRST)
        data = api.read(run, 0, 0, rank)
        assert len(data) == shard["size_bytes"]
        assert json.loads(metadata(data)["rank"]) == rank
        assert api.acknowledge(run, rank, FIRST) == SECOND
        assert api.shard(run, rank)["position"] == SECOND


def test_a_batch_has_a_table_of_its_rows_also_when_it_is_freed(api: Api, run: str) -> None:
    fill_batch(api, run)
    plan = api.batch(run, 0, wait_s=WAIT_S)["plan"]
    table = api.table(run, 0)
    assert (table["uid"], table["sample"]) == (["a", "a", "b", "b"], [0, 1, 0, 1])
    assert (table["step_last"], table["tokens"], table["loss_tokens"]) == ([1] * 4, [7] * 4, [4] * 4)
    assert (table["score"], table["reward"]) == ([0.0, 1.0, 0.0, 1.0], [0.0, 2.0, 0.0, 2.0])
    assert table["advantage"] == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-3)
    places = {
        row: (mini_batch["index"], rank["rank"])
        for mini_batch in plan["mini_batches"]
        for rank in mini_batch["ranks"]
        for row in rank["rows"]
    }
    assert dict(zip(table["row"], zip(table["mini_batch"], table["rank"], strict=True), strict=True)) == places
    train(api, run)
    assert api.table(run, 0) == table


def test_a_table_is_refused_of_a_batch_that_a_finished_run_never_had(api: Api, run: str) -> None:
    fill_batch(api, run)
    api.finish(run)
    with pytest.raises(Refused, match=r"NOT_FOUND .*batch 1 does not exist: the run is finished; request a"):
        api.table(run, 1)


def test_a_table_is_refused_before_its_batch_is_sealed_and_when_it_is_no_longer_kept(
    api: Api, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused, match=r"NOT_FOUND .*batch 0 is not published yet; retry later"):
        api.table(run, 0)
    with pytest.raises(Refused, match=r"INVALID_ARGUMENT .*batch -1 does not exist"):
        api.table(run, -1)
    with pytest.raises(Refused, match=r"NOT_FOUND .*run 'unknown' does not exist"):
        api.table("unknown", 0)
    monkeypatch.setattr(recent_tables, "MOST_BYTES", 0)
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    assert api.table(run, 0)["uid"] == ["a", "a", "b", "b"]
    train(api, run)
    with pytest.raises(Refused, match=r"NOT_FOUND .*batch 0 is freed, and its numbers are gone"):
        api.table(run, 0)


def train(api: Api, run: str) -> None:
    for position in (FIRST, SECOND):
        for rank in range(2):
            api.acknowledge(run, rank, position, commit=True)
    assert api.get(run)["batches_freed"] == 1


def test_acknowledging_with_commit_frees_the_batch(api: Api, run: str) -> None:
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    for position in (FIRST, SECOND):
        for rank in range(2):
            following = api.acknowledge(run, rank, position, commit=True)
    assert following == NEXT_BATCH
    status = api.get(run)
    assert (status["batches_published"], status["batches_freed"]) == (1, 1)
    assert code_once_removed(api, run) == "NOT_FOUND"


def test_committing_frees_only_what_every_rank_has_passed(api: Api, run: str) -> None:
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    for position in (FIRST, SECOND):
        api.acknowledge(run, 0, position)
        api.acknowledge(run, 1, position)
    assert api.commit(run, SECOND) == SECOND
    assert api.get(run)["batches_freed"] == 0
    assert api.commit(run, NEXT_BATCH) == NEXT_BATCH
    assert api.get(run)["batches_freed"] == 1


def test_resuming_rewinds_all_ranks_and_refuses_the_old_incarnation(api: Api, run: str) -> None:
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    old = api.resume(run, "first launch")["incarnation"]
    assert api.shard(run, 0)["incarnation"] == old
    api.acknowledge(run, 0, FIRST, incarnation=old)
    resumed = api.resume(run, "second launch", FIRST)
    assert resumed == api.resume(run, "second launch", FIRST)
    assert (resumed["position"], api.shard(run, 0)["position"]) == (FIRST, FIRST)
    assert api.get(run)["models"][0]["resumes"] == 2
    with pytest.raises(Refused) as refused:
        api.acknowledge(run, 0, FIRST, incarnation=old)
    assert (refused.value.code, refused.value.kind) == ("FAILED_PRECONDITION", "StaleIncarnationError")


def test_a_shard_is_found_by_its_address(api: Api, run: str) -> None:
    fill_batch(api, run)
    shard = api.shard(run, 1, batch=0, mini_batch=1, wait_s=WAIT_S)
    assert shard["position"] == SECOND
    assert json.loads(metadata(api.read(run, 0, 1, 1))["mini_batch"]) == 1


def test_a_row_of_a_sealed_group_is_ignored(api: Api, run: str) -> None:
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    late = [sent | {"stop_reason": "another"} for sent in group("a")]
    assert api.submit(run, late) == ["sealed"] * 4
    assert api.begin(run, ["a"]) == ["sealed"]


def test_a_retry_whose_answer_was_lost_is_a_duplicate_also_when_the_batch_was_sealed_meanwhile(
    api: Api, run: str
) -> None:
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    assert api.submit(run, group("a")) == ["duplicate"] * 4


def test_a_higher_attempt_supersedes(api: Api, run: str) -> None:
    api.submit(run, [row("a", 0, attempt=1)])
    assert api.submit(run, [row("a", 0, response_ids=[8, 8])]) == ["superseded"]


def test_rewards_may_come_later(api: Api, run: str) -> None:
    for uid in ("a", "b"):
        api.submit(run, [row(uid, sample, reward=None) for sample in range(2)])
    assert api.get(run)["groups_complete"] == 0
    rewards = [{"uid": uid, "sample": sample, "reward": 0.5} for uid in ("a", "b") for sample in range(2)]
    assert api.set_rewards(run, rewards) == 4
    assert api.batch(run, 0, wait_s=WAIT_S)["state"] == "published"


def test_a_group_says_why_it_is_not_complete(api: Api, run: str) -> None:
    api.submit(run, [row("a", 0, reward=None), row("b", 0) | {"is_last_step": False}])
    assert {one["uid"]: one["reason"] for one in api.groups(run)} == {
        "a": "samples without a reward: 1, not begun: 1",
        "b": "samples without their last step or an earlier one: 1, not begun: 1",
    }


def test_rewards_may_be_given_per_token(api: Api, run: str) -> None:
    api.submit(run, [row("a", 0, reward=[0.0, 1.0]), row("a", 1, reward=[0.5, 0.25])])
    api.submit(run, [row("b", 0, reward=[0.0, 1.0]), row("b", 1, reward=[0.5, 0.25])])
    assert api.batch(run, 0, wait_s=WAIT_S)["state"] == "published"


def test_an_aborted_trajectory_leaves_its_group_to_the_others(api: Api, run: str) -> None:
    api.submit(run, [row("a", 0)])
    assert api.abort_trajectories(run, [{"uid": "a", "sample": 1}], "crashed") == 1
    assert api.abort_trajectories(run, [{"uid": "a", "sample": 1}], "crashed") == 0
    assert api.get(run)["groups_complete"] == 1


def test_an_aborted_group_is_dropped_and_counted(api: Api, run: str) -> None:
    api.submit(run, [row("a", 0)])
    assert api.abort_groups(run, ["a"], "bad prompt") == 1
    assert api.submit(run, [row("a", 1)]) == ["dropped"]
    assert api.begin(run, ["a"]) == ["dropped"]
    assert sum(api.get(run)["groups_dropped"].values()) == 1


def test_a_run_says_what_became_of_the_groups_of_each_tag(api: Api, run: str) -> None:
    api.submit(run, [{**one, "tag": "math"} for one in group("a")])
    api.submit(run, [row("b", 0) | {"tag": "code"}])
    none = {"open": 0, "complete": 0, "sealed": 0, "dropped": 0}
    assert api.get(run)["tags"] == {"math": none | {"complete": 1}, "code": none | {"open": 1}}
    assert {one["uid"]: one["tag"] for one in api.groups(run)} == {"a": "math", "b": "code"}


def test_the_groups_of_a_freed_batch_are_counted_and_answered_by_name(api: Api, run: str) -> None:
    api.submit(run, [row("dropped before", 0)])
    api.abort_groups(run, ["dropped before"], "bad prompt")
    fill_batch(api, run)
    api.batch(run, 0, wait_s=WAIT_S)
    api.submit(run, [{**row("dropped later", 0), "tag": "math"}])
    api.abort_groups(run, ["dropped later"], "worse prompt")
    asked = ["b", "dropped later", "never begun", "dropped before"]
    sealed = {"round": 0, "state": "sealed", "batch": 0, "reason": "", "tag": ""}
    dropped = {"round": 0, "state": "dropped", "batch": None, "reason": "worse prompt", "tag": "math"}
    never = {"round": 0, "state": "unknown", "batch": None, "reason": "", "tag": ""}
    answers = [
        {"uid": "b", **sealed},
        {"uid": "dropped later", **dropped},
        {"uid": "never begun", **never},
        {"uid": "dropped before", **dropped, "reason": "bad prompt", "tag": ""},
    ]
    assert (api.archived(run), api.groups(run, asked)) == (0, answers)
    for position in (FIRST, SECOND):
        for rank in range(2):
            api.acknowledge(run, rank, position, commit=True)
    assert api.get(run)["batches_freed"] == 1
    assert api.archived(run) == api.get(run)["groups_archived"] == 3
    assert [one["uid"] for one in api.groups(run)] == ["dropped later"]
    assert api.groups(run, asked) == answers
    assert [one["state"] for one in api.groups(run, asked, 1)] == ["unknown"] * 4
    many = [f"{number:036d}" for number in range(1000)]
    assert [one["uid"] for one in api.groups(run, [*many, "b"])] == [*many, "b"]
    assert api.begin(run, ["a", "dropped before"]) == ["sealed", "dropped"]
    assert api.submit(run, group("a")) == ["sealed"] * 4
    assert api.abort_groups(run, ["a"], "late") == 0
    assert api.set_rewards(run, [{"uid": "a", "sample": 0, "reward": 0.5}]) == 0
    assert api.get(run)["next_round"] == 1


def test_a_batch_may_be_sealed_before_it_is_full(api: Api, run: str) -> None:
    api.submit(run, group("a"))
    assert api.seal(run, 0) == {"batch": 0, "prompts": 1}
    assert api.seal(run, 0) == {"batch": 0, "prompts": 1}
    assert api.batch(run, 0, wait_s=WAIT_S)["plan"]["prompts"] == 1


def test_after_the_last_batch_comes_the_end(api: Api, run: str) -> None:
    api.submit(run, group("a"))
    api.submit(run, [row("b", 0)])
    assert api.finish(run) == 1
    assert api.finish(run) == 1
    assert api.batch(run, 0, wait_s=WAIT_S)["state"] == "published"
    assert api.batch(run, 1, wait_s=WAIT_S)["state"] == "end"
    assert api.get(run)["groups_dropped"] == {"finished": 1}


def test_policy_versions_go_forward_only(api: Api, run: str) -> None:
    assert api.policy_version(run) == 0
    api.announce(run, 3)
    api.announce(run, 3)
    assert api.policy_version(run, at_least=2, wait_s=WAIT_S) == 3
    with pytest.raises(Refused) as refused:
        api.announce(run, 2)
    assert refused.value.code == "FAILED_PRECONDITION"


def test_groups_beyond_the_room_are_asked_to_wait(api: Api, run_name: str) -> None:
    api.create(run_name, {**CONFIG, "max_buffered_batches": 1})
    admissions = api.begin(run_name, ["a", "b", "c", "d", "e", "f"])
    assert admissions == sorted(admissions)
    assert admissions[0] == "admitted"
    assert admissions[-1] == "no_room"
    assert api.begin(run_name, ["f"], wait_s=0.01) == ["no_room"]


def test_a_deleted_run_is_gone(api: Api, run: str) -> None:
    api.delete(run)
    assert run not in api.names()
    with pytest.raises(Refused) as refused:
        api.get(run)
    assert refused.value.code == "NOT_FOUND"


def test_a_run_s_status_names_its_configuration(api: Api, run: str) -> None:
    status = api.get(run)
    assert status["run"] == run
    assert status["config"].items() >= {"train_batch_size": 2, "merge": "prefix"}.items()
    assert status["models"] == [
        {
            "model": "policy",
            "committed": FIRST,
            "incarnation": status["models"][0]["incarnation"],
            "next": [FIRST] * 2,
            "resumes": 0,
        }
    ]


def test_both_apis_lead_to_the_same_bytes(grpc_api: GrpcApi, http_api: HttpApi, run_name: str) -> None:
    apis: tuple[Api, Api] = (grpc_api, http_api)
    for number, api in enumerate(apis):
        api.create(f"{run_name}-{number}", CONFIG)
        fill_batch(api, f"{run_name}-{number}")
    plans = [api.batch(f"{run_name}-{number}", 0, wait_s=WAIT_S)["plan"] for number, api in enumerate(apis)]
    assert plans[0] == plans[1]
    shards = [api.read(f"{run_name}-{number}", 0, 0, 1) for number, api in enumerate(apis)]
    assert shards[0] == shards[1].replace(f"{run_name}-1".encode(), f"{run_name}-0".encode())


def test_what_one_api_submits_the_other_sees(grpc_api: GrpcApi, http_api: HttpApi, run_name: str) -> None:
    grpc_api.create(run_name, CONFIG)
    http_api.submit(run_name, group("a"))
    assert grpc_api.submit(run_name, group("a")) == ["duplicate"] * 4
    assert grpc_api.get(run_name) == http_api.get(run_name)


def test_groups_may_have_a_size_of_their_own(api: Api, run_name: str) -> None:
    api.create(run_name, CONFIG | {"max_samples_per_prompt": 3})
    assert api.begin(run_name, ["a", "b"], n_samples=[3, 0]) == ["admitted", "admitted"]
    assert api.submit(run_name, [row("a", 2)]) == ["accepted"]
    for uids, sizes, problem in (
        (["a"], [2], "uid 'a': n_samples 2 differs from 3, with which the group was begun"),
        (["c"], [4], "uid 'c': n_samples 4 is outside of 1..3 (max_samples_per_prompt: 3)"),
        (["c", "d"], [2], "n_samples has 1 entries for 2 uids"),
    ):
        with pytest.raises(Refused) as refused:
            api.begin(run_name, uids, n_samples=sizes)
        assert refused.value.code == "INVALID_ARGUMENT"
        assert problem in refused.value.message
    assert api.get(run_name)["groups_open"] == 2


def test_groups_may_name_their_task(api: Api, run_name: str) -> None:
    api.create(run_name, CONFIG)
    tag: Json = {"tags" if isinstance(api, GrpcApi) else "tag": ["math"]}
    assert api.begin(run_name, ["a"], **tag) == ["admitted"]
    with pytest.raises(Refused) as refused:
        api.submit(run_name, [row("a", 0, tag="code")])
    assert (refused.value.code, refused.value.kind) == ("INVALID_ARGUMENT", "InvalidArgumentError")
    assert "uid 'a' sample 0 step 0: tag 'code' differs from the group's tag 'math'" in refused.value.message
    api.submit(run_name, group("a"))
    api.submit(run_name, [one | {"tag": "code"} for one in group("b")])
    plan = api.batch(run_name, 0, wait_s=WAIT_S)["plan"]
    assert plan["tags"] == ["math", "code"]
    assert plan["tag_metrics"]["code"]["trajectories"] == 2


def test_rewards_may_have_components(api: Api, run_name: str) -> None:
    api.create(run_name, CONFIG | {"advantage_estimator": "gdpo", "train_batch_size": 1, "policy_mini_batch_size": 1})
    rows = [one | {"reward_components": {"a": one["sample"]}} for one in group("a") if one["is_last_step"]]
    bare = [one for one in group("a") if not one["is_last_step"]]
    for components, problem in (
        ({}, "reward_components is missing, and advantage_estimator: gdpo reads it"),
        ({"a": "x"}, "reward_components.a is 'x'"),
        ({"a": 1e39}, "reward_components.a is 1e+39; it must be finite in float32"),
    ):
        if components == {"a": "x"} and isinstance(api, GrpcApi):
            continue
        with pytest.raises(Refused) as refused:
            api.submit(run_name, [*bare, *(one | {"reward_components": components} for one in rows)])
        assert refused.value.code == "INVALID_ARGUMENT"
        assert problem in refused.value.message
    api.submit(run_name, [*bare, *rows])
    with pytest.raises(Refused) as refused:
        api.submit(run_name, [one | {"reward_components": {"b": 1.0}} for one in group("b") if one["is_last_step"]])
    assert "reward_components has 'b', and other trajectories of this run have 'a'" in refused.value.message
    assert api.batch(run_name, 0, wait_s=WAIT_S)["state"] == "published"
    labels = json.loads(metadata(api.read(run_name, 0, 0, 0))["reward_components"])
    assert {"a": 0.0} in labels


def test_steps_may_have_keys_by_which_gigpo_compares_them(api: Api, run_name: str) -> None:
    settings = {"advantage_estimator": "gigpo", "trajectory_score": "sum", "grpo_norm_by_std": False}
    api.create(run_name, CONFIG | settings | {"train_batch_size": 1, "policy_mini_batch_size": 1})
    rows = [one | {"step_key": "hall" if one["is_last_step"] else ""} for one in group("a")]
    with pytest.raises(Refused) as refused:
        api.submit(run_name, [row("a", 0, step_key="k" * 1001)])
    assert refused.value.code == "INVALID_ARGUMENT"
    assert "sample 0 step 0: step_key" in refused.value.message
    api.submit(run_name, rows[:1])
    with pytest.raises(Refused) as refused:
        api.submit(run_name, [rows[0] | {"step_key": "door"}])
    assert refused.value.code == "ALREADY_EXISTS"
    api.submit(run_name, rows)
    assert api.batch(run_name, 0, wait_s=WAIT_S)["state"] == "published"
    keys = json.loads(metadata(api.read(run_name, 0, 0, 0))["step_keys"])
    assert all(of_row is None or of_row[-1] == "hall" for of_row in keys)
    assert any(keys)


def test_trajectories_may_have_agents_and_episodes(api: Api, run_name: str) -> None:
    api.create(run_name, CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1})
    rows = [one | {"agent": "solver", "episode": f"e{one['sample']}"} for one in group("a")]
    with pytest.raises(Refused) as refused:
        api.submit(run_name, [rows[0] | {"agent": "a" * 101}])
    assert refused.value.code == "INVALID_ARGUMENT"
    api.submit(run_name, rows)
    assert api.batch(run_name, 0, wait_s=WAIT_S)["state"] == "published"
    labels = metadata(api.read(run_name, 0, 0, 0))
    assert set(json.loads(labels["agents"])) <= {"solver", ""}
    assert {*json.loads(labels["episodes"])} & {"e0", "e1"}


def test_tokens_may_have_a_version_each(api: Api, run_name: str) -> None:
    api.create(run_name, CONFIG | {"stale": "mask", "max_staleness": 1, "train_batch_size": 1})
    with pytest.raises(Refused) as refused:
        api.submit(run_name, [row("a", 0, policy_versions=[1])])
    assert refused.value.code == "INVALID_ARGUMENT"
    assert ("policy_versions" in refused.value.message) or ("token_policy_versions" in refused.value.message)
    api.announce(run_name, 3)
    api.submit(run_name, [row("a", sample, policy_versions=[1, 3]) for sample in range(2)])
    plan = api.batch(run_name, 0, wait_s=WAIT_S)["plan"]
    assert plan["counts"]["stale_tokens"] == 2
    assert plan["mini_batches"][0]["loss_tokens"] == 2
    assert "token_policy_version" in _header(api.read(run_name, 0, 0, 0))


def _header(shard: bytes) -> Json:
    header: Json = json.loads(shard[8 : 8 + struct.unpack("<Q", shard[:8])[0]])
    return header
