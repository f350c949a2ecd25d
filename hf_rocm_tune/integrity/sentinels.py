"""Sentinels over frozen weights: bits that were right and no longer are.

In LoRA the base weights do not change by training, so their digests must not change either. They are taken again in
slices, so that no step pays for the whole model, and in full before every save. The card has no ECC: this is the only
way to see a flipped bit or a zeroed segment in memory that was already right.

A tensor that the model itself has replaced by another one (a rotary table that grows with the sequence, say) is not a
memory fault: it takes a new baseline, and that is recorded. In place, nothing but a fault changes a frozen tensor.

Not covered: corruption between two passes that was read and is gone again; trainable weights.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_rocm_tune.transfer import Digest, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, UntypedStorage


@dataclass(kw_only=True)
class _Watched:
    name: str
    storage: weakref.ref[UntypedStorage]
    nbytes: int
    baseline: Digest


@dataclass(kw_only=True)
class FrozenSentinel:
    """Watches the frozen tensors of a model.

    Args:
        list_tensors: yields name and tensor of all that is to be watched, as it is now.
        period: number of calls of :meth:`check_slice` in which every tensor is checked once.
        arrived_with: the digest that a tensor had when it was loaded, which is its baseline; None where that is not
            known, and the baseline is what the tensor holds now.

    Attributes:
        changed_at_start: names of tensors that no longer held their baseline when the watch began.
        passes: completed passes over all tensors, by slices or in full.
        rebaselined: names of tensors that the model replaced.
    """

    list_tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    period: int
    arrived_with: Callable[[Tensor], Digest | None] = lambda _: None
    changed_at_start: list[str] = field(default_factory=list)
    passes: int = 0
    rebaselined: list[str] = field(default_factory=list)
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _slices: list[list[str]] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        for name, tensor in self.list_tensors():
            watched = _watch(name, tensor)
            before = self.arrived_with(tensor)
            if before is not None and before != watched.baseline:
                watched.baseline = before
                self.changed_at_start.append(name)
            self._watched[name] = watched
        self._slices = list(_even_slices(list(self._watched.values()), self.period))

    @property
    def tensors(self) -> int:
        """How many tensors are watched."""
        return len(self._watched)

    def check_slice(self) -> list[str]:
        """Checks the next slice.

        Returns:
            Names of tensors whose bits have changed in place; empty when all is well.
        """
        names = set(self._slices[self._next])
        self._next += 1
        if self._next == len(self._slices):
            self._next = 0
            self.passes += 1
        return self._check(names)

    def check_all(self) -> list[str]:
        """Checks every tensor; returns as :meth:`check_slice`."""
        self.passes += 1
        return self._check(self._watched.keys())

    def _check(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        changed = []
        for name, tensor in self.list_tensors() if wanted else ():
            if name not in wanted:
                continue
            watched = self._watched[name]
            if tensor.untyped_storage() is not watched.storage():
                self._watched[name] = _watch(name, tensor)
                self.rebaselined.append(name)
            elif digest(tensor) != watched.baseline:
                changed.append(name)
        return changed


def _watch(name: str, tensor: Tensor) -> _Watched:
    size = tensor.numel() * tensor.element_size()
    return _Watched(name=name, storage=weakref.ref(tensor.untyped_storage()), nbytes=size, baseline=digest(tensor))


def _even_slices(watched: list[_Watched], period: int) -> Iterator[list[str]]:
    """Splits the tensors into `period` groups of about the same number of bytes, in order."""
    total = sum(row.nbytes for row in watched) or 1
    groups: list[list[str]] = [[] for _ in range(period)]
    passed = 0
    for row in watched:
        groups[min(passed * period // total, period - 1)].append(row.name)
        passed += row.nbytes
    yield from groups
