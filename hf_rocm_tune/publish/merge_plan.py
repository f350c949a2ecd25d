"""What the merged checkpoint will hold, decided from names and shapes before anything is written.

The output keeps the names and the form of the base's checkpoint, so whatever reads the base reads it too. transformers
loads some architectures under other names or in other shapes than they are stored in: its own tables of conversions,
the ones that ``from_pretrained`` uses, say which stored tensors make which parameter (`Names`). Where experts are
stored one by one and computed as one tensor, the stored tensors of that parameter are fused, merged and taken apart
again: one layer's experts at a time.

Tied embeddings: an adapter that changes only one side of a tie, or each side otherwise, leaves two different weights.
Both are stored then, and the configuration says that they are not tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.merge_names import Group, Names
from hf_rocm_tune.publish.merge_writer import FLOATING, Output
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    import torch

    from hf_rocm_tune.publish.merge_checkpoint import Checkpoint, Stored
    from hf_rocm_tune.publish.merge_layers import Site

_CURE = "give the model that the adapter was trained on with --base"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One step of the merge: the stored tensors that are read together, and what is written of them.

    Attributes:
        group: what is read.
        sites: parameters of the group, and of its tie, that change, by name. Empty: everything is copied.
        stored_as: parameter and the name under which it is written; of a converter's group the sources' own names.
    """

    group: Group
    sites: Mapping[str, Site] = field(default_factory=dict)
    stored_as: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All steps in the order of the base's files, what they will write, and the parameters whose tie is undone."""

    units: list[Unit]
    outputs: list[Output]
    untied: list[str]


def make_plan(
    checkpoint: Checkpoint, names: Names, sites: Mapping[str, Site], *, dtype: torch.dtype | None, stay_tied: bool
) -> Plan:
    """Decide what is written.

    Args:
        checkpoint: the base.
        names: of its tensors in the model.
        sites: what the adapter changes.
        dtype: of floating tensors in the output; None keeps each tensor's own.
        stay_tied: PEFT was asked to keep both sides of a tie equal, so they are, but for rounding.

    Raises:
        UsageError: the base lacks a tensor that the adapter changes, or cannot be stored in the form it needs.
    """
    changed = dict(sites)
    untied: list[str] = []
    beside = {}
    for target, source in names.ties.items():
        if not {target, source} & changed.keys():
            continue
        here, there = (source, target) if source in names.made_by else (target, source)
        if here not in names.made_by:
            continue  # neither is stored, which is refused below
        both = target in changed and source in changed
        if both and (stay_tied or _come_out_equal(checkpoint, names.made_by[here], changed[here], changed[there])):
            if there not in names.made_by:
                del changed[there]
            continue
        untied.append(target)
        if there not in names.made_by:
            beside[here] = there
    units = _units(checkpoint, names, changed, beside)
    covered = {name for unit in units for name in unit.sites}
    if missing := sorted(changed.keys() - covered):
        raise UsageError(
            f"{checkpoint.directory} lacks {missing[0]}, which the adapter changes ({len(missing)} in all): {_CURE}"
        )
    outputs = [output for unit in units for output in _outputs(unit, checkpoint, dtype)]
    return Plan(units=units, outputs=outputs, untied=untied)


def _units(checkpoint: Checkpoint, names: Names, changed: Mapping[str, Site], beside: Mapping[str, str]) -> list[Unit]:
    """A unit for each group that changes, at the place of its first tensor, and one for each tensor that does not."""
    units: list[Unit] = []
    done: set[str] = set()
    for stored in checkpoint.tensors:
        group = names.group_of.get(stored)
        if stored in done:
            continue
        if group is None:  # of no parameter of the model: kept, as save_pretrained would not
            units.append(Unit(group=Group(sources=[(stored, "")]), stored_as=(("", stored),)))
            continue
        extra = [there for here, there in beside.items() if here in group.parameters]
        sites = {name: changed[name] for name in [*group.parameters, *extra] if name in changed}
        if group.converter is not None and sites and extra:
            raise UsageError(f"{extra[0]} is tied to a weight that is stored in parts, which cannot be untied here")
        if group.converter is not None and sites:
            done.update(source for source, _ in group.sources)
            units.append(Unit(group=group, sites=sites))
            continue
        own = group.parameters[0]
        written = [(own, stored), *((name, names.stored_name(name)) for name in extra)]
        units.append(Unit(group=Group(sources=[(stored, "")]), sites=sites, stored_as=tuple(written)))
    return units


def _come_out_equal(checkpoint: Checkpoint, group: Group, one: Site, other: Site) -> bool:
    """Whether both sides of a tie have the same merged value, bit for bit."""
    weight = checkpoint.read(group.sources[0][0])
    merged = (site.apply(weight if site.brought is None else site.brought, weight.dtype) for site in (one, other))
    first, second = (digest(value) for value in merged)
    return one.shape == other.shape and first == second


def _outputs(unit: Unit, checkpoint: Checkpoint, dtype: torch.dtype | None) -> list[Output]:
    if not unit.stored_as:
        return [_output(source, checkpoint.tensors[source], dtype) for source, _ in unit.group.sources]
    stored = checkpoint.tensors[unit.group.sources[0][0]]
    outputs = []
    for parameter, name in unit.stored_as:
        site = unit.sites.get(parameter)
        if site is not None and stored.dtype not in FLOATING:
            raise UsageError(f"{name} is stored as {stored.dtype}, into which no adapter can be merged: {_CURE}")
        shape = tuple(site.shape) if site is not None else stored.shape
        if site is not None and site.brought is None and shape != stored.shape:
            raise UsageError(
                f"{name} is {list(stored.shape)} in {checkpoint.directory}, but {list(shape)} for this adapter: {_CURE}"
            )
        outputs.append(_output(name, stored, dtype, shape))
    return outputs


def _output(name: str, stored: Stored, dtype: torch.dtype | None, shape: tuple[int, ...] | None = None) -> Output:
    shape = stored.shape if shape is None else shape
    if stored.dtype not in FLOATING:
        return Output(name=name, dtype=stored.dtype, shape=shape, nbytes=stored.nbytes)
    kind = stored.dtype if dtype is None else next(key for key, value in FLOATING.items() if value == dtype)
    return Output(name=name, dtype=kind, shape=shape, nbytes=prod(shape) * FLOATING[kind].itemsize)
