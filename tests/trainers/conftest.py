"""Tests that train with real trainers. `make test-trainers` makes an environment for each and runs its folder there."""

from importlib.util import find_spec

# A trainer's tests are collected only where the trainer is installed, which is never the environment of `make test`.
collect_ignore = [trainer for trainer in ("trl", "skyrl", "verl", "transformers") if find_spec(trainer) is None]
