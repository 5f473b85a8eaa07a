"""verl's workers, where an update is one optimizer step and the learning rate changes once a batch."""

from __future__ import annotations

from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

# The key of whether an update is its batch's last.
LAST_OF_BATCH = "gristmill_last_of_batch"


class MiniBatchWorker(TrainingWorker):  # type: ignore[misc]
    """Trains one mini-batch in a call. verl's trains a whole batch, and changes the learning rate after each call."""

    def train_batch(self, data: TensorDict) -> TensorDict:
        if (last := tensordict_utils.pop(data, key=LAST_OF_BATCH, default=None)) is not None:
            tensordict_utils.assign_non_tensor(data, update_lr_scheduler=last)
        return super().train_batch(data)


class MiniBatchActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker of actor and reference, with that worker inside."""

    actor_worker_cls = MiniBatchWorker
