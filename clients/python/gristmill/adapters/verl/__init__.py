"""verl's trainer on gristmill's shards: `trainer.v1.trainer_mode=gristmill`. Tested with verl 0.9.1.

`import verl` finds the trainer by the entry point group `verl.plugins`. The guide is docs/trainers/verl.md.
"""

from typing import TYPE_CHECKING

from gristmill.adapters._core.lazy import importer
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.verl._settings import run_settings

if TYPE_CHECKING:
    from gristmill.adapters.verl._trainer import GristmillTrainer

__all__ = ["Gristmill", "GristmillTrainer", "run_settings"]

__getattr__ = importer(__name__, {"GristmillTrainer": "_trainer"}, "pip install 'verl==0.9.1' torch")
