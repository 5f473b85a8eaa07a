"""Tests with real engines. `make test-engines` makes a virtual environment for each, and runs its folder there.

All serve a tiny random model. Nothing is fetched from anywhere.
"""

from importlib.util import find_spec
from pathlib import Path

# An engine's tests are collected only where it is installed, which is never the environment of `make test`.
collect_ignore = [engine for engine in ("vllm", "sglang", "dynamo") if find_spec(engine) is None]
# Templates and tokenizers are fetched by `make test-templates`.
collect_ignore += [] if (Path(__file__).parents[2] / "build/templates").exists() else ["templates"]
