"""Trainers with context parallelism in plain torch, in float64: a dense and a mixture-of-experts model on four
processes (two data-parallel ranks of two context-parallel ranks each), and one process that trains whole rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from gristmill.torch import MicroBatch, load_shard

VOCABULARY, WIDTH, LONGEST, EXPERTS = 23, 16, 256, 4
DP_SIZE, CP_SIZE = 2, 2
Gather = Callable[[torch.Tensor], torch.Tensor]


class Gathered(torch.autograd.Function):
    """Puts each rank's values at its positions of the whole token axis; a value's gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, positions: torch.Tensor, tokens: int, group: Any) -> torch.Tensor:
        ctx.positions, ctx.group = positions, group
        whole = values.new_zeros(tokens, *values.shape[1:])
        whole[positions] = values
        distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = gradients[0].clone()
        distributed.all_reduce(whole, group=ctx.group)
        return whole[ctx.positions], None, None, None


class Transformer(torch.nn.Module):
    """Two causal attention layers, each with a feed-forward network, or with experts of which a token takes two."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(LONGEST, WIDTH)
        self.attention = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.routers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, experts) for _ in range(2))
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, experts * WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, gather: Gather) -> Any:
        """Logits after each token, (queries, vocabulary). mask: bool (queries, keys). gather: the keys of all ranks."""
        hidden = self.tokens(tokens.long()) + self.positions(positions)
        for attention, router, experts in zip(self.attention, self.routers, self.experts, strict=True):
            query, keys = attention(hidden).split([WIDTH, 2 * WIDTH], dim=-1)
            key, value = gather(keys).chunk(2, dim=-1)
            weights = (query @ key.T / WIDTH**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
            hidden = hidden + weights @ value
            scores = router(hidden)
            chosen = scores.topk(min(2, scores.shape[-1]), dim=-1)
            gates = torch.zeros_like(scores).scatter(-1, chosen.indices, chosen.values.softmax(-1))
            outputs = torch.tanh(experts(hidden)).view(len(hidden), -1, WIDTH)
            hidden = hidden + (gates.unsqueeze(-1) * outputs).sum(1)
        return self.head(hidden)


def loss_of(model: Transformer, micro: MicroBatch, group: Any = None) -> torch.Tensor:
    """The clipped loss of a rank's tokens, or of all tokens."""
    if micro.is_tree:
        mask, tokens = micro.tree.mask, len(micro.tree)
    else:
        edges = micro["cu_seqlens_padded" if micro.is_cut else "cu_seqlens"].long()
        tokens, rows = int(edges[-1]), torch.arange(len(edges) - 1).repeat_interleave(edges.diff())
        places = torch.arange(tokens)
        mask = (rows[:, None] == rows[None, :]) & (places[None, :] <= places[:, None])
        mask = mask[micro["query_positions"].long()] if micro.is_cut else mask

    def gather(keys: torch.Tensor) -> torch.Tensor:
        if not micro.is_cut:
            return keys
        whole: torch.Tensor = Gathered.apply(  # type: ignore[no-untyped-call]
            keys, micro["query_positions"].long(), tokens, group
        )
        return whole

    logprobs = micro.logprobs(model(micro["sequences"], micro.position_ids(), mask, gather))
    ratio, advantages = torch.exp(logprobs - micro["rollout_logprobs"].double()), micro["advantages"].double()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -torch.where(micro["loss_mask"] != 0, gain, torch.zeros_like(gain)).sum()


def trained(
    shards: Iterator[Path], experts: int, cp_rank: int | None = None, group: Any = None
) -> tuple[float, list[torch.Tensor]]:
    """The loss of the shards, and its gradients."""
    model, total = Transformer(experts), 0.0
    for path in shards:
        for micro in load_shard(path, cp_rank=cp_rank).micro_batches():
            loss = loss_of(model, micro, group)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
    return total, [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]


def train(process: int, rendezvous: str, kinds: list[str], experts: list[int], answers: Any) -> None:
    """One of the four processes: trains its part of each kind of shards. Process 0 answers with the sums of all."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=process, world_size=DP_SIZE * CP_SIZE
    )
    try:
        dp_rank, cp_rank = divmod(process, CP_SIZE)
        groups = [distributed.new_group([rank * CP_SIZE + at for at in range(CP_SIZE)]) for rank in range(DP_SIZE)]
        for directory in kinds:
            for count in experts:
                paths = sorted(Path(directory).glob(f"*/rank-{dp_rank:03d}.safetensors"))
                loss, gradients = trained(iter(paths), count, cp_rank, groups[dp_rank])
                sums = [torch.tensor(loss, dtype=torch.float64), *gradients]
                for one in sums:
                    distributed.all_reduce(one)
                if process == 0:
                    answers.put((directory, count, [one.flatten().tolist() for one in sums]))
    finally:
        distributed.destroy_process_group()
