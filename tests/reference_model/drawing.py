"""Random configurations and rows that they accept, one seed each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

Row = dict[str, Any]
Config = dict[str, Any]

REWARDS = [0.0, 1.0, 0.7, -0.5, 0.1, 0.25]
_MERGES: dict[str, list[str | None]] = {
    "row": ["last", "first", "sum", "equal"],
    "response": [None],
    "token": ["first", "last", "equal"],
    "items": ["last", "concat", "equal"],
}
_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def drawn(seed: str) -> tuple[list[Row], Config]:
    """The rows of one to three batches."""
    random = Random(seed)
    config = _config(random)
    has = {
        "rollout_logprobs": _maybe(random) or config.get("kl_from") == "rollout_logprobs",
        "stop_reason": _maybe(random, 0.8),
        "token_rewards": _maybe(random, 0.3),
        "partition": _maybe(random, 0.3) and config.get("mini_batch_unit") != "sequence",
        "step_key": _maybe(random, 0.2) or config["advantage_estimator"] == "gigpo",
        "agent": _maybe(random, 0.3) or "episode_agents" in config,
        "reward_components": _maybe(random, 0.2) or config["advantage_estimator"] == "gdpo",
        "token_advantages": _maybe(random) and config["whiten"] != "trajectories",
    }
    batches = random.choice([1, 1, 2, 3])
    rows = [row for batch in range(batches) for row in _batch(random, config, has, batch)]
    if not config["step_wise"] and _maybe(random):
        rows = [{name: value for name, value in row.items() if name not in ("step", "is_last_step")} for row in rows]
    return rows, config


def _maybe(random: Random, share: float = 0.5) -> bool:
    return random.random() < share


def _config(random: Random) -> Config:
    some, maybe = random.choice, partial(_maybe, random)
    n, groups = some([1, 2, 2, 3, 4]), random.randint(1, 5)
    sizes = [size for size in range(1, groups + 1) if groups % size == 0]
    config: Config = {
        "train_batch_size": groups,
        "n_samples_per_prompt": n,
        "policy_mini_batch_size": some(sizes),
        "update_epochs_per_batch": some([1, 1, 2]),
        "step_wise": maybe(0.85),
        "trajectory_score": some(["last_step", "sum"]),
        "advantage_estimator": some(
            ["grpo"] * 3
            + ["gdpo"] * 2
            + ["gigpo"] * 2
            + ["rloo", "rloo", "maxrl", "opo", "passk", "none", "gae", "gae", "reinforce++", "otb", "rae", "rae"]
        ),
        "grpo_std_over": some(["group", "group", "batch"]),
        "grpo_norm_by_std": maybe(0.7),
        "rloo_norm_by_std": maybe(),
        "grpo_epsilon": some([1e-6, 1e-4, 0.5]),
        "loss_reduction": some(
            ["none", "token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "trajectory_mean"]
        ),
        "loss_reduction_over": some(["all", "all", "trained"]),
        "max_seq_len": some([8, 16, 40]),
        "dp_size": some([1, 1, 2, 3, 4]),
        "micro_batch": some(
            [{"size": random.randint(1, 4), "full": maybe(0.3)}, {"max_tokens": random.randint(1, 60)}, {"count": 2}]
        ),
        "balance": some(["none", "none", "none", "tokens", "flops"]),
        "layout": some(["left_padded", "packed", "prefix_tree"]),
        "pad_width": some(["batch", "mini_batch", "shard", "micro_batch"]),
        "pad_to_multiple_of": some([1, 1, 4]),
        "pad_token_id": some([0, 77]),
        "token_step": maybe(0.4),
        "observation_weight": some([0.0, 0.0, 0.125, 1.0]),
    }
    if config["layout"] != "left_padded":
        config["pad_rows_to_multiple_of"] = some([1, 1, 2, 8])
        if maybe(0.3) and "max_tokens" in config["micro_batch"]:
            config["pad_packed_to"] = [128, 512]
        shards = ["zigzag", "contiguous"] if config["layout"] == "packed" else ["blocks"]
        if maybe(0.3) and config["pad_rows_to_multiple_of"] == 8:
            config |= {"cp_size": 2, "cp_shards": some(shards)}
    if config["step_wise"]:
        config["merge"] = some(["none", "prefix", "prefix", "tree", "tree"])
        if config["merge"] != "none":
            config["retokenized_tail"] = some([0, 0, 1, 3, 50])
    if config["balance"] == "flops" or maybe(0.2):
        config["flops"] = {"linear": some([1.0, 0.5]), "quadratic": some([0.0, 0.25])}
        if maybe(0.4):
            config["flops"]["column"] = "patches"
    if maybe(0.3):
        config["critic_mini_batch_size"] = some(sizes)
    if maybe(0.2):
        config |= {"vpp_size": 2, "microbatch_group_size": some([1, 2])}
    if maybe(0.2) and "max_tokens" in config["micro_batch"]:
        config["cp_size"] = 2
    if (
        maybe(0.3)
        and config["step_wise"]
        and "count" not in config["micro_batch"]
        and not config.get("critic_mini_batch_size")
    ):
        config["on_misaligned"] = some(["drop_trailing", "error"])
    if maybe(0.15) and "size" in config["micro_batch"] and "on_misaligned" not in config:
        config |= {"mini_batch_unit": "sequence", "policy_mini_batch_size": config["dp_size"] * some([1, 2, 3])}
        config["micro_batch"].pop("full", None)
        if "critic_mini_batch_size" in config:
            config["critic_mini_batch_size"] = config["dp_size"] * some([1, 2])
    if maybe(0.3):
        config["zero_variance_filter"] = "mask"
    if maybe(0.3):
        config["overlong_filter"] = ["length"]
    if maybe(0.4):
        config |= {"max_staleness": some([0, 1, 2]), "stale": some(["drop", "count", "mask"])}
    if maybe(0.1):
        config["max_samples_per_prompt"] = n + 1
    if maybe(0.1):
        config["tag_shares"] = {"math": {"min": 0.5}}
    _credit(random, config)
    if maybe(0.3):
        config.setdefault("columns", []).append(_response_column("loss_weight"))
    if config.get("flops", {}).get("column"):
        patches = {"name": "patches", "dtype": some(["int32", "float32"]), "scope": "row"}
        config.setdefault("columns", []).append(patches | {"merge": some(["sum", "last", "first"])})
    if maybe(0.5):
        config.setdefault("columns", []).extend(_columns(random, config))
    return config


def _credit(random: Random, config: Config) -> None:
    """What estimators and the KL are computed from."""
    some = random.choice
    estimator = config["advantage_estimator"]
    if estimator in ("gae", "reinforce++"):
        config["gamma"] = some([1.0, 0.9, 0.0])
    config["whiten"] = some(["none", "none", "batch", "mini_batch", "trajectories"])
    if estimator == "otb":
        config["columns"] = [_response_column("old_logprobs"), _response_column("sum_pi_squared")]
    if estimator == "gigpo":
        config["trajectory_score"] = "sum"
        config["step_groups"] = {
            "key": some(["index", "step_key"]),
            "omega": some([0.0, 0.5, 1.0]),
            "gamma": some([0.0, 0.5, 1.0]),
            "trajectory_weight": some([1.0, 1.0, 0.0, 0.5]),
        }
    if estimator in ("gae", "reinforce++", "otb", "gigpo") and config["whiten"] == "trajectories":
        config["whiten"] = "batch"
    if estimator == "gae":
        config |= {"lambda": some([1.0, 0.95, {"length_adaptive": some([0.2, 1.0])}, {"column": "trust"}])}
        config |= {"critic_lambda": some([None, None, 1.0, 0.9]), "columns": [_response_column("values")]}
        if config["lambda"] == {"column": "trust"}:
            merge = some(["first", "last", "sum"])
            config["columns"].append({"name": "trust", "dtype": "float32", "scope": "row", "merge": merge})
        if random.random() < 0.5:
            reasons = some([["length"], ["length", "timeout"], ["stop"]])
            config["bootstrap"] = {"column": "next_value", "stop_reasons": reasons}
            config["columns"].append({"name": "next_value", "dtype": some(["float32", "float64"]), "scope": "row"})
    if estimator in ("grpo", "rloo", "maxrl", "opo", "passk", "gigpo", "rae") and random.random() < 0.25:
        lengths = random.sample(["output_tokens", "input_tokens", "turns"], random.randint(1, 3))
        config["length_penalty"] = {name: some([0.0, 0.25, 2.0]) for name in lengths}
    if random.random() < 0.3:
        config["episode_agents"] = some([[], ["solver"], ["solver", "proposer"]])
    if estimator == "rae":
        config.pop("zero_variance_filter", None)
        config["rae"] = some([None, {"decay": some([0.0, 0.5, 1.0])}])
    if estimator == "gdpo":
        config["component_weights"] = some([{}, {"correct": 1.0, "format": 0.5}, {"correct": 2.0, "format": 0.0}])
    if random.random() < 0.4 and estimator not in ("none", "gdpo", "gigpo"):
        if random.random() < 0.3 and estimator not in ("gae", "reinforce++", "otb"):
            config["kl_in_reward"] = {"coef": some([0.0, 1.0, 0.1]), "column": "kl_sum"}
            names = [{"name": "kl_sum", "dtype": "float32", "scope": "row", "merge": "sum"}]
        else:
            config["kl_in_reward"] = {"coef": some([0.0, 1.0, 0.1]), "estimator": some(["k1", "k2", "k3"])}
            config["kl_from"] = some(["old_logprobs", "rollout_logprobs"])
            names = [_response_column(name) for name in {config["kl_from"], "ref_logprobs"} - {"rollout_logprobs"}]
            names.sort(key=lambda column: str(column["name"]))
        known = {column["name"] for column in config.get("columns", [])}
        config["columns"] = config.get("columns", []) + [column for column in names if column["name"] not in known]


def _response_column(name: str) -> Config:
    return {"name": name, "dtype": "float32", "scope": "response"}


def _columns(random: Random, config: Config) -> list[Config]:
    columns = []
    for number in range(random.randint(1, 3)):
        scopes = [scope for scope in _MERGES if scope != "items" or config["layout"] != "prefix_tree"]
        scope, dtype = random.choice(scopes), random.choice(_DTYPES)
        merges: list[str | None] = [
            merge
            for merge in _MERGES[scope]
            if not (merge == "sum" and dtype == "bool") and not (merge == "equal" and config["layout"] == "prefix_tree")
        ]
        column: Config = {"name": f"x{number}", "dtype": dtype, "scope": scope, "fill": random.choice([0, 1])}
        column |= {"shape": random.choice([[], [], [2], [2, 1]]), "required": random.random() < 0.6}
        column["partial"] = scope in ("response", "token") and _maybe(random, 0.4)
        if scope in ("response", "token") and _maybe(random, 0.3):
            column |= {"shape": [None], "fill": 0}
        merge = random.choice(merges)
        columns.append(column | ({"merge": merge} if merge else {}))
    return columns


def _batch(random: Random, config: Config, has: dict[str, bool], batch: int) -> list[Row]:
    """has: what the rows of the file have."""
    maybe = partial(_maybe, random)
    has |= {"policy_version": maybe(0.7), "policy_versions": maybe(0.25), "tag": maybe(0.3) or "tag_shares" in config}
    rows: list[Row] = []
    kinds = random.choice([2, 3, 9])
    constant = random.choice(REWARDS) if maybe(0.3) else None
    for group in range(config["train_batch_size"]):
        prompt = _some(random, kinds, 5)
        # The same prompt comes again in later rounds; and one has the name of padding rows.
        uid = "padding" if group == 3 else f"g{group}"
        n = config["n_samples_per_prompt"]
        samples = range(n) if maybe(0.8) else sorted(random.sample(range(n), random.randint(1, n)))
        tag = random.choice(["math", "code"]) if has["tag"] and maybe(0.8) else None
        for sample in samples:
            begin = prompt if maybe(0.8) else _some(random, kinds, 5)
            of_one = _trajectory(random, config, begin, kinds, has)
            agent = random.choice(["solver", "solver", "proposer", ""])
            episode = random.choice(["first", "second", ""])
            for row in of_one:
                if has["agent"]:
                    row |= {"agent": agent, "episode": episode}
                row |= {"uid": uid, "sample": sample, "round": batch}
                if tag:
                    row["tag"] = tag
                if constant is not None:
                    row["reward"] = (
                        [constant] * len(row["response_ids"]) if isinstance(row["reward"], list) else constant
                    )
            rows += of_one
    if maybe(0.3):
        random.shuffle(rows)
    return rows


def _some(random: Random, kinds: int, most: int) -> list[int]:
    return [random.randrange(kinds) for _ in range(random.randint(1, most))]


def _trajectory(random: Random, config: Config, prompt: list[int], kinds: int, has: dict[str, bool]) -> list[Row]:
    rows: list[Row] = []
    sequences: list[list[int]] = []
    count = random.randint(1, 5) if config["step_wise"] else 1
    advantage = random.choice([-1.0, 0.5, 2.0])
    for step in range(count):
        response = _some(random, kinds, 4)
        row: Row = {
            "step": step,
            "is_last_step": step == count - 1,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [random.randrange(2) if random.random() < 0.2 else 1 for _ in response],
            "reward": random.choice(REWARDS),
        }
        if has["reward_components"] and step == count - 1:
            row["reward_components"] = {"correct": random.choice(REWARDS), "format": random.choice(REWARDS)}
            if config["advantage_estimator"] != "gdpo" and random.random() < 0.4:
                # Data sources have components of their own.
                del row["reward_components"][random.choice(["correct", "format"])]
                row["reward_components"] |= random.choice([{}, {"tests": random.choice(REWARDS)}])
        if has["partition"]:
            row["partition"] = random.choice(["", "sft", "sft"])
        if has["step_key"]:
            row["step_key"] = random.choice(["", "hall", "hall", "door"])
        if has["stop_reason"]:
            row["stop_reason"] = random.choice(["stop", "stop", "length"])
        if has["token_rewards"]:
            row["reward"] = [random.choice([0.0, 0.0, *REWARDS]) for _ in response]
        if config["advantage_estimator"] == "none":
            per_token = [random.choice([-1.0, 0.5]) for _ in response]
            row["advantage"] = per_token if has["token_advantages"] else advantage
        if has["rollout_logprobs"]:
            row["rollout_logprobs"] = [_eighths(random) for _ in response]
        if has["policy_versions"] and random.random() < 0.8:
            row["policy_versions"] = [random.randint(0, 4) for _ in response]
        elif has["policy_version"] and random.random() < 0.8:
            row["policy_version"] = random.randint(0, 4)
        row |= _values(random, config, row)
        rows.append(row)
        sequences.append(prompt + response)
        kind = random.random()
        before = sequences[-1] if kind < 0.7 else random.choice(sequences)
        cut = random.randint(1, 5) if 0.6 < kind < 0.85 else 0
        prompt = before[: max(1, len(before) - cut)] + (_some(random, kinds, 3) if random.random() < 0.8 else [])
    return rows


def _values(random: Random, config: Config, row: Row) -> Row:
    """The row's declared columns: small numbers that every type has, few of them, so that `equal` often holds."""
    values: Row = {}
    response, tokens = len(row["response_ids"]), len(row["prompt_token_ids"]) + len(row["response_ids"])
    for column in config.get("columns", []):
        if not column.get("required", True) and random.random() < 0.25:
            continue
        one: Callable[[], float] = partial(random.randint, 0, 1 if column["dtype"] == "bool" else 40)
        if column["name"] == "trust":
            one = partial(random.choice, [0.0, 0.25, 1.0])
        elif column["name"] == "sum_pi_squared":
            one = partial(random.choice, [0.25, 0.5, 1.0])
        elif not column["name"].startswith("x") and column["name"] != "patches":
            one = partial(_eighths, random)
        elif column.get("merge") == "equal":
            one = partial(_maybe, random, 0.05)
        count = {"row": 1, "response": response, "token": tokens}.get(column["scope"], random.randint(0, 2))
        if column.get("partial"):
            values[f"{column['name']}_start"] = start = random.randint(0, count)
            count = random.randint(0, count - start)
        shape, lengths = column.get("shape", []), [1] if column.get("merge") == "equal" else [0, 1, 1, 2, 3]
        shapes = [[random.choice(lengths)] if shape == [None] else shape for _ in range(count)]
        every = [_shaped(one, shape, column["dtype"]) for shape in shapes]
        values[column["name"]] = every[0] if column["scope"] == "row" else every
    return values


def _eighths(random: Random) -> float:
    return -random.randint(0, 40) / 8


def _shaped(one: Callable[[], float], shape: list[int], dtype: str) -> Any:
    if shape:
        return [_shaped(one, shape[1:], dtype) for _ in range(shape[0])]
    return bool(one()) if dtype == "bool" else one() + 0
