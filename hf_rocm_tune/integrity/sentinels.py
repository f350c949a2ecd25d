"""Sentinels over device memory: bits that were right and no longer are.

A card without ECC changes bits in memory that was already right, and nothing else shows it. `FrozenSentinel` watches
what training must not change, in slices, so that no step pays for the whole model, and in full before a save.
`TrainedSentinel` watches what training changes between two of its updates: trained weights and the optimizer's state.

Digests are queued on the device behind what computes there and compared later, when the training loop has waited for
the device anyway: looking costs no wait of its own.

Not covered: bits that were wrong between two looks and are right again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm_tune.transfer import Digest, QueuedDigests
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import UntypedStorage

Found = tuple[str, Tensor, Callable[[], Tensor]]
"""Name, tensor, and a function that finds it again; the function raises AttributeError when it is gone."""

_PACKED_BYTES = 32 << 20
"""Small tensors are digested together in pieces of up to this size."""
_BYTES_PER_UPDATE = 1 << 30
"""How much of the trained state is watched between two updates."""


@dataclass(frozen=True)
class Change:
    """A tensor that is not what it was.

    Attributes:
        stage: ``frozen`` or ``trained``.
        name: of the tensor, or of the group it belongs to.
        kind: ``changed in memory``, ``replaced`` by another tensor, ``removed`` or ``added``.
    """

    stage: str
    name: str
    kind: str


@dataclass(kw_only=True)
class _Watched:
    name: str
    find: Callable[[], Tensor]
    storage: weakref.ref[UntypedStorage]
    nbytes: int
    baseline: Digest

    def tensor(self) -> Tensor | None:
        try:
            return self.find()
        except AttributeError:
            return None

    def rebase(self, tensor: Tensor, baseline: Digest) -> None:
        storage = tensor.untyped_storage()
        self.storage, self.nbytes, self.baseline = weakref.ref(storage), storage.nbytes(), baseline


@dataclass(kw_only=True)
class FrozenSentinel:
    """Watches the frozen tensors of a model, each by the bytes of its whole storage.

    Args:
        list_tensors: yields all that is to be watched, as it is now.
        period: number of calls of :meth:`check_slice` in which every tensor is checked once.
        arrived_with: the digest that a tensor had when it was loaded or derived, which is its baseline; None where that
            is not known, and the baseline is what the tensor holds now.
        explain: why a tensor may hold other bytes than its baseline's, given its name, the tensor, and whether these
            are the baseline's bytes in another storage; None where nothing explains it. What is explained gets a new
            baseline and is not a change.

    Attributes:
        changed_at_start: what no longer held its baseline when the watch began.
        passes: completed passes over all tensors, by slices or in full.
    """

    list_tensors: Callable[[], Iterable[Found]]
    period: int
    arrived_with: Callable[[Tensor], Digest | None] = lambda _: None
    explain: Callable[[str, Tensor, bool], str | None] = lambda *_: None
    changed_at_start: list[Change] = field(default_factory=list)
    passes: int = 0
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _slices: list[list[_Watched]] = field(default_factory=list)
    _queued: list[tuple[list[_Watched], QueuedDigests]] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        self.changed_at_start = self._begin(list(self.list_tensors()))
        self._slices = list(_even_slices(list(self._watched.values()), self.period))

    @property
    def tensors(self) -> int:
        """How many tensors are watched."""
        return len(self._watched)

    def check_slice(self) -> list[Change]:
        """Looks at the next slice.

        Returns:
            Changes that are known by now; on an accelerator :meth:`collect` tells of this slice's later.
        """
        changes = self._look(self._slices[self._next])
        self._next += 1
        if self._next == len(self._slices):
            self._next = 0
            self.passes += 1
        return changes + self.collect(wait=False)

    def check_all(self) -> list[Change]:
        """Looks at every tensor, also at those that have come since the start, and waits for the verdict."""
        self.passes += 1
        changes = self._look(self._watched.values())
        changes += self._begin([each for each in self.list_tensors() if each[0] not in self._watched], late=True)
        return changes + self.collect(wait=True)

    def collect(self, *, wait: bool) -> list[Change]:
        """What has been found out since the last time.

        Args:
            wait: also for what the device has not done yet.
        """
        changes = []
        while self._queued and (wait or self._queued[0][1].done()):
            rows, queued = self._queued.pop(0)
            for row, found in zip(rows, queued.result(), strict=True):
                if found != row.baseline:
                    changes += self._judge(row)
        return changes

    def _look(self, rows: Iterable[_Watched]) -> list[Change]:
        """Queues the digests of those that are where they were; the others are judged at once."""
        changes, here = [], []
        for row in rows:
            tensor = row.tensor()
            if tensor is not None and tensor.requires_grad:
                continue  # it is trained from now on
            if tensor is not None and tensor.untyped_storage() is row.storage():
                here.append((row, storage_bytes(tensor)))
            else:
                changes += self._judge(row)
        if here:
            self._queued.append(([row for row, _ in here], QueuedDigests([data for _, data in here])))
        return changes

    def _judge(self, row: _Watched) -> list[Change]:
        """Looks again, and asks for an explanation of what still differs."""
        tensor = row.tensor()
        if tensor is None:
            return [Change("frozen", row.name, "removed")]
        replaced = tensor.untyped_storage() is not row.storage()
        (found,) = QueuedDigests([storage_bytes(tensor)]).result()
        same = found == row.baseline
        if same and not replaced:
            return []  # the digest itself had come back wrong
        if self.explain(row.name, tensor, same) is None:
            return [Change("frozen", row.name, "replaced" if replaced else "changed in memory")]
        row.rebase(tensor, found)
        return []

    def _begin(self, found: list[Found], *, late: bool = False) -> list[Change]:
        """Takes baselines, and tells of what does not hold the one with which it arrived. Late ones are explained."""
        digests = QueuedDigests([storage_bytes(tensor) for _, tensor, _ in found]).result()
        changes = []
        for (name, tensor, find), now in zip(found, digests, strict=True):
            if late and self.explain(name, tensor, False) is None:
                changes.append(Change("frozen", name, "added"))
                continue
            before = now if late else self.arrived_with(storage_bytes(tensor)) or now
            storage = tensor.untyped_storage()
            self._watched[name] = row = _Watched(
                name=name, find=find, storage=weakref.ref(storage), nbytes=storage.nbytes(), baseline=before
            )
            if now != before:
                changes += self._judge(row)
        return changes


class TrainedSentinel:
    """Watches what training changes, from one update to the next: the optimizer's parameters and its state.

    Small tensors of one kind are digested together. Where all of it is larger than a gibibyte, as much as that is
    watched between two updates, in turns. Pages (bitsandbytes' paged optimizers) are not watched.

    Args:
        optimizer: with ``param_groups`` and ``state`` as torch's.
        local: this rank's part of a tensor that is sharded.
        arrived_with: as for `FrozenSentinel`.
        excuse_writes: do not compare what torch operations have written or replaced in the meantime: for a trainer
            with code of a user's, which may do so. A fault of the memory leaves no trace in torch's version counter.

    Attributes:
        checks: completed comparisons of what is watched.
        rewritten: groups that were not compared because they had been written to.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        arrived_with: Callable[[Tensor], Digest | None] = lambda _: None,
        excuse_writes: bool = False,
    ) -> None:
        self._optimizer, self._local = optimizer, local
        self._arrived_with = arrived_with
        self._excuse_writes = excuse_writes
        self.checks = self.rewritten = 0
        self._held: list[Any] = []
        self._groups: list[_Group] = []
        self._next = 0
        self._taken: tuple[list[_Group], list[list[int]], QueuedDigests] | None = None
        self._queued: list[tuple[list[_Group], list[int], QueuedDigests, QueuedDigests]] = []
        self._replaced: dict[str, None] = {}

    def begin(self) -> list[Change]:
        """Before the first update: what does not hold the bytes with which it arrived, where that is known."""
        rows = [(kind, storage_bytes(tensor)) for kind, tensor in self._list()]
        known = [(kind, data, before) for kind, data in rows if (before := self._arrived_with(data)) is not None]
        now = QueuedDigests([data for _, data, _ in known]).result()
        self.take()
        wrong = dict.fromkeys(kind for (kind, _, before), found in zip(known, now, strict=True) if found != before)
        return [Change("trained", kind, "changed in memory") for kind in wrong]

    def take(self) -> None:
        """After an update: remembers what is there now."""
        held = [each for group in self._optimizer.param_groups for each in group["params"]]
        held += [each for state in self._optimizer.state.values() for each in state.values()]
        moved = any(group.pointers != group.find() for group in self._groups)
        if moved or list(map(id, held)) != list(map(id, self._held)):
            self._held, self._groups = held, _grouped(self._list())
        chosen = self._turn()
        queued = QueuedDigests([group.packed() for group in chosen])
        versions = [group.versions() for group in chosen] if self._excuse_writes else []
        self._taken = chosen, versions, queued

    def look(self) -> None:
        """Before the next use: queues a second look at what was remembered."""
        if self._taken is None:
            return
        groups, versions, before = self._taken
        looked_at = []
        for at, group in enumerate(groups):
            replaced = group.pointers != group.find()
            if self._excuse_writes and (replaced or group.versions() != versions[at]):
                self.rewritten += 1
            elif replaced:
                self._replaced[group.kind] = None
            else:
                looked_at.append(at)
        self._queued.append((groups, looked_at, before, QueuedDigests([groups[at].packed() for at in looked_at])))

    def collect(self) -> list[Change]:
        """What has changed between `take` and `look`; waits for the verdict."""
        changes: dict[str, None] = {}
        for groups, untouched, before, now in self._queued:
            self.checks += 1
            then = before.result()
            for at, found in zip(untouched, now.result(), strict=True):
                # Looked at once more: the digest itself may have come back wrong.
                if found != then[at] and QueuedDigests([groups[at].packed()]).result() != [then[at]]:
                    changes[groups[at].kind] = None
        self._queued = []
        replaced, self._replaced = self._replaced, {}
        kinds = [(kind, "replaced") for kind in replaced] + [(kind, "changed in memory") for kind in changes]
        return [Change("trained", kind, how) for kind, how in kinds]

    def _list(self) -> Iterator[tuple[str, Tensor]]:
        """Kind and tensor of all that is there now."""
        for group in self._optimizer.param_groups:
            yield from (("trained weights", self._local(each)) for each in group["params"])
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and not getattr(value, "is_paged", False):
                    yield f"optimizer state {name}", self._local(value)

    def _turn(self) -> list[_Group]:
        """The groups whose turn it is: all, where they are not too large together."""
        chosen: list[_Group] = []
        room = _BYTES_PER_UPDATE
        for _ in self._groups:
            group = self._groups[self._next % len(self._groups)]
            if chosen and group.nbytes > room:
                break
            chosen.append(group)
            room -= group.nbytes
            self._next = (self._next + 1) % len(self._groups)
        return chosen


@dataclass
class _Group:
    """Tensors of one kind on one device whose storages are digested as one."""

    kind: str
    tensors: list[Tensor] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)
    data: list[Tensor] = field(default_factory=list)
    nbytes: int = 0

    def find(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]

    def packed(self) -> Tensor:
        return self.data[0] if len(self.data) == 1 else torch.cat(self.data)

    def versions(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]


def _grouped(listed: Iterable[tuple[str, Tensor]]) -> list[_Group]:
    groups: list[_Group] = []
    open_groups: dict[tuple[str, torch.device], _Group] = {}
    seen: set[int] = set()
    for kind, tensor in listed:
        storage = tensor.untyped_storage()
        if storage._cdata in seen or storage.nbytes() == 0:
            continue
        seen.add(storage._cdata)
        group = open_groups.get((kind, tensor.device))
        if group is None or group.nbytes + storage.nbytes() > _PACKED_BYTES:
            open_groups[kind, tensor.device] = group = _Group(kind)
            groups.append(group)
        group.tensors.append(tensor)
        group.pointers.append(tensor.data_ptr())
        group.data.append(storage_bytes(tensor))
        group.nbytes += storage.nbytes()
    return groups


def _even_slices(watched: list[_Watched], period: int) -> Iterator[list[_Watched]]:
    """Splits the tensors into `period` groups of about the same number of bytes, in order."""
    total = sum(row.nbytes for row in watched) or 1
    groups: list[list[_Watched]] = [[] for _ in range(period)]
    passed = 0
    for row in watched:
        groups[min(passed * period // total, period - 1)].append(row)
        passed += row.nbytes
    yield from groups
