"""Maps other frameworks' names of row fields to gristmill's names, for error messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_MOST = 8
_OURS = {
    "prompt_token_ids": "prompt prompts prompt_ids prompt_tokens query_ids queries",
    "response_ids": "response responses response_tokens response_token_ids completion_ids completion_tokens "
    "completions output_ids output_token_ids",
    "loss_mask": "loss_masks response_mask response_masks completion_mask action_mask assistant_masks",
    "rollout_logprobs": "logprobs log_probs old_logprobs old_log_probs rollout_log_probs completion_logprobs "
    "response_logprobs sampling_logprobs action_log_probs old_per_token_logps sampling_per_token_logps",
    "reward": "rewards score scores reward_score token_level_rewards token_level_scores",
    "stop_reason": "stop_reasons finish_reason finish_reasons",
    "uid": "uids prompt_id prompt_uid group_id group_index instance_id task_id",
    "sample": "samples sample_id sample_index sample_idx repetition_id rollout_id rollout_index",
    "step": "turn turn_id step_id step_index",
    "is_last_step": "done dones is_last terminated last_step",
    "policy_version": "model_version weight_version policy_step",
    "policy_versions": "weight_versions model_versions",
    "agent": "agents agent_name agent_id role",
    "episode": "episodes episode_id",
    "tag": "tags data_source env_class env_name env_id",
}
_NAMES = {foreign: ours for ours, names in _OURS.items() for foreign in names.split()}
# Names of fields with the prompt and the response; in NeMo-RL also of values for all of their tokens.
_WHOLE = frozenset({"input_ids", "tokens", "token_ids", "sequences"})
_OF_WHOLE = {"generation_logprobs": "rollout_logprobs", "token_loss_mask": "loss_mask"}
_MADE_HERE = frozenset({"attention_mask", "position_ids", "returns", "input_lengths"})
_ADVANTAGES = "advantages"


def renamings(
    unknown: Iterable[str], present: Collection[str], known: Collection[str], plurals: Mapping[str, str] | None = None
) -> str:
    """Returns remedies for unknown fields that have names of other frameworks. Each remedy begins with a semicolon.

    present: all fields of the row. known: the fields that rows may have. plurals: names to suggest instead of fields.
    """
    plurals = plurals or {}
    hints = []
    for name in sorted(unknown, key=str):
        ours = plurals.get(name) or _NAMES.get(name, "")
        ours = plurals.get(ours, ours)
        if ours in known and ours not in present:
            hints.append(f"; rename {name} to {ours}")
        elif name in _WHOLE:
            hints.append(f"; split {name} into prompt_token_ids and response_ids")
        elif name in _OF_WHOLE and _OF_WHOLE[name] not in present:
            hints.append(f"; rename {name} to {_OF_WHOLE[name]}, and keep its values of the response")
        elif name == _ADVANTAGES:
            hints.append(f"; omit {name}, or rename it to advantage for a run with advantage_estimator: none")
        elif name in _MADE_HERE:
            hints.append(f"; omit {name}, because the service computes it")
    return "".join(hints[:_MOST])
