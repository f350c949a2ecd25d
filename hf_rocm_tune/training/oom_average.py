"""Gradients averaged over the ranks after backward instead of during it.

DistributedDataParallel averages in the last backward of a step. A rank that runs out of memory there leaves the others
waiting in an average that it never joins, and what has begun on the device cannot be taken back. So every backward is
local (``no_sync``), and when all ranks have said that theirs are complete, a backward of its own that computes nothing
sets off the same machinery: buckets, communication hooks, and unused parameters as ever, bit for bit the same averages.
At that time all activations are freed, so this is where memory is least short.

Cost: the averaging no longer overlaps with the last backward of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune import upstream


def averager(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that averages the gradients of a model as it is trained; None where none does.

    Also None for one whose graph was declared static, which counts the gradients of the first backward itself, and for
    torch.compile's own reducer.
    """
    wrapped = getattr(model, "_orig_mod", model)  # torch.compile stands around DistributedDataParallel
    if not isinstance(wrapped, DistributedDataParallel) or wrapped.static_graph or wrapped._use_python_reducer:
        return None
    upstream.resolve("ddp_post_forward")
    return wrapped


def average(model: DistributedDataParallel) -> None:
    """Average the gradients that lie in the parameters, in place. Collective.

    The buckets that it fills were allocated with the model; what a communication hook allocates is the hook's affair.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.find_unused_parameters:
        trained = [parameter for parameter in trained if parameter.grad is not None] or trained
    model.reducer.prepare_for_forward()
    model._post_forward(_Touch.apply(*trained)).backward()
    model.reducer._rebuild_buckets()  # else in the next forward, where memory is short


class _Touch(torch.autograd.Function):
    """A scalar that depends on parameters, and gives none of them a gradient: their hooks run, nothing is added."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        nothing: Sequence[None] = (None,) * ctx.count
        return nothing
