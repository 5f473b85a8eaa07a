"""verl's workers, changed so that an update is one optimizer step and the learning rate changes once per batch."""

from __future__ import annotations

from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

# The key of the flag for the last update of a batch.
LAST_OF_BATCH = "gristmill_last_of_batch"


class MiniBatchWorker(TrainingWorker):  # type: ignore[misc]
    """Trains one mini-batch per call. verl's worker trains a whole batch, and changes the learning rate per call."""

    def train_batch(self, data: TensorDict) -> TensorDict:
        if (last := tensordict_utils.pop(data, key=LAST_OF_BATCH, default=None)) is not None:
            tensordict_utils.assign_non_tensor(data, update_lr_scheduler=last)
        return super().train_batch(data)


class MiniBatchActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker of actor and reference, which uses `MiniBatchWorker` for the actor."""

    actor_worker_cls = MiniBatchWorker
