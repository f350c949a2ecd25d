"""The loss of models that TRL's fused loss does not fit: BERT's relatives, ModernBERT's decoder, Llama 4.

It asks a model's backbone for hidden states and multiplies them with the matrix of the output head. What a model has
between the two, a dense layer and a norm, it would leave out, so that another model's loss were learned; of a model
that names no backbone it gets none. Here the model's own forward computes all logits, and the loss is taken from these.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import listed

_IGNORED_LABEL = -100  # torch's, of a token that is not in the loss


def why_own_head(model: Any) -> str:
    """Why TRL's fused loss does not fit a causal language model; empty: it does."""
    backbone = getattr(model, "base_model", model)
    if backbone is model:
        return "it names no backbone"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return ""
    used = {id(parameter) for part in (backbone, head) for parameter in part.parameters()}
    left_out = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    if not left_out:
        return ""
    return f"{listed(left_out)} would be left out"


def output_head(model: nn.Module) -> Any:
    """The layer that makes a model's logits: the one that it names or, where it names none, that of its language model
    (Nemotron H Omni); None: it has none."""
    for part in model.modules():
        head = getattr(part, "get_output_embeddings", lambda: None)()
        if head is not None:
            return head
    return None


def use_own_head(model: nn.Module) -> None:
    """Makes a model that TRL has given its fused loss compute this loss from its own logits, at temperature 1."""
    stock: Any = model.forward
    takes_embeddings = "inputs_embeds" in inspect.signature(type(model).forward).parameters

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None, **more: Any
    ) -> Any:
        if not takes_embeddings and more.get("inputs_embeds") is None:
            more.pop("inputs_embeds", None)  # PEFT hands on that there are none, and BLIP would hand it on twice
        if not fused_lm_head:
            if labels is not None:
                more["labels"] = labels
            if shift_labels is not None:
                more["shift_labels"] = shift_labels
            return stock(*args, **more)
        count = more.pop("num_items_in_batch", None)
        logits = stock(*args, **more).logits
        if shift_labels is None:
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        return _output(logits, shift_labels, count)

    model.forward = MethodType(forward, model)


def _output(logits: Tensor, labels: Tensor, count: Any) -> Any:
    """What TRL's fused loss gives.

    ``logits``: (rows, tokens, vocabulary); ``labels``: int64 (rows, tokens), of the next tokens; ``count``: of the
    tokens in the loss of the whole batch, None: those here.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels != _IGNORED_LABEL
    if count is None:
        count = mask.sum().clamp(min=1)
    logarithms = torch.log_softmax(logits.float(), dim=-1)
    chosen = logarithms.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    log_probs = chosen.masked_fill(~mask, 0)
    with torch.no_grad():
        entropy = -(logarithms.exp() * logarithms).sum(dim=-1)
        squares = torch.logsumexp(2 * logarithms, dim=-1)
        means = logits.float().mean(dim=-1)
        first = logits.argmax(dim=-1) == labels
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / count,
        log_probs=log_probs,
        entropy=entropy.masked_fill(~mask, 0),
        log_sum_sq_probs=squares.masked_fill(~mask, 0),
        mean_logits=means.masked_fill(~mask, 0),
        is_top1=first & mask,
        label_mask=mask,
    )
