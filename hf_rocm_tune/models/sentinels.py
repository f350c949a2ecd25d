"""Sentinels: detect frozen weights, trained state and batches that change in device memory (it has no ECC).

`FrozenSentinel` checks what training must not change, in slices, so that no step pays for the whole model, and in full
before a save. `TrainedSentinel` checks trained weights and optimizer state between two updates, `BatchSentinel` batches
after their use. Digests are queued on the device behind the computation and compared when the training loop has waited
for the device anyway. Not covered: bits that were wrong between two checks and are right again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_rocm_tune.models.shards import local
from hf_rocm_tune.transfer import Digest, QueuedDigests, TensorGroup, named_tensors
from hf_rocm_tune.transfer.digest import GROUP_BYTES
from hf_rocm_tune.transfer.interception import writes_to, writes_to_storages
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from torch import UntypedStorage

Listed = tuple[str, Tensor, Callable[[], Tensor]]
"""Name, tensor, and a function that looks the tensor up again; it raises AttributeError when the tensor is gone."""

_BYTES_PER_UPDATE = 1 << 30
"""The most bytes of trained state that are checked between two updates."""
OUTSTANDING_BATCHES = 8
"""Evaluated batches (their memories) whose check may be outstanding: the host need not wait for the device."""


def version_of(tensor: Tensor) -> tuple[int, int]:
    """How often operations have written to a tensor: torch's version counter, and copies that it does not count."""
    return (0 if tensor.is_inference() else tensor._version, writes_to(tensor))


class Change(NamedTuple):
    stage: str  # "frozen", "trained" or "batches"
    name: str  # of the tensor, or of the group it belongs to
    kind: str  # "changed in memory", "replaced" by another tensor, "removed" or "added"


@dataclass
class _Watched:
    name: str
    find: Callable[[], Tensor]
    storage: weakref.ref[UntypedStorage]
    nbytes: int
    baseline: Digest
    held: Tensor | None = None  # of a buffer, what it was: a model's own code may put a cast of it in its place

    def tensor(self) -> Tensor | None:
        try:
            return self.find()
        except AttributeError:
            return None


class FrozenSentinel:
    """Checks the frozen tensors of a model, each by the bytes of its whole storage.

    ``passes``: completed passes over all tensors, in slices or in full; ``changed_at_start``: tensors that differed
    from the bytes that they ``arrived_with``.
    """

    def __init__(
        self,
        list_tensors: Callable[[], Iterable[Listed]],
        period: int,
        arrived_with: Callable[[Tensor], Digest | None] = lambda _: None,
        explain: Callable[[str, Tensor, bool], str | None] = lambda *_: None,
    ) -> None:
        self._list_tensors = list_tensors
        self._arrived_with = arrived_with
        self._explain = explain
        self.passes = 0
        self._next = 0
        self._queued: list[tuple[list[_Watched], QueuedDigests]] = []
        self._watched: dict[str, _Watched] = {}
        self.changed_at_start = self._begin(list(list_tensors()))
        total = sum(row.nbytes for row in self._watched.values()) or 1
        passed = 0
        self._slices: list[list[_Watched]] = [[] for _ in range(period)]
        for row in self._watched.values():
            self._slices[min(passed * period // total, period - 1)].append(row)
            passed += row.nbytes

    @property
    def tensors(self) -> int:
        return len(self._watched)

    def check_slice(self) -> list[Change]:
        """Check the next slice; on an accelerator a later call or :meth:`collect` returns its changes."""
        changes = self._compare(self._slices[self._next])
        self._next += 1
        if self._next == len(self._slices):
            self._next = 0
            self.passes += 1
        return changes + self.collect(wait=False)

    def check_all(self) -> list[Change]:
        """Check every tensor, also those added since the start, and wait for the result."""
        self.passes += 1
        changes = self._compare(self._watched.values())
        added = [listed for listed in self._list_tensors() if listed[0] not in self._watched]
        changes += self._begin(added, late=True)
        return changes + self.collect(wait=True)

    def collect(self, *, wait: bool) -> list[Change]:
        """The changes found since the last call; ``wait``: wait for all digests that are queued on the device."""
        changes = []
        while self._queued and (wait or self._queued[0][1].done()):
            rows, queued = self._queued.pop(0)
            for row, now in zip(rows, queued.result(), strict=True):
                if now != row.baseline:
                    changes += self._confirm(row)
        return changes

    def _compare(self, rows: Iterable[_Watched]) -> list[Change]:
        """Queue the digests of tensors whose storage is the same; the others are judged at once."""
        changes = []
        here = []
        for row in rows:
            tensor = row.tensor()
            if tensor is not None and tensor.requires_grad:
                continue  # it is trained from now on
            if tensor is not None and tensor.untyped_storage() is row.storage():
                here.append((row, storage_bytes(tensor)))
            else:
                changes += self._confirm(row)
        if here:
            self._queued.append(([row for row, _ in here], QueuedDigests([data for _, data in here])))
        return changes

    def _confirm(self, row: _Watched) -> list[Change]:
        """Digest a suspicious tensor again; it has changed if it still differs and `explain` has no reason."""
        tensor = row.tensor()
        if tensor is None:
            return [Change("frozen", row.name, "removed")]
        replaced = tensor.untyped_storage() is not row.storage()
        (now,) = QueuedDigests([storage_bytes(tensor)]).confirmed()
        same = now == row.baseline
        if same and not replaced:
            return []  # the first digest was wrong
        if replaced and not same:
            same = _is_cast(row, tensor)
        storage = tensor.untyped_storage()
        of_another = False
        if replaced and not same:
            of_another = any(watched.storage() is storage for watched in self._watched.values())
        if of_another or self._explain(row.name, tensor, same) is None:  # verified, but as another weight
            return [Change("frozen", row.name, "replaced" if replaced else "changed in memory")]
        row.storage = weakref.ref(storage)
        row.nbytes = storage.nbytes()
        row.baseline = now
        row.held = _held(tensor)
        return []

    def _begin(self, listed: list[Listed], *, late: bool = False) -> list[Change]:
        """Record baselines. Returns tensors that differ from theirs; ``late``: tensors added without a reason, too."""
        digests = QueuedDigests([storage_bytes(tensor) for _, tensor, _ in listed]).confirmed()
        changes = []
        for (name, tensor, find), now in zip(listed, digests, strict=True):
            if late and self._explain(name, tensor, False) is None:
                changes.append(Change("frozen", name, "added"))
                continue
            before = now
            if not late:
                before = self._arrived_with(storage_bytes(tensor)) or now
            storage = tensor.untyped_storage()
            row = _Watched(name, find, weakref.ref(storage), storage.nbytes(), before, _held(tensor))
            self._watched[name] = row
            if now != before:
                changes += self._confirm(row)
        return changes


def _held(tensor: Tensor) -> Tensor | None:
    """A reference to a buffer's memory; None for a parameter, whose memory must not outlive it."""
    return None if isinstance(tensor, nn.Parameter) else tensor.detach()


def _is_cast(row: _Watched, tensor: Tensor) -> bool:
    """Whether a tensor has the values of the buffer that it replaces, in another precision or arrangement in memory.

    What it replaces must still have the bytes of the baseline: a cast of damaged values is damaged.
    """
    held = row.held
    if held is None or held.device != tensor.device or held.shape != tensor.shape:
        return False
    if held.is_floating_point() != tensor.is_floating_point():
        return False
    (before,) = QueuedDigests([storage_bytes(held)]).confirmed()
    if before != row.baseline:
        return False
    cast = held.to(tensor.dtype).contiguous()
    now = tensor.detach().contiguous()
    of_cast, of_now = QueuedDigests([storage_bytes(cast.clone()), storage_bytes(now.clone())]).confirmed()
    return of_cast == of_now


class TrainedSentinel:
    """Checks what training changes, from one update to the next: the optimizer's parameters and its state.

    Small tensors of one kind are digested together. If there is more than 1 GiB, that much is checked between two
    updates, in turn. Pages (bitsandbytes' paged optimizers) are not checked. ``checks``: completed comparisons;
    ``rewritten``: groups that were not compared because they had been written to.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        arrived_with: Callable[[Tensor], Digest | None] = lambda _: None,
        excuse_writes: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._arrived_with = arrived_with
        self._excuse_writes = excuse_writes
        self.checks = 0
        self.rewritten = 0
        self._held: list[Any] = []
        self._held_ids: list[int] = []
        self._marked: list[Any] = []
        self._groups: list[_TensorBucket] = []
        self._next = 0
        self._taken: tuple[list[_TensorBucket], list[list[tuple[int, int]]], QueuedDigests] | None = None
        self._queued: list[tuple[list[_TensorBucket], list[int], QueuedDigests, QueuedDigests]] = []
        self._changes: dict[str, str] = {}  # how each kind has changed

    def begin(self) -> list[Change]:
        """Before the first update: tensors that differ from the bytes with which they arrived, where that is known."""
        known = []
        for kind, tensor in self._list():
            data = storage_bytes(tensor)
            before = self._arrived_with(data)
            if before is not None:
                known.append((kind, data, before))
        digests = QueuedDigests([data for _, data, _ in known]).confirmed()
        self.take()
        wrong: list[str] = []
        for (kind, _, before), now in zip(known, digests, strict=True):
            if now != before and kind not in wrong:
                wrong.append(kind)
        return [Change("trained", kind, "changed in memory") for kind in wrong]

    def take(self, *, versions: bool = False) -> None:
        """After an update: record the current state; ``versions``: what torch's operations write later is excused."""
        held: list[Any] = []
        for group in self._optimizer.param_groups:
            held += group["params"]
        for state in self._optimizer.state.values():
            held += state.values()
        ids = list(map(id, held))
        if ids != self._held_ids or any(bucket.moved for bucket in self._groups):
            self._held = held
            self._held_ids = ids
            self._groups = _grouped(self._list())
        chosen = self._turn()
        queued = QueuedDigests([bucket.bytes for bucket in chosen])
        written: list[list[tuple[int, int]]] = []
        if versions or self._excuse_writes:
            written = [bucket.versions() for bucket in chosen]
        self._taken = chosen, written, queued

    def forget(self) -> None:
        """Drop what was recorded and queued: nothing is compared before the next `take`."""
        self._taken = None
        self._queued = []
        self._changes = {}

    def was_written(self) -> bool:
        """Whether torch's operations have written to the trained state since `mark`."""
        return self._marked != self._versions()

    def mark(self) -> None:
        """See `was_written`."""
        self._marked = self._versions()

    def _versions(self) -> list[Any]:
        return [version_of(value) for value in self._held if torch.is_tensor(value)]

    def queue_check(self) -> None:
        """Before the next use: queue a comparison with the recorded state."""
        if self._taken is None:
            return
        groups, versions, before = self._taken
        looked_at = []
        for at, group in enumerate(groups):
            replaced = group.moved
            if versions and (replaced or group.versions() != versions[at]):
                self.rewritten += 1
            elif replaced:
                self._changes[group.kind] = "replaced"
            else:
                looked_at.append(at)
        self._queued.append((groups, looked_at, before, QueuedDigests([groups[at].bytes for at in looked_at])))

    def collect(self, *, newest: int = 0) -> list[Change]:
        """What has changed between `take` and `queue_check`; waits for the device, but not for the ``newest``
        comparisons."""
        older = max(len(self._queued) - newest, 0)
        queued = self._queued[:older]
        self._queued = self._queued[older:]
        for groups, untouched, before, now in queued:
            self.checks += 1
            then = before.result()
            differing = [row for row, at in enumerate(untouched) if now.result()[row] != then[at]]
            for row in differing:
                # Read once more, then taken once more: the digest itself may be wrong.
                group = groups[untouched[row]]
                right = before.confirmed()[untouched[row]]
                if now.confirmed()[row] != right and QueuedDigests([group.bytes]).confirmed() != [right]:
                    self._changes.setdefault(group.kind, "changed in memory")
        changes = self._changes
        self._changes = {}
        return [Change("trained", kind, how) for kind, how in changes.items()]

    def _list(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield "trained weights", local(parameter)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and not getattr(value, "is_paged", False):
                    yield f"optimizer state {name}", local(value)

    def _turn(self) -> list[_TensorBucket]:
        """The next groups to check: all, if they are not too large together."""
        turned = [*self._groups[self._next :], *self._groups[: self._next]]
        ends = accumulate(group.bytes.nbytes for group in turned)
        fitting = sum(end <= _BYTES_PER_UPDATE for end in ends)
        chosen = turned[: max(fitting, 1)]
        self._next = (self._next + len(chosen)) % max(len(turned), 1)
        return chosen


class BatchSentinel:
    """Looks again at batches that were used: their memory may have changed after the verdict on their transfer.

    A tensor that torch operations have written to meanwhile, as some models do, is not compared.
    """

    def __init__(self, verdict_of: Callable[[Tensor], Digest | None]) -> None:
        self._verdict_of = verdict_of
        self._used: list[tuple[str, list[tuple[Tensor, tuple[int, int]]], Digest | QueuedDigests]] = []
        self._queued: list[tuple[str, Digest | QueuedDigests, QueuedDigests]] = []

    def use(self, batch: Any) -> None:
        """A batch, verified, that is used from now on; what was computed on the device is digested now."""
        storages: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in named_tensors(batch):
            if tensor.layout is torch.strided and not tensor.is_inference() and tensor.untyped_storage().nbytes():
                storages.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
        for rows in storages.values():
            first = rows[0][1]
            known = self._verdict_of(first) or QueuedDigests([storage_bytes(first)])
            self._used.append((rows[0][0], [(tensor, version_of(tensor)) for _, tensor in rows], known))

    def queue_check(self) -> None:
        used = self._used
        self._used = []
        for name, rows, known in used:
            if all(version_of(tensor) == version for tensor, version in rows):
                self._queued.append((name, known, QueuedDigests([storage_bytes(rows[0][0])])))

    def collect(self, *, newest: int = 0) -> list[Change]:
        """What has changed in the batches that were looked at; waits for all but the ``newest`` tensors of them."""
        older = max(len(self._queued) - newest, 0)
        queued = self._queued[:older]
        self._queued = self._queued[older:]
        changes = {}
        for name, known, now in queued:
            right = known if isinstance(known, Digest) else known.result()[0]
            if now.result()[0].same_words(right):  # gaps between its tensors do not count
                continue
            right = known if isinstance(known, Digest) else known.confirmed()[0]
            if not now.confirmed()[0].same_words(right):  # a digest may be read back wrong
                changes[name] = Change("batches", name, "changed in memory")
        return list(changes.values())


class _TensorBucket:
    """Tensors of one kind on one device whose storages are digested as one."""

    def __init__(self, kind: str, tensors: list[Tensor]) -> None:
        self.kind = kind
        self._tensors = tensors
        self._storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        self._counts = [not tensor.is_inference() for tensor in tensors]  # others have no version counter
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        self.bytes = TensorGroup([storage_bytes(tensor) for tensor in tensors])

    @property
    def moved(self) -> bool:
        return self._pointers != [tensor.data_ptr() for tensor in self._tensors]

    def versions(self) -> list[tuple[int, int]]:
        """`version_of` its tensors, which have not `moved`."""
        written = writes_to_storages(self._storages)
        versions = [
            tensor._version if counts else 0 for tensor, counts in zip(self._tensors, self._counts, strict=True)
        ]
        return list(zip(versions, written, strict=True))


def _grouped(listed: Iterable[tuple[str, Tensor]]) -> list[_TensorBucket]:
    groups: list[tuple[str, list[Tensor]]] = []
    last: dict[tuple[str, torch.device], list[Tensor]] = {}
    filled: Counter[tuple[str, torch.device]] = Counter()
    seen: set[int] = set()
    for kind, tensor in listed:
        storage = tensor.untyped_storage()
        key = (kind, tensor.device)
        if storage._cdata in seen or storage.nbytes() == 0:
            continue
        seen.add(storage._cdata)
        filled[key] += storage.nbytes()
        if key not in last or filled[key] > GROUP_BYTES:
            filled[key] = storage.nbytes()
            last[key] = []
            groups.append((kind, last[key]))
        last[key].append(tensor)
    return [_TensorBucket(kind, tensors) for kind, tensors in groups]
