"""TRL's `GRPOTrainer` and `AsyncGRPOTrainer` on gristmill's shards. Needs TRL 1.16, and PyTorch.

from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer

trainer = GristmillGRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=prompts,
    gristmill=Gristmill("127.0.0.1:50051", run="my-run"),
)
trainer.train()
"""

from gristmill.adapters.trl._options import Gristmill
from gristmill.adapters.trl._settings import run_settings

try:
    from gristmill.adapters.trl._trainer import GristmillGRPOTrainer
    from gristmill.adapters.trl._worker import GristmillRolloutWorker, async_run_settings
except ImportError as missing:
    raise ImportError(f"this adapter is TRL's ({missing}): pip install 'trl>=1.16' 'gristmill[torch]'") from missing

__all__ = ["Gristmill", "GristmillGRPOTrainer", "GristmillRolloutWorker", "async_run_settings", "run_settings"]
