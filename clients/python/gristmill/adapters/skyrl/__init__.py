"""SkyRL's `RayPPOTrainer` and `FullyAsyncRayPPOTrainer` on gristmill's batches. Tested with SkyRL 0.3.

from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer

class Experiment(BasePPOExp):
    def get_trainer(self, **arguments):
        return GristmillPPOTrainer(**arguments, gristmill=Gristmill("127.0.0.1:50051", run="my-run"))
"""

from typing import TYPE_CHECKING

from gristmill.adapters._core.lazy import importer
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.skyrl._settings import run_settings

if TYPE_CHECKING:
    from gristmill.adapters.skyrl._fully_async import GristmillFullyAsyncPPOTrainer
    from gristmill.adapters.skyrl._trainer import GristmillPPOTrainer

__all__ = ["Gristmill", "GristmillFullyAsyncPPOTrainer", "GristmillPPOTrainer", "run_settings"]

__getattr__ = importer(
    __name__,
    {"GristmillFullyAsyncPPOTrainer": "_fully_async", "GristmillPPOTrainer": "_trainer"},
    "pip install 'skyrl==0.3.*' torch",
)
