"""4-bit weights on the meta device: the layers that transformers would make 4-bit, with the state they would have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError

BLOCK = 64  # weights that share a quantisation constant: bitsandbytes' default
BLOCK_OF_CONSTANTS = 256
CODES, CONSTANT_CODES = 16, 256


def quantise(base: Any, *, nested: bool, dtype: torch.dtype) -> list[str]:
    """Makes a model's linear layers 4-bit (NF4), in place.

    Args:
        base: a causal language model on the meta device.
        nested: the quantisation constants are quantised too.
        dtype: in which the layers compute.

    Returns:
        What a reader should know: weights of linear maps that stay as they are.

    Raises:
        UsageError: nothing in it can be quantised.
    """
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype=dtype
    )
    replace_with_bnb_linear(base, get_keys_to_not_convert(base), settings)
    base.is_loaded_in_4bit = True
    base.is_quantized = True
    layers = [module for module in base.modules() if type(module).__name__ == "Linear4bit"]
    if not layers:
        raise UsageError(f"{type(base).__name__} has no linear layer that bitsandbytes quantises: give --method lora")
    with torch.device("meta"):
        for layer in layers:
            _pack(layer, nested, dtype)
    experts = any(parameter.ndim == 3 and "expert" in name for name, parameter in base.named_parameters())
    return ["the experts' weights are no linear layers: bitsandbytes does not quantise them"] if experts else []


def state_tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a quantisation state, nested ones included."""
    yield from (each for each in (state.absmax, state.code, state.offset) if isinstance(each, Tensor))
    if state.state2 is not None:
        yield from state_tensors(state.state2)


def _pack(module: Any, nested: bool, dtype: torch.dtype) -> None:
    """Gives a 4-bit layer the weight and the state that quantising would give it."""
    import bitsandbytes

    make = bitsandbytes.functional.QuantState
    shape = torch.Size((module.out_features, module.in_features))
    blocks = -(-shape.numel() // BLOCK)
    constants = offset = None
    absmax = torch.empty(blocks)
    if nested:
        outer = torch.empty(-(-blocks // BLOCK_OF_CONSTANTS))
        codes = torch.empty(CONSTANT_CODES)
        constants = make(absmax=outer, code=codes, blocksize=BLOCK_OF_CONSTANTS, dtype=torch.float32)
        absmax, offset = torch.empty(blocks, dtype=torch.uint8), torch.empty(())
    state = make(
        absmax=absmax,
        shape=shape,
        code=torch.empty(CODES),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=offset,
        state2=constants,
    )
    module.weight = bitsandbytes.nn.Params4bit(
        torch.empty((-(-shape.numel() // 2), 1), dtype=torch.uint8),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=nested,
        quant_type="nf4",
        bnb_quantized=True,
        module=module,
    )
    module.quant_state = state
