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


def _unpad_input(
    padded: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
    """What is attended to, (tokens, ...), and where it stood: what flash attention's function of this name gives first.
    SkyRL reads no more of it."""
    indices = attention_mask.flatten().nonzero().flatten()
    return padded.flatten(0, 1)[indices], indices, None, None, None


def _pad_input(rows: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The rows where they stood, (batch, seqlen, ...), and zeros between them."""
    padded = rows.new_zeros(batch * seqlen, *rows.shape[1:])
    return padded.index_copy(0, indices, rows).view(batch, seqlen, *rows.shape[1:])


def _import_model_wrapper() -> None:
    """It imports two functions of flash attention that need no GPU. The libraries look for the others, too, and are not
    to find them."""
    _ = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, peft.LoraConfig
    padding = types.ModuleType("flash_attn.bert_padding")
    padding.__dict__.update(pad_input=_pad_input, unpad_input=_unpad_input)
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
