"""Scores, the KL in them, and the advantages of every estimator (specification, sections 4 and 11)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.reference_model.merging import Merged, Token
    from tests.reference_model.rows import Config, Group, Row, Trajectory

PER_TOKEN = ("gae", "reinforce++", "otb")


def float32(value: float) -> float:
    """The nearest number that float32 has: what columns, logprobs and rewards are stored as."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def exact_sum(values: list[float]) -> float:
    """The sum, correctly rounded."""
    return float(sum(map(Fraction, values), Fraction(0)))


def score(steps: list[Row], config: Config) -> float:
    counted = steps if config["trajectory_score"] == "sum" else steps[-1:]
    return exact_sum([reward for step in counted for reward in as_list(step["reward"])])


def all_equal(scores: list[float]) -> bool:
    return len(scores) > 1 and len(set(scores)) == 1


def compared(trajectories: list[Trajectory], config: Config) -> list[list[int]]:
    """The places of the trajectories that are compared with each other."""
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(trajectories):
        agent, episode = one.steps[0]["agent"], one.steps[0]["episode"]
        within = episode if agent in config["episode_agents"] else None
        groups.setdefault((one.round, one.uid, agent, within), []).append(place)
    return list(groups.values())


def as_list(reward: Any) -> list[float]:
    return reward if isinstance(reward, list) else [reward]


def std(values: list[float]) -> float:
    """With n - 1; 0 for one value."""
    exact = [Fraction(one) for one in values]
    mean = sum(exact) / len(exact)
    return math.sqrt(sum((one - mean) ** 2 for one in exact) / max(1, len(exact) - 1))


def group_advantages(scores: list[float], tokens: list[int], batch: list[float], config: Config) -> list[float]:
    """Of an outcome estimator, for the trajectories of one prompt group. tokens: how many of each are trained. batch:
    the scores of all groups."""
    estimator, epsilon = config["advantage_estimator"], config["grpo_epsilon"]
    is_normed = config["grpo_norm_by_std"]
    if len(scores) == 1:
        if config["n_samples_per_prompt"] > 1 or estimator in ("rloo", "opo", "passk"):
            return [0.0]
        return [scores[0] / (1 + epsilon) if estimator == "grpo" and is_normed else scores[0]]
    if all_equal(scores):
        return [0.0] * len(scores)
    count, exact = len(scores), [Fraction(one) for one in scores]
    mean = sum(exact) / count
    if estimator == "grpo":
        by = std(batch if config["grpo_std_over"] == "batch" else scores) + epsilon if is_normed else 1.0
        return [float(one - mean) / by for one in exact]
    if estimator == "opo":
        weights = tokens if any(tokens) else [1] * count
        weighted = sum(weight * one for weight, one in zip(weights, exact, strict=True)) / sum(weights)
        return [float(one - weighted) for one in exact]
    if estimator == "passk":
        first, second = sorted(exact, reverse=True)[:2]
        lead = float(first - second) / (std(scores) + epsilon if is_normed else 1.0)
        return [lead if one == first else 0.0 for one in exact]
    if estimator == "rloo":
        return [_less_others(place, exact, config) for place in range(count)]
    return [float((one - mean) / (mean + Fraction(1e-6))) for one in exact]


def _less_others(place: int, scores: list[Fraction], config: Config) -> float:
    """`rloo`: a score less the mean of the others, over their standard deviation where that is asked for and not 0."""
    others = [one for at, one in enumerate(scores) if at != place]
    centered = float(scores[place] - sum(others) / len(others))
    deviation = std([float(one) for one in others]) if config["rloo_norm_by_std"] else 0.0
    return centered / (deviation + config["grpo_epsilon"]) if deviation else centered


@dataclass
class Credit:
    """Credit of a batch.

    advantages: of each trajectory, by its place, not yet whitened; empty with credit per token. of_tokens: of each
    trained token of each trajectory, advantage and return, with an estimator per token, or given per token and
    whitened. rewards: of each trajectory and step, the reward of each response token, with the KL. uncredited: rewards
    that are in no token's return.
    """

    advantages: list[float]
    of_tokens: list[dict[Token, tuple[float, float]]]
    rewards: list[list[list[float]]]
    uncredited: int = 0


def credit(
    groups: list[Group], rows: list[list[Merged]], config: Config, baselines: dict[tuple[str, str], float]
) -> Credit:
    """rows: of each trajectory of the batch, in order. baselines: the run's before the batch, which `rae` changes."""
    trajectories = [one for group in groups for one in group.trajectories]
    kl, estimator = config["kl_in_reward"], config["advantage_estimator"]
    result = Credit([], [], [])
    scores: list[float] = []
    tokens: list[int] = []
    of_all: list[list[Token]] = []
    for one, of_one in zip(trajectories, rows, strict=True):
        kept = [source for row in of_one for source in row.sources if source is not None]
        rewards = [_placed(step, number, of_one) for number, step in enumerate(one.steps)]
        trained = sorted({(step, index) for step, index in kept if one.masks[step][index]})
        spent = dict.fromkeys(trained, 0.0)
        if kl is not None and "estimator" in kl:
            spent = {token: _kl(one, token, config) for token in trained}
            for step, index in trained:
                rewards[step][index] -= kl["coef"] * spent[step, index]
        sums = [spent[token] for token in trained]
        if kl is not None and "column" in kl:
            sums = [float32(step[kl["column"]]) for step in one.steps]
        scores.append(one.score - (kl["coef"] * exact_sum(sums) if kl else 0.0))
        # Also those that no row has.
        tokens.append(sum(map(sum, one.masks)))
        of_all.append(trained)
        result.rewards.append(rewards)
        if estimator in PER_TOKEN:
            sent = [[float(value != 0) for value in as_list(step["reward"])] for step in one.steps]
            alike = [isinstance(step["reward"], list) for step in one.steps]
            counts = [
                _placed({**step, "reward": ones if is_list else ones[0]}, number, of_one)
                for number, (step, ones, is_list) in enumerate(zip(one.steps, sent, alike, strict=True))
            ]
            credits, uncredited = _of_tokens(one, trained, rewards, counts, config)
            result.of_tokens.append(credits)
            result.uncredited += uncredited
        if estimator == "none" and isinstance(one.steps[0]["advantage"], list) and config["whiten"] != "none":
            given = {token: float32(one.steps[token[0]]["advantage"][token[1]]) for token in trained}
            result.of_tokens.append({token: (advantage, 0.0) for token, advantage in given.items()})
    if estimator == "none" and not any(isinstance(one.steps[0]["advantage"], list) for one in trajectories):
        result.advantages = [float(one.steps[0]["advantage"]) for one in trajectories]
    if config["length_penalty"] is not None:
        scores = _penalized(trajectories, scores, config)
    if estimator == "otb":
        for members in compared(trajectories, config):
            result.of_tokens = _less_baselines(result.of_tokens, trajectories, members)
    if estimator == "gigpo":
        of_steps = _of_steps(trajectories, scores, config)
        result.of_tokens = [
            {(step, index): (own[step], 0.0) for step, index in trained}
            for own, trained in zip(of_steps, of_all, strict=True)
        ]
    if estimator == "gdpo":
        result.advantages = _of_components(trajectories, tokens, config)
    if estimator == "rae":
        tags = [group.tag for group in groups for _ in group.trajectories]
        decay = (config["rae"] or {}).get("decay", 0.95)
        for one, tag, own in zip(trajectories, tags, scores, strict=True):
            key = tag, one.steps[0]["agent"]
            before = baselines.get(key, 0.0)
            baselines[key] = decay * before + (1 - decay) * own
            result.advantages.append(own - before)
    if estimator not in (*PER_TOKEN, "none", "gdpo", "gigpo", "rae"):
        result.advantages = _of_groups(trajectories, scores, tokens, config)
    return result


def _of_groups(trajectories: list[Trajectory], scores: list[float], tokens: list[int], config: Config) -> list[float]:
    """What an outcome estimator makes of each trajectory's score."""
    result = [0.0] * len(scores)
    for members in compared(trajectories, config):
        own = [scores[place] for place in members]
        advantages = group_advantages(own, [tokens[place] for place in members], scores, config)
        for place, advantage in zip(members, advantages, strict=True):
            result[place] = advantage
    return result


def _of_steps(trajectories: list[Trajectory], scores: list[float], config: Config) -> list[list[float]]:
    """`gigpo`: the advantages of each trajectory's steps."""
    rule, by_grpo = config["step_groups"] or {}, {**config, "advantage_estimator": "grpo"}
    returns = [_returns(one.steps, rule.get("gamma", 1.0)) for one in trajectories]
    every = [value for of_one in returns for value in of_one]
    whole = _of_groups(trajectories, scores, [0] * len(scores), by_grpo)
    weight = rule.get("trajectory_weight", 1.0)
    result = [[weight * advantage] * len(one.steps) for one, advantage in zip(trajectories, whole, strict=True)]
    for members in compared(trajectories, config):
        by_key: dict[Any, list[tuple[int, int]]] = {}
        for place in members:
            for number, step in enumerate(trajectories[place].steps):
                key = number if rule.get("key") == "index" else step["step_key"]
                by_key.setdefault(key, []).append((place, number))
        for key, among in by_key.items():
            if len(among) > 1 and key != "":
                own = [returns[place][number] for place, number in among]
                for at, advantage in zip(among, group_advantages(own, [], every, by_grpo), strict=True):
                    result[at[0]][at[1]] += rule.get("omega", 1.0) * advantage
    return result


def _returns(steps: list[Row], gamma: float) -> list[float]:
    """Of each step, its reward and the discounted ones after it."""
    result = [0.0]
    for step in reversed(steps):
        result.insert(0, exact_sum(as_list(step["reward"])) + gamma * result[0])
    return result[:-1]


def _penalized(trajectories: list[Trajectory], scores: list[float], config: Config) -> list[float]:
    """The scores less what the lengths of trajectories take of them."""
    result, penalty = list(scores), config["length_penalty"]
    for members in compared(trajectories, config):
        own = [trajectories[place] for place in members]
        mean = sum(Fraction(scores[place]) for place in members) / len(members)
        lengths = {
            "output_tokens": [sum(len(step["response_ids"]) for step in one.steps) for one in own],
            "input_tokens": [_others(one.steps) for one in own],
            "turns": [len(one.steps) for one in own],
        }
        for at, place in enumerate(members):
            shares = (
                Fraction(penalty.get(name, 0.0)) * Fraction(of_all[at], max([1, *of_all]))
                for name, of_all in lengths.items()
            )
            result[place] = scores[place] - float(mean * sum(shares))
    return result


def _others(steps: list[Row]) -> int:
    """The tokens of prompts that no earlier step's sequence, which the prompt begins with, has."""
    wholes = [step["prompt_token_ids"] + step["response_ids"] for step in steps]
    return sum(
        len(step["prompt_token_ids"])
        - max((len(whole) for whole in wholes[:at] if step["prompt_token_ids"][: len(whole)] == whole), default=0)
        for at, step in enumerate(steps)
    )


def _less_baselines(
    credits: list[dict[Token, tuple[float, float]]], trajectories: list[Trajectory], members: list[int]
) -> list[dict[Token, tuple[float, float]]]:
    """The returns of a group's tokens less their optimal baselines."""
    energies: dict[int, list[float]] = {}
    for member in members:
        steps, total = trajectories[member].steps, 0.0
        energies[member] = []
        for step, index in sorted(credits[member]):
            square = float32(steps[step]["sum_pi_squared"][index])
            total += max(0.0, 1 - 2 * math.exp(float32(steps[step]["old_logprobs"][index])) + square)
            energies[member].append(total)
    result = list(credits)
    for member in members:
        result[member] = {}
        for at, token in enumerate(sorted(credits[member])):
            others = [other for other in members if len(energies[other]) > at]
            returns = {other: credits[other][sorted(credits[other])[at]][1] for other in others}
            weighed = math.fsum(returns[other] * energies[other][at] for other in others)
            baseline = weighed / (math.fsum(energies[other][at] for other in others) + 1e-8)
            own = returns[member]
            result[member][token] = (own - baseline if len(others) > 1 else own), own
    return result


def _of_components(trajectories: list[Trajectory], tokens: list[int], config: Config) -> list[float]:
    """The weighted sum of what `grpo` makes of each component of the rewards."""
    every = [one.steps[-1]["reward_components"] for one in trajectories]
    total, by_grpo = [0.0] * len(every), {**config, "advantage_estimator": "grpo"}
    for name in sorted(every[0]) if every else []:
        advantages = _of_groups(trajectories, [float(one[name]) for one in every], tokens, by_grpo)
        weight = (config["component_weights"] or dict.fromkeys(every[0], 1.0))[name]
        total = [one + weight * advantage for one, advantage in zip(total, advantages, strict=True)]
    return total


def _placed(step: Row, number: int, rows: list[Merged]) -> list[float]:
    """The rewards of a step's response tokens. That of a token which no row keeps moves to the last token that the
    first row keeps of the step; where none keeps any, it stays."""
    length = len(step["response_ids"])
    rewards = list(step["reward"]) if isinstance(step["reward"], list) else [0.0] * (length - 1) + [step["reward"]]
    kept = [[source[1] for source in row.sources if source is not None and source[0] == number] for row in rows]
    first = next((tokens for tokens in kept if tokens), None)
    if first is None:
        return rewards
    everywhere = {index for tokens in kept for index in tokens}
    lost = [index for index in range(length) if index not in everywhere]
    if lost:
        rewards[first[-1]] = exact_sum([rewards[first[-1]], *(rewards[index] for index in lost)])
        for index in lost:
            rewards[index] = 0.0
    return rewards


def _kl(one: Trajectory, token: Token, config: Config) -> float:
    step, index = one.steps[token[0]], token[1]
    name = config["kl_from"]
    difference = float32(step[name][index]) - float32(step["ref_logprobs"][index])
    match config["kl_in_reward"]["estimator"]:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2
    return math.expm1(-difference) + difference


def _of_tokens(
    one: Trajectory, trained: list[Token], rewards: list[list[float]], counts: list[list[float]], config: Config
) -> tuple[dict[Token, tuple[float, float]], int]:
    """Advantage and return of each trained token, and the rewards before any of them. counts: how many rewards other
    than 0 came to be on each token."""
    earned, uncredited, last = dict.fromkeys(trained, 0.0), 0, None
    for number, of_step in enumerate(rewards):
        for index, reward in enumerate(of_step):
            last = (number, index) if (number, index) in earned else last
            if last is not None:
                earned[last] += reward
            else:
                uncredited += int(counts[number][index])
    gamma, critic = 1.0 if config["advantage_estimator"] == "otb" else config["gamma"], config["critic_lambda"]
    credits: dict[Token, tuple[float, float]] = {}
    advantage = target = 0.0
    value_after, bootstrap, last_step = 0.0, config["bootstrap"], one.steps[-1]
    if bootstrap is not None and last_step["stop_reason"] in bootstrap["stop_reasons"]:
        value_after = float32(last_step[bootstrap["column"]])
    for token in reversed(trained):
        if config["advantage_estimator"] == "gae":
            value = float32(one.steps[token[0]]["values"][token[1]])
            delta = earned[token] + gamma * value_after - value
            lambda_ = _lambda(one.steps[token[0]], len(trained), config)
            advantage = delta + gamma * lambda_ * advantage
            target = delta + gamma * (lambda_ if critic is None else critic) * target
            value_after = value
            credits[token] = advantage, target + value
        else:
            advantage = earned[token] + gamma * advantage
            credits[token] = advantage, advantage
    return credits, uncredited


def _lambda(step: Row, trained: int, config: Config) -> float:
    rule = config["lambda"]
    if not isinstance(rule, dict):
        return float(rule)
    if "column" in rule:
        return float32(step[rule["column"]])
    return max(0.0, 1 - 1 / (float(rule["length_adaptive"]) * trained))


def whitener(advantages: list[float]) -> Callable[[float], float]:
    """What `whiten` makes of each advantage, where these are those of the trained tokens."""
    if len(advantages) < 2:
        return lambda _: 0.0
    mean = float(sum(map(Fraction, advantages)) / len(advantages))
    variance = math.fsum((one - mean) ** 2 for one in advantages) / max(1, len(advantages) - 1)
    return lambda one: (one - mean) / math.sqrt(variance + 1e-8)


@dataclass
class Denominators:
    """What the losses of a mini-batch are divided by; every number at least 1. of_rows: by row, its own tokens, its
    group's and its trajectory's."""

    loss_tokens: int
    rows: int
    prompts: int
    trajectories: int
    of_rows: dict[int, tuple[int, int, int]]
    loss_weight: float | None = None

    def scale(self, row: int, config: Config) -> float:
        tokens, of_prompt, of_trajectory = self.of_rows[row]
        return (
            1
            / {
                "none": 1,
                "token_mean": self.loss_tokens,
                "sequence_mean": self.rows * tokens,
                "seq_mean_token_sum_norm": self.rows * (config["max_seq_len"] or 1),
                "prompt_mean": self.prompts * of_prompt,
                "trajectory_mean": self.trajectories * of_trajectory,
            }[config["loss_reduction"]]
        )


def denominators(rows: dict[int, Merged], config: Config) -> Denominators:
    """rows: the kept ones of a mini-batch, by number."""
    tokens = {number: sum(row.loss_mask) for number, row in rows.items()}
    prompts: dict[Any, int] = {}
    trajectories: dict[Any, int] = {}
    for number, row in rows.items():
        one = row.trajectory
        prompts[one.round, one.uid] = prompts.get((one.round, one.uid), 0) + tokens[number]
        trajectories[id(one)] = trajectories.get(id(one), 0) + tokens[number]

    def counted(of_each: dict[Any, int]) -> int:
        is_counted = config["loss_reduction_over"] == "all"
        return max(1, sum(is_counted or of_one > 0 for of_one in of_each.values()))

    return Denominators(
        max(1, sum(tokens.values())),
        counted(tokens),
        counted(prompts),
        counted(trajectories),
        {
            number: (
                max(1, tokens[number]),
                max(1, prompts[row.trajectory.round, row.trajectory.uid]),
                max(1, trajectories[id(row.trajectory)]),
            )
            for number, row in rows.items()
        },
    )
