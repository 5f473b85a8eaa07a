"""GRPO with SkyRL, its batches made by gristmill: SkyRL's own entry point but for the trainer.

    gristmill serve &
    pip install 'skyrl[fsdp]==0.3.0' '.[torch]'        # in gristmill's checkout
    python examples/skyrl_grpo.py data.train_data="['$HOME/data/gsm8k/train.parquet']" \
        trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct trainer.algorithm.use_kl_loss=false trainer.logger=console

Takes SkyRL's settings. Lines that differ from a plain SkyRL script are marked.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg

from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer  # gristmill

ADDRESS = os.environ.get("GRISTMILL_ADDRESS", "127.0.0.1:50051")


class Experiment(BasePPOExp):
    def get_trainer(self, **arguments: Any) -> GristmillPPOTrainer:  # gristmill
        run = self.cfg.trainer.run_name
        return GristmillPPOTrainer(**arguments, gristmill=Gristmill(ADDRESS, run))  # gristmill


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig) -> None:
    Experiment(cfg).run()


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


if __name__ == "__main__":
    main()
