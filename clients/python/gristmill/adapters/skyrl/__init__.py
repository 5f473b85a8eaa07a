"""SkyRL's `RayPPOTrainer` and `FullyAsyncRayPPOTrainer` on gristmill's batches. Needs SkyRL 0.3.

from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer

class Experiment(BasePPOExp):
    def get_trainer(self, **arguments):
        return GristmillPPOTrainer(**arguments, gristmill=Gristmill("127.0.0.1:50051", run="my-run"))
"""

from gristmill.adapters.skyrl._options import Gristmill
from gristmill.adapters.skyrl._settings import run_settings

try:
    from gristmill.adapters.skyrl._fully_async import GristmillFullyAsyncPPOTrainer
    from gristmill.adapters.skyrl._trainer import GristmillPPOTrainer
except ImportError as missing:
    raise ImportError(f"this adapter is SkyRL's ({missing}): pip install 'skyrl>=0.3' 'gristmill[torch]'") from missing

__all__ = ["Gristmill", "GristmillFullyAsyncPPOTrainer", "GristmillPPOTrainer", "run_settings"]
