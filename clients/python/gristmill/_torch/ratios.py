"""Log-ratios of whole sequences and steps, for losses that weigh them as a unit, also after steps were merged."""

from __future__ import annotations

import torch

from gristmill.errors import InvalidArgumentError


def sequence_log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, loss_mask: torch.Tensor, row_edges: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's mean of `logprobs - old_logprobs` over its trained tokens, on each of its tokens.

    The exponential is the sequence's importance ratio of GSPO (arXiv:2507.18071, equation 7). If steps are merged, a
    row is all of its steps; `segment_log_ratio` keeps them apart.

    logprobs, old_logprobs, loss_mask: (rows, tokens), or (tokens,) with `row_edges`, which is `micro.row_edges`.
    Differentiable. float32, or float64 if a log-probability is. 0 for rows without a trained token. Values where
    `loss_mask` is 0 are ignored. Raises InvalidArgumentError that names the shapes.
    """
    return _mean_per_run(logprobs, old_logprobs, loss_mask, _row_begins(logprobs, row_edges))


def segment_log_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    token_step: torch.Tensor,
    row_edges: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each step's mean of `logprobs - old_logprobs` over its trained tokens, on each of the step's tokens.

    The exponential is ROLL's importance ratio of a segment (arXiv:2506.06122), and that of GSPO if each step counts as
    a sequence. The same for merged rows and for rows of one step each. 0 on observations.

    token_step: the shard's tensor, with `token_step: true`. The rest is as in `sequence_log_ratio`.

        ratio = segment_log_ratio(logprobs, old, micro["loss_mask"], micro["token_step"], micro.row_edges).exp()
    """
    begins = _row_begins(logprobs, row_edges)
    _check_shape("token_step", token_step, logprobs)
    begins[..., 1:] |= token_step[..., 1:] != token_step[..., :-1]
    return _mean_per_run(logprobs, old_logprobs, loss_mask, begins)


def _row_begins(logprobs: torch.Tensor, row_edges: torch.Tensor | None) -> torch.Tensor:
    """Return whether a row begins at each token; bool, in the shape of `logprobs`."""
    if (logprobs.ndim == 1) != (row_edges is not None):
        raise InvalidArgumentError(
            f"logprobs has shape {tuple(logprobs.shape)}, and row_edges is {'absent' if row_edges is None else 'given'}"
            "; pass micro.row_edges, which is None for padded rows"
        )
    begins = torch.zeros_like(logprobs, dtype=torch.bool)
    begins[..., 0 if row_edges is None else row_edges[:-1].long()] = True
    return begins


def _mean_per_run(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, loss_mask: torch.Tensor, begins: torch.Tensor
) -> torch.Tensor:
    """begins: bool, whether a run of tokens with a common mean begins at each token."""
    _check_shape("old_logprobs", old_logprobs, logprobs)
    _check_shape("loss_mask", loss_mask, logprobs)
    trained = (loss_mask != 0).flatten()
    log_ratio = (logprobs - old_logprobs).flatten()
    log_ratio = log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32))
    # Log-probabilities may be NaN where nothing is trained, and their product with 0 would still be NaN.
    log_ratio = torch.where(trained, log_ratio, torch.zeros_like(log_ratio))
    # There are at most as many runs as tokens. Counting them would wait for the device.
    run = begins.flatten().cumsum(0) - 1
    zeros = torch.zeros_like(log_ratio)
    counts = zeros.index_add(0, run, trained.to(log_ratio.dtype)).clamp(min=1)
    return (zeros.index_add(0, run, log_ratio) / counts)[run].view(logprobs.shape)


def _check_shape(name: str, values: torch.Tensor, logprobs: torch.Tensor) -> None:
    if values.shape != logprobs.shape:
        raise InvalidArgumentError(
            f"{name} has shape {tuple(values.shape)}, but logprobs has {tuple(logprobs.shape)}; pass tensors of the "
            "same tokens"
        )
