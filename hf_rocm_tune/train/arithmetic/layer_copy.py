"""A layer of a model on the host in float32, as plain torch modules: quantised weights are dequantised there.

Adapters, biases and norms are its own copies. Of a layer whose kernels have no version for the host, the first
operation raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.models import experts
from hf_rocm_tune.models.quantised import host_weight
from hf_rocm_tune.models.tensors import places_of
from hf_rocm_tune.train.arithmetic.rounding import Rounding

ATTENTION = ("eager", "sdpa")
"""Attention functions that compute on a host."""


class EightBit(nn.Linear):
    """A linear layer whose input an 8-bit product would round to 1/127 of each row's largest value.

    Attributes:
        rounding: rounds it so; None: it is not rounded.
    """

    rounding: Rounding | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.rounding is not None:
            input = input + self.rounding.uniform(input, 1 / 127) * input.abs().amax(-1, keepdim=True)
        return super().forward(input)


class LayerCopy:
    """Takes the bytes of a layer's tensors at once; `build`, which another thread may call, makes the layer of them.

    Args:
        layer: on a device.
        fetch: gives a tensor's bytes on the host, verified.
        computed_in: autocast's dtype, to which it rounds matrices; None: there is no autocast.
    """

    def __init__(self, layer: nn.Module, fetch: Callable[[Tensor], Tensor], computed_in: torch.dtype | None) -> None:
        self._computed_in = computed_in
        self._held: dict[int, Tensor] = {}
        self._unpacked: list[tuple[nn.Linear, Any]] = []
        self._experts: list[tuple[str, str, Any]] = []  # module, key and packed weight
        tensors = [place.find() for place in places_of(layer)]  # all at once: none is freed, and its id used again
        for tensor in tensors:
            if id(tensor) not in self._held:
                self._held[id(tensor)] = _own(fetch(tensor), tensor)
        self._copy: Any = copy.deepcopy(layer, self._stand_ins(layer, fetch))
        for module in self._copy.modules():
            vars(module).pop("forward", None)  # of accelerate's hooks, and of recomputing
            for name in ("_attn_implementation", "_experts_implementation"):
                self._choose_eager(getattr(module, "config", None), name)

    def _stand_ins(self, layer: nn.Module, fetch: Callable[[Tensor], Tensor]) -> dict[int, Any]:
        """What is put in place of tensors, quantised layers and hooks of the original, by id."""
        stand_ins: dict[int, Any] = {}
        packed = {id(module) for _, module in experts.experts_of(layer) if experts.is_packed(module)}
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                if "_hooks" in key:
                    stand_ins[id(value)] = type(value)()
                elif isinstance(value, Tensor):
                    stand_ins[id(value)] = _own(fetch(value), value)
            for key, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                held = self._held.get(id(value), value)
                if isinstance(value, nn.Parameter):
                    held = nn.Parameter(held, requires_grad=value.requires_grad)
                stand_ins[id(value)] = held
                if id(module) in packed and getattr(value, "quant_state", None) is not None:
                    self._experts.append((name, key, module))
                    stand_ins[id(value)] = nn.Parameter(torch.empty(0), requires_grad=False)
            if id(module) in packed:
                continue
            weight = dict(module.named_parameters(recurse=False)).get("weight")  # not PEFT's, of its base layer
            is_8_bit = weight is not None and type(module).__name__ == "Linear8bitLt"
            is_4_bit = getattr(weight, "quant_state", None) is not None
            if is_8_bit or is_4_bit:
                kind = EightBit if is_8_bit else nn.Linear
                linear = kind(module.in_features, module.out_features, module.bias is not None, device="meta")
                linear.requires_grad_(False)
                self._unpacked.append((linear, module))
                stand_ins[id(module)] = linear
        return stand_ins

    def _choose_eager(self, config: Any, name: str) -> None:
        chosen = getattr(config, name, None)
        if name == "_experts_implementation" and chosen is not None:
            setattr(config, name, "eager")
        elif name == "_attn_implementation" and chosen not in (None, *ATTENTION):
            raise ValueError(f"attention by {chosen} is not computed on a host")

    @property
    def nbytes(self) -> int:
        """Of the layer in float32, once it is built."""
        elements = sum(parameter.numel() for parameter in self._copy.parameters())
        for _, key, module in self._experts:
            elements += getattr(module, key).quant_state.shape.numel()
        return 4 * elements

    def fill_zeros(self, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Give trained matrices that are all zero random values, as LoRA's B; each with its name, on the host.

        Call it before `build`.
        """
        for name, parameter in self._copy.named_parameters():
            if parameter.requires_grad and parameter.dim() == 2 and not parameter.any():
                values = torch.randn(parameter.shape, generator=random) / parameter.shape[1] ** 0.5
                parameter.data = values.to(parameter.dtype)
                yield name, parameter.data

    def build(self) -> nn.Module:
        """The layer, all in float32, without dropout."""

        def held(tensor: Tensor) -> Tensor:
            return self._held[id(tensor)]

        for linear, module in self._unpacked:
            rows = [part for _, part in host_weight(module, torch.float32, held)]
            linear.weight = nn.Parameter(torch.cat(rows), requires_grad=False)
            if module.bias is not None:
                linear.bias = nn.Parameter(held(module.bias).float(), requires_grad=False)
        for name, key, module in self._experts:
            weight = getattr(module, key)
            count, *_, transposed = experts.layout(module, key)
            whole = torch.stack(list(experts.host_weights(weight, range(count), False, torch.float32, held)))
            if module.is_transposed and not transposed:  # MXFP4 is stored the other way round
                whole = whole.mT.contiguous()
            setattr(self._copy.get_submodule(name), key, nn.Parameter(whole, requires_grad=False))
        rounded: set[int] = set()  # the matrices that autocast rounds
        if self._computed_in is not None:
            for module in self._copy.modules():
                if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
                    rounded.add(id(module.weight))
        for module in self._copy.modules():
            for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                if not value.is_floating_point():
                    continue
                if id(value) in rounded:
                    value.data = value.data.to(self._computed_in)
                value.data = value.data.float()
        self._held.clear()
        copied: nn.Module = self._copy.eval()
        return copied


def _own(held: Tensor, tensor: Tensor) -> Tensor:
    """The same in memory of its own: on a CPU the host's tensor is the model's, and what computes may write to it."""
    if held.data_ptr() == tensor.data_ptr():
        return held.clone()
    return held
