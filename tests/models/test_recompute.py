"""Layers recomputed whole or but for products and attention: the same gradients, bit for bit, and less kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.recompute import contexts, enable, layers_of, recompute
from tests.small_models import SMALL

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

WIDE = {**SMALL, "hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "model_type": "llama"},
    # all of its dropout draws random numbers, that of attention too
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 160,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def _model(name: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(MODELS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    settings = LoraConfig(
        r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    return get_peft_model(model, settings).train()


@contextmanager
def _kept() -> Iterator[list[int]]:
    """Bytes that autograd has been given to keep, each storage once; what a context keeps beside it does not count."""
    seen: dict[int, Tensor] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        if seen.setdefault(tensor.untyped_storage().data_ptr(), tensor) is tensor:
            total[0] += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def _step(model: nn.Module, *, autocast: bool) -> tuple[Tensor, list[Tensor | None], int]:
    ids = torch.arange(64).reshape(2, 32)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), _kept() as kept:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients, kept[0]


@pytest.mark.parametrize(("name", "autocast"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_gradients_are_those_of_a_step_that_keeps_all(name: str, autocast: bool) -> None:
    model = _model(name)
    base: Any = model.get_base_model()
    loss, gradients, most = _step(model, autocast=autocast)
    enable(base)
    for counts in ((1, 1), (0, 3), (3, 0), (0, 1)):
        recompute(model, counts)
        again, others, kept = _step(model, autocast=autocast)
        assert torch.equal(loss, again), counts
        for one, other in zip(gradients, others, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), counts
        assert kept < most


def test_products_and_attention_are_not_computed_again() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    wide, narrow = torch.randn(160, 160), torch.randn(16, 160)

    def layer(x: Tensor) -> Tensor:
        product = nn.functional.silu(x @ wide)
        heads = product.view(1, 4, 8, 40)
        attention = nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(8, 160)
        return nn.functional.silu(attention + product[:, :16] @ narrow)

    x = torch.randn(8, 160, requires_grad=True)
    with Count() as first:
        layer(x)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    with Count() as again:
        y.sum().backward()
    assert first.calls.count("mm") == 2 and "_scaled_dot_product_flash_attention_for_cpu" in first.calls
    assert "_scaled_dot_product_flash_attention_for_cpu" not in again.calls
    # the narrow product again, and the gradients: of the input only, since no weight wants one
    assert again.calls.count("mm") == 1 + 2
    assert again.calls.count("silu") >= 1


def test_more_layers_than_there_are_cannot_be_recomputed() -> None:
    model = _model("llama")
    assert len(layers_of(model)) == 3
    with pytest.raises(UsageError, match="this model can recompute 3"):
        recompute(model, (2, 2))
