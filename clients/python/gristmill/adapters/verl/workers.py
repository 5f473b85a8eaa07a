"""verl's workers, but for one thing: an update is one optimizer step, and the learning rate moves on once a batch."""

from __future__ import annotations

from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

# Said of each update: whether it is the batch's last.
LAST_OF_BATCH = "gristmill_last_of_batch"


class MiniBatchWorker(TrainingWorker):  # type: ignore[misc]
    """Trains a mini-batch a call. verl's takes a whole batch, and moves the learning rate after each call."""

    def train_batch(self, data: TensorDict) -> TensorDict:
        if (last := tensordict_utils.pop(data, key=LAST_OF_BATCH, default=None)) is not None:
            tensordict_utils.assign_non_tensor(data, update_lr_scheduler=last)
        return super().train_batch(data)


class MiniBatchActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker of actor and reference, around that one."""

    actor_worker_cls = MiniBatchWorker
