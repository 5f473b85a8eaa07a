"""verl's tests run on the CPU, by verl's own interface for platforms; so do the processes that they start."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    # verl's engines of CUDA are the ones that the CPU runs.
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    # Ray starts a worker for each core that it is given before it has work for them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
}
sys.path.insert(0, str(HERE))

# Warnings are errors, but not those of what verl imports.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.trainer.ppo.v1  # noqa: F401
