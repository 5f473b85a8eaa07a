"""Updates of a policy by verl's workers, a process a rank: for each job the gradients' update of the same weights.

    python updates.py FOLDER RANK RANKS PORT

FOLDER has `jobs.json`: verl's overrides, and names of jobs; and `NAME-RANK.pt`: what that rank trains.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import verl  # noqa: F401
from hydra import compose, initialize_config_dir
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from gristmill.adapters.verl._workers import MiniBatchActorWorker

_WHOLE = StateDictOptions(full_state_dict=True)


def main(folder: Path, rank: int, ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    jobs = json.loads((folder / "jobs.json").read_text())
    with initialize_config_dir(str(files("verl") / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", jobs["overrides"])
    workers: dict[bool, Any] = {}
    for is_ours, kind in ((False, ActorRolloutRefWorker), (True, MiniBatchActorWorker)):
        workers[is_ours] = kind(config=config.actor_rollout_ref.copy(), role="actor")
        workers[is_ours].init_model()
    module = {is_ours: worker.actor.engine.module for is_ours, worker in workers.items()}
    initial = weights(module[False])
    for job in jobs["names"]:
        is_ours = job.startswith("ours")
        again: Any = {name: weight.clone() for name, weight in initial.items()}
        set_model_state_dict(module[is_ours], again, options=_WHOLE)
        worker, data = workers[is_ours], torch.load(folder / f"{job}-{rank}.pt", weights_only=False)
        passed = worker.compute_log_prob(tensordict_utils.assign_non_tensor(data.copy(), compute_loss=False))
        data["old_log_probs"] = response_from_nested(passed["log_probs"], data["response_mask"])
        metrics = tensordict_utils.get(worker.update_actor(data), "metrics")
        trained = weights(module[is_ours])
        if rank == 0:
            torch.save({name: trained[name] - initial[name] for name in initial}, folder / f"{job}-update.pt")
            print(job, metrics["grad_norm"], flush=True)


def weights(module: Any) -> dict[str, torch.Tensor]:
    """All ranks', as they are now: on one rank `get_model_state_dict` gives the weights themselves."""
    state: Any = get_model_state_dict(module, options=_WHOLE)
    return {name: weight.clone() for name, weight in state.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
