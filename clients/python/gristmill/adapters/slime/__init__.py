"""slime on gristmill's batches. Needs slime, with its Megatron, Ray and SGLang.

    python -m gristmill.adapters.slime path/to/slime/train.py --custom-config-path gristmill.yaml ...

runs slime's own script, with its arguments, and a RolloutManager whose train data are the run's batches.
"""

from gristmill.adapters.slime.credit import advantages

__all__ = ["advantages"]
