"""Which stored tensors make which parameters of a model, by the tables that ``from_pretrained`` itself uses.

The functions of ``transformers.core_model_loading`` (checked with transformers 5.23.0) rename a stored name, fuse or
split stored tensors, and revert both, as loading and saving do. What comes back from a fusion and its reversal is
compared with what went in by name and shape, so that an architecture whose conversion cannot be reverted is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PART_BYTES = 16 << 20
"""Stored bytes of experts that are fused at a time, where some can be without the others."""

Change = Callable[[str, "Tensor", int], "Tensor"]
"""From a parameter's name, its value or that of some experts, and the number of the first of them, to the new value."""


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
    """The two namings of one model.

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
        self, group: Group, tensors: Mapping[str, Tensor], apply: Change, *, in_parts: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Fuse stored tensors, change the parameters that they make, and take them apart again.

        Args:
            group: one with a converter.
            tensors: its stored tensors by name.
            apply: makes the new value of a parameter, or of some of its experts.
            in_parts: some experts at a time are enough for ``apply``, where the conversion stacks experts.

        Yields:
            Stored name and new tensor.

        Raises:
            UsageError: transformers cannot revert this conversion.
        """
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in group.sources:
            by_pattern.setdefault(pattern, []).append(name)
        count = max(map(len, by_pattern.values()))
        step = _experts_at_a_time(group, tensors, count) if in_parts and _stacks_experts(group, by_pattern) else count
        for start in range(0, count, step):
            here = {name: at for names in by_pattern.values() for at, name in enumerate(names[start : start + step])}
            part = {name: tensors[name] for name, _ in group.sources if name in here}
            # A part is taken apart as if it began with the first expert.
            first = {names[at]: names[start + at] for names in by_pattern.values() for at in range(len(names[start:]))}
            yield from self._changed(group, part, first, partial(_with_start, apply, start))

    def _changed(
        self,
        group: Group,
        part: Mapping[str, Tensor],
        rename: Mapping[str, str],
        apply: Callable[[str, Tensor], Tensor],
    ) -> Iterator[tuple[str, Tensor]]:
        converter: Any = deepcopy(group.converter)
        for name, pattern in group.sources:
            if name in part:
                converter.add_tensor(group.parameters[0], name, pattern, part[name])
        fused = converter.convert(group.parameters[0], model=self._model, config=self._model.config)
        if set(fused) != set(group.parameters):
            raise _irreversible(group)
        changed = {}
        for name in group.parameters:
            value = fused.pop(name)
            changed[name] = apply(name, value[0] if isinstance(value, list) else value)
            del value
        stored = {rename.get(k, k): v for k, v in revert_weight_conversion(self._model, changed).items()}
        if {name: tensor.shape for name, tensor in stored.items()} != {k: v.shape for k, v in part.items()}:
            raise _irreversible(group)
        yield from stored.items()


def _stacks_experts(group: Group, by_pattern: Mapping[str, list[str]]) -> bool:
    """Whether this conversion stacks equally many tensors along a first dimension that nothing else touches."""
    first, *others = group.converter.operations if group.converter is not None else [None]
    untouched = all(
        (isinstance(op, Concatenate) and op.dim != 0) or (isinstance(op, Transpose) and 0 not in (op.dim0, op.dim1))
        for op in others
    )
    stacked = isinstance(first, MergeModulelist) and first.dim == 0 and untouched
    return stacked and len(set(map(len, by_pattern.values()))) == 1 and all("*" in pattern for pattern in by_pattern)


def _experts_at_a_time(group: Group, tensors: Mapping[str, Tensor], count: int) -> int:
    each = sum(tensors[name].nbytes for name, _ in group.sources) // count
    return max(1, min(count, PART_BYTES // max(each, 1)))


def _irreversible(group: Group) -> UsageError:
    return UsageError(
        f"{group.parameters[0]} is stored as {len(group.sources)} tensors, and transformers {_transformers_version()} "
        "cannot take it apart into the same again: load base and adapter with PEFT, merge_and_unload() and "
        "save_pretrained() instead"
    )


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def meta_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The architecture that a configuration names, without memory for its weights.

    Raises:
        UsageError: this transformers has no such architecture.
    """
    import transformers

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
                f"transformers {_transformers_version()} has no architecture {name}: if its code is in the model's "
                "directory and you trust it, add --trust_remote_code"
            ) from error


def _with_start(apply: Change, start: int, name: str, value: Tensor) -> Tensor:
    return apply(name, value, start)
