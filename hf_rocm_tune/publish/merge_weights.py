"""What a merge does to single weights: PEFT's own arithmetic on one parameter at a time, and transformers' own names.

The model with its adapter stands on the meta device and costs no memory; only the adapter's tensors are real. To merge
one parameter, PEFT's layer is given that weight in float32 and its ``merge`` is called, so scaling, rank patterns,
DoRA's norms and whatever else a method does are PEFT's. A few float32 copies of the largest parameter (all experts of a
layer, where they are one parameter) exist at a time.

Which stored tensors make which parameter is decided by the tables that ``from_pretrained`` itself uses
(``transformers.core_model_loading``, checked with transformers 5.23.0). What comes back from a fusion of stored tensors
and its reversal is compared with what went in by name and shape, so an architecture whose conversion cannot be reverted
is refused. Not covered: what PEFT itself refuses to merge (Arrow, activated LoRA and others that choose by token).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from peft.tuners.lora import layer as lora
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.adapter import NAME

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Site:
    """One parameter that the adapter changes.

    Attributes:
        shape: of its new value.
        merge: from the old value on the host, any float dtype, and a dtype to the new value, a tensor of its own.
        brought: the old value that the adapter's file brings in place of the base's, or None.
    """

    shape: torch.Size
    merge: Callable[[Tensor, torch.dtype], Tensor]
    brought: Tensor | None = None

    def apply(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The new value, of the base's value on the host."""
        return self.merge(weight if self.brought is None else self.brought, dtype)


def find_sites(model: PeftModel) -> dict[str, Site]:
    """Every parameter of the plain model that the attached adapter changes, by name.

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
            sites.update(_sites_of(path, module))
        else:
            sites.update(_brought_parameters(path, module))
    if not sites:
        raise UsageError("the adapter changes no weight of this model: there is nothing to merge")
    return sites


def _sites_of(path: str, module: nn.Module) -> Iterator[tuple[str, Site]]:
    if isinstance(module, ModulesToSaveWrapper):
        for name, parameter in module.modules_to_save[NAME].named_parameters():
            yield f"{path}.{name}", _brought(parameter)
    elif isinstance(module, TrainableTokensWrapper):
        yield f"{path}.weight", _trained_rows(module.token_adapter)
    elif isinstance(module, TrainableTokensLayer):
        yield f"{path}.weight", _trained_rows(module)
    elif isinstance(module, lora.ParamWrapper):  # one for each of the parameters that hold all experts, nested
        inner: Any = module
        while isinstance(inner, lora.ParamWrapper):
            yield f"{path}.{inner.parameter_name}", _by_peft(path, inner, inner.parameter_name)
            inner = inner.base_layer
    elif isinstance(module, BaseTunerLayer):
        owner = module.get_base_layer()
        names = [name for name, _ in owner.named_parameters(recurse=False)]
        if "weight" not in names:
            raise UsageError(f"{path}: a {type(owner).__name__} with {type(module).__name__} cannot be merged")
        if isinstance(module, lora.LoraLayer):
            has_bias = module.lora_bias.get(NAME)
            yield from _brought_parameters(path, owner, but="weight")
            names = ["weight", "bias"] if has_bias and "bias" in names else ["weight"]
        for name in names:
            yield f"{path}.{name}", _by_peft(path, module, name)
    else:
        raise UsageError(f"{path}: a {type(module).__name__} of PEFT cannot be merged")


def _brought_parameters(path: str, module: nn.Module, *, but: str = "") -> Iterator[tuple[str, Site]]:
    """Parameters whose values came with the adapter although they are no adapter's: biases, saved embeddings."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta and name != but:
            yield f"{path}.{name}" if path else name, _brought(parameter)


def _brought(parameter: Tensor) -> Site:
    value = parameter.detach()
    return Site(shape=value.shape, merge=lambda base, dtype: base.to(dtype), brought=value)


def _trained_rows(layer: Any) -> Site:
    """Some rows of an embedding are trained whole (PEFT's trainable tokens)."""
    weight = layer.get_base_layer().weight
    rows = torch.tensor(layer.token_indices[NAME])
    values = layer.trainable_tokens_delta[NAME].detach()

    def merge(base: Tensor, dtype: torch.dtype) -> Tensor:
        return base.to(dtype).index_copy(0, rows, values.to(dtype))

    return Site(shape=weight.shape, merge=merge, brought=None if weight.is_meta else weight.detach())


def _by_peft(path: str, layer: Any, name: str) -> Site:
    """A parameter as PEFT's merge leaves it."""
    owner = layer.get_base_layer()
    before = dict(owner.named_parameters(recurse=False))
    others = {} if isinstance(layer, lora.ParamWrapper) else {n: p for n, p in before.items() if n != name}

    def merge(value: Tensor, dtype: torch.dtype) -> Tensor:
        layer.float()
        for other, empty in others.items():
            setattr(owner, other, nn.Parameter(torch.zeros(empty.shape), requires_grad=False))
        # A copy, never a view of a mapped file: PEFT merges in place.
        own = value.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        setattr(owner, name, nn.Parameter(own, requires_grad=False))
        try:
            with torch.no_grad():
                layer.merge(safe_merge=False, adapter_names=[NAME])  # the caller looks for values that are not finite
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise UsageError(f"PEFT cannot merge {path}: {' '.join(str(error).split())}") from error
        layer.merged_adapters.clear()
        if layer.get_base_layer() is not owner:  # LayerNorm tuning puts another module in its place
            raise UsageError(f"{path}: {type(layer).__name__} does not merge into a weight: it is not covered here")
        merged: Tensor = getattr(owner, name).detach().to(dtype)
        for other, empty in before.items():
            setattr(owner, other, empty)
        return merged

    parameter = before[name]
    return Site(shape=parameter.shape, merge=merge, brought=None if parameter.is_meta else parameter.detach())


# ---- names ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Group:
    """Stored tensors that are read together, and the parameters that they make.

    Attributes:
        sources: stored name, and the pattern of the converter that takes it ("" without one), in the order of fusion.
        parameters: names in the model.
        converter: transformers' conversion, or None where the stored tensor is the parameter.
    """

    sources: list[tuple[str, str]] = field(default_factory=list)
    parameters: tuple[str, ...] = ()
    converter: WeightConverter | None = None


class Names:
    """The names of one model's parameters and of the stored tensors.

    Args:
        model: on the meta device, plain.
        stored: names of the tensors in its files.

    Attributes:
        group_of: by stored name; what is no part of the model (rotary tables of old checkpoints) is missing.
        made_by: by parameter.
        ties: parameter and the one that it is tied to, as the configuration has it.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]) -> None:
        self._model = model
        self._parameters: Mapping[str, Tensor] = model.state_dict()
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self.ties: Mapping[str, str] = dict(model.all_tied_weights_keys)
        self.group_of: dict[str, Group] = {}
        self.made_by: dict[str, Group] = {}
        by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        for name in sorted(stored, key=dot_natural_key):
            self._assign(name, by_pattern)
        # Saving reverts exactly the conversions that loading used: some of them add or drop a prefix.
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]

    def _assign(self, stored: str, by_pattern: Mapping[str, WeightConverter]) -> None:
        parameter, pattern = self._renamed(stored)
        if parameter not in self._parameters:
            return
        converter = by_pattern[pattern] if pattern is not None else None
        group = self.made_by.get(parameter)
        if group is None or converter is None:
            targets: tuple[str, ...] = (parameter,)
            if converter is not None:
                first, *_ = converter.target_patterns
                targets = tuple(parameter.replace(first, target) for target in converter.target_patterns)
            group = Group(parameters=targets, converter=converter)
            self.made_by.update(dict.fromkeys(targets, group))
        group.sources.append((stored, pattern or ""))
        self.group_of[stored] = group

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        """As ``convert_and_load_state_dict_in_model`` does it, with its second look at names that are right already."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(stored, self._renamings, self._converters, prefix, self._parameters)
        if name not in self._parameters and stored in self._parameters:
            name, pattern = rename_source_key(stored, [], [], prefix, self._parameters)
        return name, pattern

    def stored_name(self, parameter: str) -> str:
        """A name under which a parameter that is not stored can be stored.

        Raises:
            UsageError: transformers would not find it under the name under which it saves it.
        """
        empty = self._parameters[parameter]
        for name in (*revert_weight_conversion(self._model, {parameter: empty}), parameter):
            if self._renamed(name) == (parameter, None):
                return name
        raise UsageError(f"{parameter} cannot be stored beside the weight that it is tied to in this architecture")

    def change(
        self, group: Group, tensors: Mapping[str, Tensor], apply: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Fuse stored tensors, change the parameters that they make, and take them apart again.

        Args:
            group: one with a converter.
            tensors: its stored tensors by name.
            apply: makes the new value of a parameter from its name and value.

        Raises:
            UsageError: transformers cannot revert this conversion.
        """
        converter: Any = deepcopy(group.converter)
        for name, pattern in group.sources:
            converter.add_tensor(group.parameters[0], name, pattern, tensors[name])
        fused = converter.convert(group.parameters[0], model=self._model, config=self._model.config)
        stored: dict[str, Tensor] = {}
        if set(fused) == set(group.parameters):
            changed = {}
            for name in group.parameters:
                value = fused.pop(name)
                changed[name] = apply(name, value[0] if isinstance(value, list) else value)
                del value
            stored = revert_weight_conversion(self._model, changed)
        if {name: tensor.shape for name, tensor in stored.items()} != {k: v.shape for k, v in tensors.items()}:
            raise UsageError(
                f"{group.parameters[0]} is stored as {len(group.sources)} tensors, and transformers "
                f"{transformers.__version__} cannot take it apart into the same again: load base and adapter with "
                "PEFT, merge_and_unload() and save_pretrained() instead"
            )
        return stored


def meta_model(directory: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture of a model directory, without memory for its weights.

    Raises:
        UsageError: this transformers has no such architecture.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{directory}: {first}") from error
    name = (config.architectures or [None])[0]
    architecture = getattr(transformers, name or "", None)
    with torch.device("meta"):
        if architecture is not None:
            model: PreTrainedModel = architecture._from_config(config)
            return model
        try:
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise UsageError(
                f"transformers {transformers.__version__} has no architecture {name}: if its code is in the model's "
                "directory and you trust it, add --trust_remote_code"
            ) from error
