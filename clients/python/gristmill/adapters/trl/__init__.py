"""TRL's `GRPOTrainer` and `AsyncGRPOTrainer` on gristmill's shards. Tested with TRL 1.16.

from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer

trainer = GristmillGRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=prompts,
    gristmill=Gristmill("127.0.0.1:50051", run="my-run"),
)
trainer.train()
"""

from typing import TYPE_CHECKING

from gristmill.adapters._core.lazy import importer
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.trl._async_settings import async_run_settings
from gristmill.adapters.trl._settings import run_settings

if TYPE_CHECKING:
    from gristmill.adapters.trl._trainer import GristmillGRPOTrainer
    from gristmill.adapters.trl._worker import GristmillRolloutWorker

__all__ = ["Gristmill", "GristmillGRPOTrainer", "GristmillRolloutWorker", "async_run_settings", "run_settings"]

__getattr__ = importer(
    __name__,
    {"GristmillGRPOTrainer": "_trainer", "GristmillRolloutWorker": "_worker"},
    "pip install 'trl==1.16.*' torch",
)
