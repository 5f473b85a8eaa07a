"""The policy: a small causal transformer over characters, and how it speaks.

Owns the network, sampling, and the weights' file. The file carries its version and is replaced whole, so a reader gets
one version or the next, never a mixture.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from game import ALPHABET, END, PAD, REPLY_CHARACTERS

WIDTH = 64
LAYERS = 2
HEADS = 4
MAX_LENGTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, visible: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        heads = self.projections(self.attention_norm(hidden)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        hidden = hidden + self.merge(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        fed: Tensor = self.feed(self.feed_norm(hidden))
        return hidden + fed


class Policy(nn.Module):
    """Computes logits over the characters that a reply may have, which are the first of the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(REPLY_CHARACTERS))

    def forward(self, sequences: Tensor, visible: Tensor, position_ids: Tensor) -> Tensor:
        """Logits (rows, length, reply characters). visible: bool (rows, length, length), which characters each sees."""
        hidden = self.tokens(sequences) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, visible[:, None])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def causal(attention_mask: Tensor) -> Tensor:
    """Return the causal mask of left-padded rows, (rows, length, length): each sees itself and earlier ones."""
    length = attention_mask.shape[1]
    before = torch.ones(length, length, dtype=torch.bool).tril()
    diagonal = torch.eye(length, dtype=torch.bool)  # padding sees itself, else its softmax would be NaN
    return (before & attention_mask.bool()[:, None, :]) | diagonal


def next_logprobs(logits: Tensor, sequences: Tensor) -> Tensor:
    """Return (rows, length): at each position the logprob of the token that follows it; 0 at the last.

    Characters that a reply cannot have are the environment's: their value means nothing, and the loss masks them.
    """
    following = sequences[:, 1:].clamp(max=len(REPLY_CHARACTERS) - 1)
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, following[..., None])[..., 0]
    return functional.pad(logprobs, (0, 1))


def entropies(logits: Tensor) -> Tensor:
    """Return (rows, length): the entropy of the next token at each position."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@dataclass(frozen=True, slots=True)
class Reply:
    tokens: list[int]
    logprobs: list[float]


@torch.no_grad()
def speak(policy: Policy, contexts: list[list[int]], max_tokens: int, generator: torch.Generator) -> list[Reply]:
    """Sample a reply to each context, up to the end token or `max_tokens`."""
    width = max(len(context) for context in contexts)
    sequences = torch.tensor([[PAD] * (width - len(context)) + context for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    replies = [Reply([], []) for _ in contexts]
    for _ in range(max_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logprobs = policy(sequences, causal(mask), positions)[:, -1].log_softmax(-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
        spoken = chosen[:, 0].tolist(), logprobs.gather(1, chosen)[:, 0].tolist()
        for reply, token, logprob in zip(replies, *spoken, strict=True):
            if END not in reply.tokens:
                reply.tokens.append(token)
                reply.logprobs.append(logprob)
        sequences, mask = torch.cat([sequences, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
    return replies


def save_weights(policy: Policy, version: int, path: Path) -> None:
    unfinished = path.with_suffix(".unfinished")
    save_file(policy.state_dict(), unfinished, metadata={"version": str(version)})
    os.replace(unfinished, path)


def load_weights(policy: Policy, path: Path) -> int:
    """Load the file's weights into the policy and return their version."""
    with safe_open(path, framework="pt") as file:
        policy.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return int(file.metadata()["version"])
