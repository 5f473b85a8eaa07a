"""TRL warns of `rollout_func`, which tests replay rollouts with. Nothing is fetched from anywhere."""

from __future__ import annotations

import os

import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# Of several threads each waits for the others on a busy machine.
torch.set_num_threads(1)
