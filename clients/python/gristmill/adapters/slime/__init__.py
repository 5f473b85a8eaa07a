"""slime on gristmill's batches. Written for slime 0.3, but not tested with slime's trainer.

    python -m gristmill.adapters.slime path/to/slime/train.py --custom-config-path gristmill.yaml ...

runs slime's own script with its arguments. A subclass of RolloutManager returns the run's batches as train data.
"""

from typing import TYPE_CHECKING

from gristmill.adapters._core.lazy import importer
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.slime._settings import run_settings

if TYPE_CHECKING:
    from gristmill.adapters.slime._credit import advantages
    from gristmill.adapters.slime._manager import swap

__all__ = ["Gristmill", "advantages", "run_settings", "swap"]

__getattr__ = importer(__name__, {"advantages": "_credit", "swap": "_manager"}, "pip install torch")
