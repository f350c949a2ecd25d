"""Which parameters of the base an adapter changes, and their merged values: PEFT's own arithmetic, a slab at a time.

The model with its adapter stands on the meta device and costs no memory; only the adapter's tensors are real, as views
of their file. To merge one parameter, PEFT's layer is given a slab of the weight in float32 and the part of the adapter
that belongs to it, and its ``merge`` is called. So scaling, rank patterns, DoRA's norms and whatever else a method does
are PEFT's, and no float32 copy is larger than a slab. A row of a LoRA or DoRA layer's weight depends on that row alone,
which is what allows the slabs; other methods are merged a whole layer at a time.

Not covered: what PEFT itself refuses to merge (Arrow, activated LoRA and other methods that choose for each token).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.merge_attach import NAME

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

SLAB_ELEMENTS = 1 << 20
"""Elements of a weight that are merged at a time: 4 MiB in float32, of which a handful exist at once."""

Apply = Callable[["Tensor", torch.dtype], "Tensor"]
"""From the base's value on the host, any float dtype, and a dtype to the merged value, a tensor of its own."""

ApplyPart = Callable[["Tensor", torch.dtype, int], "Tensor"]

_Narrow = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How a layer is merged in slabs.

    Attributes:
        axis: of the weight, along which it is cut.
        narrow: leaves on the layer only the part of its adapter that belongs to [start, stop) along the axis.
        least: PEFT needs so many at a time; a slab of one is then merged twice, side by side.
    """

    axis: int
    narrow: _Narrow
    least: int = 1


@dataclass(frozen=True, kw_only=True)
class Site:
    """One parameter that the adapter changes.

    Attributes:
        name: of the parameter in the plain model.
        shape: of its value.
        apply: gives the merged value.
        brought: the value that the adapter's file brings in place of the base's, or None.
        apply_part: the same of some experts of a parameter that holds them all, from the given one on; None where the
            parameter cannot be merged in parts.
    """

    name: str
    shape: torch.Size
    apply: Apply
    brought: Tensor | None = None
    apply_part: ApplyPart | None = None


def find_sites(model: PeftModel) -> dict[str, Site]:
    """Every parameter of the plain model that the attached adapter changes, by name.

    Args:
        model: the base on the meta device, with the adapter's tensors on the host.

    Raises:
        UsageError: the adapter changes nothing, or something that cannot be merged.
    """
    sites: dict[str, Site] = {}
    inside: list[str] = []
    for path, module in model.base_model.model.named_modules():
        if path.startswith(tuple(inside)):
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inside.append(f"{path}.")
            found = _sites_of(path, module)
        else:
            found = _brought_parameters(path, module)
        sites.update((site.name, site) for site in found)
    if not sites:
        raise UsageError("the adapter changes no weight of this model: there is nothing to merge")
    return sites


def _sites_of(path: str, module: nn.Module) -> Iterator[Site]:
    if isinstance(module, ModulesToSaveWrapper):
        for name, parameter in module.modules_to_save[NAME].named_parameters():
            yield _brought(f"{path}.{name}", parameter)
    elif isinstance(module, TrainableTokensWrapper):
        yield _trained_rows(path, module.token_adapter)
    elif isinstance(module, TrainableTokensLayer):
        yield _trained_rows(path, module)
    elif isinstance(module, lora.ParamWrapper):
        inner: Any = module
        while isinstance(inner, lora.ParamWrapper):
            yield _fused_parameter(path, inner)
            inner = inner.base_layer
    elif isinstance(module, lora.LoraLayer):
        yield from _lora_layer(path, module)
    elif isinstance(module, BaseTunerLayer):
        yield from _whole_layer(path, module)
    else:
        raise UsageError(f"{path}: a {type(module).__name__} of PEFT cannot be merged")


# ---- what the file brings whole -----------------------------------------------------------------------------


def _brought_parameters(path: str, module: nn.Module, *, but: str = "") -> Iterator[Site]:
    """Parameters whose values came with the adapter although they are no adapter's: biases, saved embeddings."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta and name != but:
            yield _brought(f"{path}.{name}" if path else name, parameter)


def _brought(name: str, parameter: Tensor) -> Site:
    value = parameter.detach()
    return Site(name=name, shape=value.shape, apply=lambda base, dtype: base.to(dtype), brought=value)


def _value_of(parameter: Tensor) -> Tensor | None:
    return None if parameter.is_meta else parameter.detach()


def _trained_rows(path: str, layer: Any) -> Site:
    """Some rows of an embedding are trained whole (PEFT's trainable tokens)."""
    owner = layer.get_base_layer()
    rows = torch.tensor(layer.token_indices[NAME])
    values = layer.trainable_tokens_delta[NAME].detach()

    def apply(weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).index_copy(0, rows, values.to(dtype))

    return Site(name=f"{path}.weight", shape=owner.weight.shape, apply=apply, brought=_value_of(owner.weight))


# ---- LoRA and DoRA, in slabs ------------------------------------------------------------------------------------


def _lora_layer(path: str, layer: Any) -> Iterator[Site]:
    owner = layer.get_base_layer()
    if NAME in layer.lora_B and layer.lora_bias.get(NAME):
        yield _lora_bias(path, owner, layer.lora_B[NAME].bias.detach(), layer.scaling[NAME])
        layer.lora_bias[NAME] = False  # PEFT would look for the bias beside each slab of the weight
    cut = _cut_of(layer)
    if cut is None:
        yield from _whole_layer(path, layer)
        return

    def apply(weight: Tensor, dtype: torch.dtype) -> Tensor:
        return _merge_slabs(layer, owner, "weight", weight, dtype, cut)

    yield Site(name=f"{path}.weight", shape=owner.weight.shape, apply=apply, brought=_value_of(owner.weight))
    yield from _brought_parameters(path, owner, but="weight")


def _lora_bias(path: str, owner: Any, up_bias: Tensor, scaling: float) -> Site:
    if getattr(owner, "bias", None) is None:
        raise UsageError(f"{path} has no bias, but the adapter (lora_bias=True) adds one: it cannot be merged")

    def apply(bias: Tensor, dtype: torch.dtype) -> Tensor:
        return (bias.float() + up_bias.float() * scaling).to(dtype)  # PEFT 0.21.2, lora.Linear.merge

    return Site(name=f"{path}.bias", shape=up_bias.shape, apply=apply, brought=_value_of(owner.bias))


def _cut_of(layer: Any) -> _Cut | None:
    """How this layer can be merged in slabs; None where it cannot."""
    variant = type(layer.lora_variant.get(NAME))
    if type(layer) is lora.Linear and variant in (type(None), DoraLinearVariant):
        return _Cut(axis=1 if layer.fan_in_fan_out else 0, narrow=_cut_rows(layer))
    if type(layer) is lora.Embedding and variant is type(None):
        return _Cut(axis=0, narrow=_cut_tokens(layer))
    if type(layer) is lora.Embedding and variant is DoraEmbeddingVariant:
        return _Cut(axis=1, narrow=_cut_features(layer))
    return None


def _cut_rows(layer: Any) -> _Narrow:
    down, up = layer.lora_A[NAME], layer.lora_B[NAME]
    downs, ups = down.weight.detach(), up.weight.detach()
    magnitude = dict(layer.lora_magnitude_vector).get(NAME)
    norms = magnitude.weight.detach() if magnitude is not None else None

    def narrow(start: int, stop: int) -> None:
        down.weight, up.weight = _float(downs), _float(ups[start:stop])
        if magnitude is not None and norms is not None:
            magnitude.weight = _float(norms[start:stop])

    return narrow


def _cut_tokens(layer: Any) -> _Narrow:
    down, up = layer.lora_embedding_A, layer.lora_embedding_B
    downs, ups = down[NAME].detach(), up[NAME].detach()

    def narrow(start: int, stop: int) -> None:
        down[NAME], up[NAME] = _float(downs[:, start:stop]), _float(ups)

    return narrow


def _cut_features(layer: Any) -> _Narrow:
    """DoRA takes the norms of an embedding's columns, so its slabs are columns."""
    down, up, magnitude = layer.lora_embedding_A, layer.lora_embedding_B, layer.lora_magnitude_vector[NAME]
    downs, ups, norms = down[NAME].detach(), up[NAME].detach(), magnitude.weight.detach()

    def narrow(start: int, stop: int) -> None:
        down[NAME], up[NAME] = _float(downs), _float(ups[start:stop])
        magnitude.weight = _float(norms[start:stop])

    return narrow


# ---- parameters that hold all experts -----------------------------------------------------------------------


def _fused_parameter(path: str, layer: Any) -> Site:
    owner, name = layer.get_base_layer(), layer.parameter_name
    parameter = getattr(owner, name)
    if parameter.ndim == 2:
        cut = _Cut(axis=0, narrow=_cut_rows(layer))
    else:
        cut = _cut_experts(layer) if layer.num_experts > 1 else _Cut(axis=0, narrow=_cut_nothing(layer))

    def apply(weight: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
        return _merge_slabs(layer, owner, name, weight, dtype, cut, first)

    brought = _value_of(parameter)
    by_expert = apply if layer.num_experts > 1 and brought is None else None
    return Site(name=f"{path}.{name}", shape=parameter.shape, apply=apply, brought=brought, apply_part=by_expert)


def _cut_experts(layer: Any) -> _Cut:
    """PEFT keeps ``lora_A`` as (experts x rank, in) and ``lora_B`` as (out, rank x experts).

    One expert alone it would take for a plain matrix, whichever way its experts lie, so there are always two.
    """
    down, up = layer.lora_A[NAME], layer.lora_B[NAME]
    downs = down.weight.detach().unflatten(0, (layer.num_experts, -1))
    ups = up.weight.detach().unflatten(1, (-1, layer.num_experts))

    def narrow(start: int, stop: int) -> None:
        experts = [start, start] if stop - start == 1 else list(range(start, stop))
        layer.num_experts = len(experts)
        down.weight = _float(downs[experts].flatten(0, 1))
        up.weight = _float(ups[:, :, experts].flatten(1, 2))

    return _Cut(axis=0, narrow=narrow, least=2)


def _cut_nothing(layer: Any) -> _Narrow:
    down, up = layer.lora_A[NAME], layer.lora_B[NAME]
    downs, ups = down.weight.detach(), up.weight.detach()

    def narrow(start: int, stop: int) -> None:
        assert (start, stop) == (0, 1), "there is but one expert"
        down.weight, up.weight = _float(downs), _float(ups)

    return narrow


# ---- the merge itself -------------------------------------------------------------------------------------------


def _merge_slabs(
    layer: Any, owner: nn.Module, name: str, weight: Tensor, dtype: torch.dtype, cut: _Cut, first: int = 0
) -> Tensor:
    """PEFT's ``merge`` on slabs of ``weight``, in float32, into a new tensor of ``dtype``.

    ``first`` is where ``weight`` begins along the axis of the cut, when it is a part of the parameter.
    """
    merged = torch.empty(weight.shape, dtype=dtype)
    axis, length = cut.axis, weight.shape[cut.axis]
    step = max(cut.least, SLAB_ELEMENTS * length // max(weight.numel(), 1))
    before = getattr(owner, name)
    for start in range(0, length, step):
        size = min(step, length - start)
        slab = weight.narrow(axis, start, size)
        cut.narrow(first + start, first + start + size)
        setattr(owner, name, _own_float(torch.cat([slab, slab], axis) if size < cut.least else slab))
        _merge(layer)
        done = getattr(owner, name).narrow(axis, 0, size)
        merged.narrow(axis, start, size).copy_(done)  # device: both are on the host
    setattr(owner, name, before)
    return merged


def _whole_layer(path: str, layer: Any) -> Iterator[Site]:
    """Any other method: weight and bias as PEFT's merge leaves them, each merged by itself, the whole at once."""
    owner = layer.get_base_layer()
    before = dict(owner.named_parameters(recurse=False))
    if "weight" not in before:
        raise UsageError(f"{path}: a {type(owner).__name__} with {type(layer).__name__} cannot be merged")

    def apply_to(name: str) -> Apply:
        def apply(value: Tensor, dtype: torch.dtype) -> Tensor:
            layer.float()
            for other, empty in before.items():
                setattr(owner, other, _own_float(value if other == name else torch.zeros(empty.shape)))
            _merge(layer)
            if layer.get_base_layer() is not owner:  # LayerNorm tuning puts another module in its place
                raise UsageError(f"{path}: {type(layer).__name__} does not merge into a weight: it is not covered here")
            merged: Tensor = getattr(owner, name).detach().to(dtype)
            for other, empty in before.items():
                setattr(owner, other, empty)
            return merged

        return apply

    for name, parameter in before.items():
        yield Site(name=f"{path}.{name}", shape=parameter.shape, apply=apply_to(name), brought=_value_of(parameter))


def _merge(layer: Any) -> None:
    try:
        with torch.no_grad():
            # In place: the slab is ours. What PEFT would look at beside that (finite values), the caller does.
            layer.merge(safe_merge=False, adapter_names=[NAME])
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"PEFT cannot merge this adapter: {' '.join(str(error).split())}") from error
    layer.merged_adapters.clear()


def _float(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.float().contiguous(), requires_grad=False)


def _own_float(value: Tensor) -> nn.Parameter:
    """A copy, never a view of a mapped file."""
    copy = value.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=False)
