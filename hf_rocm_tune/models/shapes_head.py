"""The language model's head and loss as TRL computes them, in what they keep and what they take while they run.

TRL 1.16 never builds the logits of a training batch, with PEFT or without (``trl/trainer/utils.py``,
``add_fused_lm_head``; ``trl/kernels/chunked_logprob.py``): it projects tiles of 4096 tokens by 32768 vocabulary
entries and recomputes them in backward. Its loops cannot run on the meta device, so this is the same sequence of
allocations, written down. Only label smoothing makes TRL build the logits, and then the fused pass runs as well, for
the metrics.

Covered: heads with and without bias, frozen and trained, tied to the embeddings or not; the balancing loss of
mixtures of experts. Not covered: logits that are soft-capped or scaled (a few per-token values more).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.models.shapes_device import autocast_device
from hf_rocm_tune.models.shapes_record import Recorder

TILE_TOKENS = 4096
TILE_WIDTH = 32768
IGNORED = -100
_STATISTICS = 7  # float32 values a token: running maximum, sums, the target's logit


class FusedHead(torch.autograd.Function):
    """Per-token log-probabilities; allocates as TRL's ``ChunkedLogProbFunction`` does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, recorder: Recorder, cpu: bool) -> Tensor:
        """``hidden`` (N, H), ``weight`` (V, H), ``bias`` (V) or None; returns (N,) in float32."""
        ctx.save_for_backward(hidden, weight, bias)
        ctx.recorder, ctx.cpu = recorder, cpu
        tokens = hidden.shape[0]
        statistics = [hidden.new_empty(tokens, dtype=torch.float32) for _ in range(_STATISTICS)]
        _project(hidden, weight, recorder, cpu, _FORWARD_TILES)
        result = hidden.new_empty(tokens, dtype=torch.float32)
        ctx.kept = [hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2)]  # log of the sum, entropy
        del statistics
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients are collected in float32, then cast."""
        hidden, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        sums = [
            torch.empty_like(tensor, dtype=torch.float32) if need else None
            for tensor, need in zip((hidden, weight, bias), wanted, strict=True)
        ]
        _project(hidden, weight, ctx.recorder, ctx.cpu, _BACKWARD_TILES)
        cast = [
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, (hidden, weight, bias), strict=True)
        ]
        return (*cast, None, None)


# How many float32 copies of a tile live at once where Triton is missing, beside one of booleans (`_forward_tile`,
# `_backward_tile`).
_FORWARD_TILES = 3
_BACKWARD_TILES = 7


def _project(hidden: Tensor, weight: Tensor, recorder: Recorder, cpu: bool, copies: int) -> None:
    """The tiles of logits, one at a time."""
    rows, columns = min(hidden.shape[0], TILE_TOKENS), min(weight.shape[0], TILE_WIDTH)
    mixed = torch.is_autocast_enabled(autocast_device("cpu" if cpu else "hip"))
    dtype = torch.bfloat16 if mixed else hidden.dtype
    tile = hidden.new_empty((rows, TILE_WIDTH), dtype=dtype)
    recorder.mark_tile(tile)
    casts = [piece.to(dtype) for piece in (hidden[:rows], weight[:columns])]
    if cpu:
        floats = [hidden.new_empty((rows, columns), dtype=torch.float32) for _ in range(copies)]
        floats.append(hidden.new_empty((rows, columns), dtype=torch.bool))
        for each in floats:
            recorder.mark_tile(each)
    del casts


def loss_of(hidden: Tensor, labels: Tensor, head: nn.Module, recorder: Recorder, *, cpu: bool) -> Tensor:
    """The loss of a batch from the last hidden states, as TRL's fused forward computes it.

    Args:
        hidden: (B, S, H), the backbone's output.
        labels: (B, S), int64.
        head: the output projection.
        recorder: the running recording.
        cpu: without Triton every position is projected, with it only those that have a label: here all have.

    Returns:
        A scalar that requires a gradient.
    """
    states, targets = hidden[:, :-1], labels[:, 1:]
    mask = targets != IGNORED
    if cpu:
        flat = states.reshape(-1, states.shape[-1])
    else:
        flat = _Selected.apply(states)  # `states[mask]`: how many are selected is not known on the meta device
    weight: Any = head.weight
    per_token = FusedHead.apply(flat, weight, getattr(head, "bias", None), recorder, cpu)
    log_probs = per_token.view(mask.shape) * mask
    return -log_probs.sum()


class _Selected(torch.autograd.Function):
    """``states[mask]`` with a mask that is true everywhere: a copy, and int64 positions."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        """(B, S, H) to (B * S, H)."""
        ctx.shape = states.shape
        tokens = states.shape[0] * states.shape[1]
        ctx.positions = [states.new_empty(tokens, dtype=torch.int64) for _ in range(2)]
        return states.new_empty(tokens, states.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Zeros, into which the rows are put."""
        return grad.new_zeros(ctx.shape)


def balancing_loss(router_logits: Sequence[Tensor], config: Any, mask: Tensor | None) -> Tensor:
    """The auxiliary loss of a mixture of experts, by the function that TRL calls.

    Args:
        router_logits: one (B * S, experts) for each layer.
        config: the model's text configuration.
        mask: (B, S) attention mask, or None.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    loss: Tensor = load_balancing_loss_func(tuple(router_logits), experts, config.num_experts_per_tok, mask)
    return loss
