"""Sentinels: detect weights and optimizer state that change in device memory (no ECC) or differ between ranks.

`FrozenSentinel` checks what training must not change, in slices, so that no step pays for the whole model, and in full
before a save. `TrainedSentinel` checks trained weights and optimizer state between two updates. Digests are queued on
the device behind the computation and compared when the training loop has waited for the device anyway. Not covered:
bits that were wrong between two checks and are right again.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_rocm_tune.cards.agree import compare_replicas
from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, listed
from hf_rocm_tune.models.placement import RECOMPUTED, TRAINED, findable_tensors_of, is_recomputed, tensors_of
from hf_rocm_tune.models.quantised import running_statistics
from hf_rocm_tune.models.shards import cut_of, is_sharded, local, reshard
from hf_rocm_tune.transfer import Digest, QueuedDigests, TensorGroup, digest, named_tensors, tree_tensors
from hf_rocm_tune.transfer.digest import GROUP_BYTES
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import UntypedStorage, nn
    from transformers import TrainerState

    from hf_rocm_tune.transfer import Mover

Found = tuple[str, Tensor, Callable[[], Tensor]]
"""Name, tensor, and a function that looks the tensor up again; it raises AttributeError when the tensor is gone."""

_BYTES_PER_UPDATE = 1 << 30
"""The most bytes of trained state that are checked between two updates."""
_OUTSTANDING_BATCHES = 8
"""Evaluated batches (their memories) whose check may be outstanding: the host need not wait for the device."""


class Change(NamedTuple):
    stage: str  # "frozen", "trained" or "batches"
    name: str  # of the tensor, or of the group it belongs to
    kind: str  # "changed in memory", "replaced" by another tensor, "removed" or "added"


_RATES = Change("trained", "learning rates", "changed in memory")


@dataclass
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


class FrozenSentinel:
    """Checks the frozen tensors of a model, each by the bytes of its whole storage.

    ``passes``: completed passes over all tensors, in slices or in full; ``changed_at_start``: tensors that differed
    from the bytes that they ``arrived_with``.
    """

    def __init__(
        self,
        list_tensors: Callable[[], Iterable[Found]],
        period: int,
        arrived_with: Callable[[Tensor], Digest | None] = lambda _: None,
        explain: Callable[[str, Tensor, bool], str | None] = lambda *_: None,
    ) -> None:
        self._list_tensors, self._arrived_with, self._explain = list_tensors, arrived_with, explain
        self.passes = self._next = 0
        self._queued: list[tuple[list[_Watched], QueuedDigests]] = []
        self._watched: dict[str, _Watched] = {}
        self.changed_at_start = self._begin(list(list_tensors()))
        total, passed = sum(row.nbytes for row in self._watched.values()) or 1, 0
        self._slices: list[list[_Watched]] = [[] for _ in range(period)]
        for row in self._watched.values():
            self._slices[min(passed * period // total, period - 1)].append(row)
            passed += row.nbytes

    @property
    def tensors(self) -> int:
        return len(self._watched)

    def check_slice(self) -> list[Change]:
        """Check the next slice; on an accelerator a later call or :meth:`collect` returns its changes."""
        changes = self._look(self._slices[self._next])
        self._next += 1
        if self._next == len(self._slices):
            self._next = 0
            self.passes += 1
        return changes + self.collect(wait=False)

    def check_all(self) -> list[Change]:
        """Check every tensor, also those added since the start, and wait for the result."""
        self.passes += 1
        changes = self._look(self._watched.values())
        changes += self._begin([each for each in self._list_tensors() if each[0] not in self._watched], late=True)
        return changes + self.collect(wait=True)

    def collect(self, *, wait: bool) -> list[Change]:
        """The changes found since the last call; ``wait``: wait for all digests that are queued on the device."""
        changes = []
        while self._queued and (wait or self._queued[0][1].done()):
            rows, queued = self._queued.pop(0)
            for row, found in zip(rows, queued.result(), strict=True):
                if found != row.baseline:
                    changes += self._judge(row)
        return changes

    def _look(self, rows: Iterable[_Watched]) -> list[Change]:
        """Queue the digests of tensors whose storage is the same; the others are judged at once."""
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
        """Digest a suspicious tensor again; it has changed if it still differs and `explain` has no reason."""
        tensor = row.tensor()
        if tensor is None:
            return [Change("frozen", row.name, "removed")]
        replaced = tensor.untyped_storage() is not row.storage()
        (found,) = QueuedDigests([storage_bytes(tensor)]).result()
        same = found == row.baseline
        if same and not replaced:
            return []  # the first digest was wrong
        if self._explain(row.name, tensor, same) is None:
            return [Change("frozen", row.name, "replaced" if replaced else "changed in memory")]
        storage = tensor.untyped_storage()
        row.storage, row.nbytes, row.baseline = weakref.ref(storage), storage.nbytes(), found
        return []

    def _begin(self, found: list[Found], *, late: bool = False) -> list[Change]:
        """Record baselines. Returns tensors that differ from theirs; ``late``: tensors added without a reason, too."""
        digests = QueuedDigests([storage_bytes(tensor) for _, tensor, _ in found]).result()
        changes = []
        for (name, tensor, find), now in zip(found, digests, strict=True):
            if late and self._explain(name, tensor, False) is None:
                changes.append(Change("frozen", name, "added"))
                continue
            before = now if late else self._arrived_with(storage_bytes(tensor)) or now
            storage = tensor.untyped_storage()
            self._watched[name] = row = _Watched(name, find, weakref.ref(storage), storage.nbytes(), before)
            if now != before:
                changes += self._judge(row)
        return changes


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
        self._optimizer, self._arrived_with, self._excuse_writes = optimizer, arrived_with, excuse_writes
        self.checks = self.rewritten = 0
        self._held: list[Any] = []
        self._held_ids: list[int] = []
        self._groups: list[_Pack] = []
        self._next = 0
        self._taken: tuple[list[_Pack], list[list[int]], QueuedDigests] | None = None
        self._queued: list[tuple[list[_Pack], list[int], QueuedDigests, QueuedDigests]] = []
        self._changes: dict[str, str] = {}  # how each kind has changed

    def begin(self) -> list[Change]:
        """Before the first update: tensors that differ from the bytes with which they arrived, where that is known."""
        rows = [(kind, storage_bytes(tensor)) for kind, tensor in self._list()]
        known = [(kind, data, before) for kind, data in rows if (before := self._arrived_with(data)) is not None]
        now = QueuedDigests([data for _, data, _ in known]).result()
        self.take()
        wrong = dict.fromkeys(kind for (kind, _, before), found in zip(known, now, strict=True) if found != before)
        return [Change("trained", kind, "changed in memory") for kind in wrong]

    def take(self) -> None:
        """After an update: record the current state."""
        held = [each for group in self._optimizer.param_groups for each in group["params"]]
        held += [each for state in self._optimizer.state.values() for each in state.values()]
        ids = list(map(id, held))
        if ids != self._held_ids or any(group.moved for group in self._groups):
            self._held, self._held_ids, self._groups = held, ids, _grouped(self._list())
        chosen = self._turn()
        queued = QueuedDigests([group.bytes for group in chosen])
        versions = [group.versions() for group in chosen] if self._excuse_writes else []
        self._taken = chosen, versions, queued

    def look(self) -> None:
        """Before the next use: queue a comparison with the recorded state."""
        if self._taken is None:
            return
        groups, versions, before = self._taken
        looked_at = []
        for at, group in enumerate(groups):
            replaced = group.moved
            if self._excuse_writes and (replaced or group.versions() != versions[at]):
                self.rewritten += 1
            elif replaced:
                self._changes[group.kind] = "replaced"
            else:
                looked_at.append(at)
        self._queued.append((groups, looked_at, before, QueuedDigests([groups[at].bytes for at in looked_at])))

    def collect(self, *, newest: int = 0) -> list[Change]:
        """What has changed between `take` and `look`; waits for the device, but not for the ``newest`` comparisons."""
        older = max(len(self._queued) - newest, 0)
        queued, self._queued = self._queued[:older], self._queued[older:]
        for groups, untouched, before, now in queued:
            self.checks += 1
            then = before.result()
            for at, found in zip(untouched, now.result(), strict=True):
                # Checked once more: the digest itself may be wrong.
                if found != then[at] and QueuedDigests([groups[at].bytes]).result() != [then[at]]:
                    self._changes.setdefault(groups[at].kind, "changed in memory")
        changes, self._changes = self._changes, {}
        return [Change("trained", kind, how) for kind, how in changes.items()]

    def _list(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._optimizer.param_groups:
            yield from (("trained weights", local(each)) for each in group["params"])
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and not getattr(value, "is_paged", False):
                    yield f"optimizer state {name}", local(value)

    def _turn(self) -> list[_Pack]:
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
        self._used: list[tuple[str, list[tuple[Tensor, int]], Digest | QueuedDigests]] = []
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
            self._used.append((rows[0][0], [(tensor, tensor._version) for _, tensor in rows], known))

    def look(self) -> None:
        used, self._used = self._used, []
        for name, rows, known in used:
            if all(tensor._version == version for tensor, version in rows):
                self._queued.append((name, known, QueuedDigests([storage_bytes(rows[0][0])])))

    def collect(self, *, newest: int = 0) -> list[Change]:
        """What has changed in the batches that were looked at; waits for all but the ``newest`` tensors of them."""
        older = max(len(self._queued) - newest, 0)
        queued, self._queued = self._queued[:older], self._queued[older:]
        changes = {}
        for name, known, now in queued:
            right = known if isinstance(known, Digest) else known.result()[0]
            if not now.result()[0].same_words(right):  # gaps between its tensors do not count
                changes[name] = Change("batches", name, "changed in memory")
        return list(changes.values())


class _Pack:
    """Tensors of one kind on one device whose storages are digested as one."""

    def __init__(self, kind: str, tensors: list[Tensor]) -> None:
        self.kind, self._tensors = kind, tensors
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        self.bytes = TensorGroup([storage_bytes(tensor) for tensor in tensors])

    @property
    def moved(self) -> bool:
        return self._pointers != [tensor.data_ptr() for tensor in self._tensors]

    def versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _grouped(listed: Iterable[tuple[str, Tensor]]) -> list[_Pack]:
    groups: list[tuple[str, list[Tensor]]] = []
    last: dict[tuple[str, torch.device], list[Tensor]] = {}
    filled: Counter[tuple[str, torch.device]] = Counter()
    seen: set[int] = set()
    for kind, tensor in listed:
        storage, key = tensor.untyped_storage(), (kind, tensor.device)
        if storage._cdata in seen or storage.nbytes() == 0:
            continue
        seen.add(storage._cdata)
        filled[key] += storage.nbytes()
        if key not in last or filled[key] > GROUP_BYTES:
            filled[key], last[key] = storage.nbytes(), []
            groups.append((kind, last[key]))
        last[key].append(tensor)
    return [_Pack(kind, tensors) for kind, tensors in groups]


# ---- in a run -----------------------------------------------------------------------------------------------

_UPSTREAM = frozenset({"hf_rocm_tune", "transformers", "trl", "peft", "accelerate", "torch", "typing", "builtins"})
_WHAT = {
    "frozen": "frozen weights",
    "trained": "trained weights or optimizer state",
    "batches": "batch tensors on the device",
}
_SAID = {"replaced": "were replaced by other tensors", "removed": "were removed", "added": "were added"}
_ADVICE = (
    "Nothing was saved since; the checkpoints already written are intact: start the same command again to continue "
    "from the newest one. Code that rewrites a frozen weight on purpose must declare it with "
    "trainer.mover.mark_derived(tensor, reason)"
)


def is_foreign(cls: type) -> bool:
    """Whether a class or one of its bases has code that is neither upstream's nor ours."""
    return any(
        base.__module__.partition(".")[0] not in _UPSTREAM
        and any(callable(value) for name, value in vars(base).items() if not name.startswith("__"))
        for base in cls.__mro__
    )


@functools.cache
def has_writer(event: str, *callbacks: type) -> bool:
    """Whether one of these callback classes has user code for this event, which may write to weights."""
    stock = getattr(TrainerCallback, event, None)
    return any(is_foreign(each) and getattr(each, event, None) is not stock for each in callbacks)


class SentinelCallback(TrainerCallback):
    """Checks device memory during a run.

    Frozen weights are checked at every step in slices, each once in ``every`` steps, and in full before a save. Trained
    weights and optimizer state are digested after each update, and compared before the next one and before a save. With
    several ranks, replicas of trainable weights are compared every ``every`` steps: they must be bit-identical.
    """

    def __init__(
        self, model: nn.Module, mover: Mover, *, every: int, excuse_writes: bool, references: Sequence[nn.Module]
    ) -> None:
        self._model, self._mover, self._report, self._every = model, mover, mover.report, every
        self._excuse_writes, self._references = excuse_writes, references
        self._sentinel: FrozenSentinel | None = None
        self._trained: TrainedSentinel | None = None
        self._batches = BatchSentinel(mover.verdict_of)
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._rates: Any = None
        self._explained: set[tuple[str, str]] = set()
        self._checked_at = -1  # the step at which everything was checked last

    # ---- events ---------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._every <= 0:
            return
        self._optimizer, self._scheduler = more.get("optimizer"), more.get("lr_scheduler")
        arrived_with = self._mover.digest_of
        self._sentinel = FrozenSentinel(self._frozen, self._every, arrived_with, self._explain)
        changes = self._sentinel.changed_at_start
        if self._optimizer is not None and not _moves_weights_itself(self._optimizer):
            excuse = self._excuse_writes or is_sharded(self._model)
            self._trained = TrainedSentinel(self._optimizer, arrived_with=arrived_with, excuse_writes=excuse)
            changes = [*changes, *self._trained.begin()]
            self._follow_prompts()
        for each in self._trained_parameters():
            if self._mover.was_verified(each):
                self._mover.mark_trained(each, TRAINED)
        self._judge(changes, "between the load and the first step", state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._rates = self._read_rates()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._trained is not None:  # the learning rates are read when the next step begins: the scheduler sets them
            self._trained.take()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        step = state.global_step
        if self._sentinel is not None:
            self._reshard()
            self._judge(self._sentinel.check_slice(), f"after step {step}", step)
            if step % self._every == 0 and (replicas := list(self._replicas())):
                self.check_replicas(replicas, f"at step {step}")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._sentinel is not None and self._checked_at != state.global_step:  # nothing was saved at this step
            self.check_all(state.global_step, "the training ends")

    # ---- checks ---------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Record the trained state, which has been changed on purpose, as right."""
        self._rates = self._read_rates()
        if self._trained is not None:
            self._trained.take()

    def _follow_prompts(self) -> None:
        """PEFT's CPT replaces its trained prompt in each forward, wherever that is called: right from then on."""
        encoders: Any = getattr(getattr(self._model, "prompt_encoder", None), "values", list)()
        for encoder in encoders:
            encoder.register_forward_pre_hook(lambda *_: self.look())
            encoder.register_forward_hook(lambda *_: self._adopt_prompts())

    def _adopt_prompts(self) -> None:
        assert self._trained is not None
        self._trained.take()
        for each in self._trained_parameters():
            if self._mover.provenance(each) is None:
                self._mover.mark_trained(each, TRAINED)

    def use_batch(self, batch: Any) -> None:
        """A verified batch is used from now on."""
        if self._sentinel is not None:
            self._batches.use(batch)

    def look_at_batches(self) -> None:
        """Queue a check of the batches that were used; `settle` reports the result."""
        self._batches.look()

    def settle_batches(self, step: int) -> None:
        """Wait for the result of the checks of batches alone; raises as `settle`."""
        if self._sentinel is not None:
            self._judge(self._batches.collect(), f"at step {step}", step)

    def settle_older(self, step: int) -> None:
        """Settle what was queued some batches ago, so that in a long evaluation no more than that is outstanding."""
        if self._sentinel is None:
            return
        changes = self._batches.collect(newest=_OUTSTANDING_BATCHES)
        if self._trained is not None:
            changes += self._trained.collect(newest=1)
        self._judge(changes, f"in an evaluation after step {step}", step)

    def look(self) -> None:
        """Queue a check of the trained state before it is used or changed; `settle` reports the result."""
        if self._trained is not None:
            self._trained.look()

    def settle(self, step: int) -> None:
        """Wait for the results of all checks so far; ``step`` is the number of the current step."""
        if self._sentinel is None:
            return
        changes = self._sentinel.collect(wait=True)
        changes += self._trained.collect() if self._trained is not None else []
        changes += self._batches.collect()
        if not self._excuse_writes and self._rates != self._read_rates():
            changes.append(_RATES)
        self._judge(changes, f"before the update of step {step}", step)

    @contextmanager
    def keeping_rates(self, step: int) -> Iterator[None]:
        """Within the block nothing may change the learning rates; between steps, callbacks and schedulers do."""
        before = self._read_rates()
        yield
        if self._sentinel is not None and not self._excuse_writes and before != self._read_rates():
            self._judge([_RATES], f"during the evaluation after step {step}", step)

    def check_all(self, step: int, doing: str = "saving") -> None:
        """Check every frozen tensor and the trained state, before ``doing`` something with them."""
        if self._sentinel is None:
            for name, tensor, _ in self._frozen():
                if self._mover.provenance(tensor) is None:
                    self._explain(name, tensor, False)
            return
        self._reshard()
        when = f"before {doing} at step {step}"
        self._judge(self._sentinel.check_all(), when, step)
        self.check_trained(when, step)
        self._checked_at = step

    def _reshard(self) -> None:
        """FSDP2 leaves the outermost parameters gathered after an evaluation: not the tensor of the rank's own part."""
        if is_sharded(self._model):
            reshard(self._model)

    def check_trained(self, when: str, step: int) -> None:
        if self._trained is not None:
            self._trained.look()
            self._judge(self._trained.collect(), when, step)

    def check_replicas(self, tensors: Iterable[tuple[str, Tensor]], when: str) -> None:
        """`compare_replicas`, counted. Collective."""
        try:
            compared = compare_replicas(tensors, when)
        except CorruptionError:
            self._report.count("replicas", checks=1, mismatches=1)
            raise
        if compared:
            self._report.count("replicas", checks=1)

    # ---- which tensors are checked --------------------------------------------------------------------------

    def _frozen(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        counted = {name for name, _ in running_statistics(self._model)}
        found = findable_tensors_of(self._model)
        yield from (each for each in found if not each[1].requires_grad and each[0] not in counted)
        for number, model in enumerate(self._references):
            yield from ((f"reference {number}: {each[0]}", *each[1:]) for each in findable_tensors_of(model))

    def _replicas(self) -> Iterator[tuple[str, Tensor]]:
        """Trained tensors that every rank holds completely."""
        if not is_sharded(self._model):
            return ((name, tensor) for name, tensor in tensors_of(self._model) if tensor.requires_grad)
        shards = ((name, each) for name, each in self._model.named_parameters() if isinstance(each, DTensor))
        return ((name, local(each)) for name, each in shards if each.requires_grad and cut_of(each) is None)

    def _trained_parameters(self) -> Iterator[Tensor]:
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        return (local(each) for group in groups for each in group["params"])

    def _explain(self, name: str, tensor: Tensor, same: bool) -> str | None:
        """The reason why a frozen tensor may differ, or None; with a reason it is marked derived and reported once."""
        if same:
            reason = "equal to the tensor that it replaces"
        elif self._mover.digest_of(data := storage_bytes(tensor)) == digest(data):
            reason = self._mover.reason(tensor) or "came through the mover"
        elif any(each is tensor for each in self._trained_parameters()):
            reason = "was trained until now"
        elif is_recomputed(*self._owner(name), tensor, self._mover):
            reason = RECOMPUTED
        else:
            return None
        self._mover.mark_derived(tensor, reason)
        if (name, reason) not in self._explained:
            self._explained.add((name, reason))
            self._report.rebaselined(name, reason, self._mover.step)
        return reason

    def _read_rates(self) -> Any:
        """What the optimizer computes the next update with besides tensors, and the scheduler's state."""
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        state = self._scheduler.state_dict() if hasattr(self._scheduler, "state_dict") else {}
        return [
            {key: copy.copy(each) for key, each in values.items() if _is_plain(each)} for values in (*groups, state)
        ]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        reference, _, inside = name.rpartition(": ")
        return (self._references[int(reference.split()[1])], inside) if reference else (self._model, name)

    # ---- the verdict ----------------------------------------------------------------------------------------

    def _judge(self, changes: Sequence[Change], when: str, step: int) -> None:
        assert self._sentinel is not None
        wrong, frozen, trained = Counter(each.stage for each in changes), self._sentinel, self._trained
        self._report.watched("frozen", passes=frozen.passes, tensors=frozen.tensors, new_mismatches=wrong["frozen"])
        if trained is not None:
            state = {"checks": trained.checks, "rewritten": trained.rewritten}
            self._report.watched("trained", **state, new_mismatches=wrong["trained"])
        if not changes:
            return
        for each in changes:
            row = {"step": step, "stage": each.stage, "tensor": each.name, "kind": each.kind, "outcome": "stopped"}
            self._report.incident(row)
        self._report.add("batches", mismatches=wrong["batches"])
        what = _WHAT[changes[0].stage]
        said = _SAID.get(changes[0].kind, changes[0].kind)
        raise MemoryFaultError(f"{what} {said} ({when}): {listed([each.name for each in changes])}", _ADVICE)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple) and not any(True for _ in tree_tensors(value))


def _moves_weights_itself(optimizer: Any) -> bool:
    """Whether weights change outside of the optimizer's step: schedule-free ones, during backward, or DeepSpeed's."""
    own = getattr(optimizer, "optimizer", optimizer)
    names = {"LayerWiseDummyOptimizer", "DeepSpeedOptimizerWrapper", "Lomo", "AdaLomo"}
    return hasattr(own, "eval") or bool(names & {type(optimizer).__name__, type(own).__name__})
