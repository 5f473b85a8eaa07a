"""What SkyRL 0.3.0 needs to be imported and run without a GPU. Imported before it, in every process."""

from __future__ import annotations

import sys
import types
import typing

import peft
import torch
import transformers
import typing_extensions

# Pydantic refuses the standard library's before Python 3.12, and SkyRL gives it that (skyrl/tinker/types.py).
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

# SkyRL's workers move what they compute to the current CUDA device.
if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def _needs_flash_attention(*_: object) -> None:
    raise RuntimeError("flash attention is not here; set trainer.flash_attn and remove_microbatch_padding to False")


def _import_model_wrapper() -> None:
    """It imports two names of flash attention, used or not. The libraries look for it too, and are not to find it."""
    _ = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, peft.LoraConfig
    padding = types.ModuleType("flash_attn.bert_padding")
    padding.__dict__.update(pad_input=_needs_flash_attention, unpad_input=_needs_flash_attention)
    standing_in = {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.bert_padding": padding}
    sys.modules.update(standing_in)
    try:
        import skyrl.backends.skyrl_train.workers.model_wrapper  # noqa: F401
    finally:
        for name in standing_in:
            del sys.modules[name]


def applied() -> None:
    """Ray's workers are set up by a call, by which time this module is imported."""


_import_model_wrapper()
