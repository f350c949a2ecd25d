"""Verified transfers for a training loop of your own: no trainer library is needed.

    transfers = hf_rocm_tune.VerifiedTransfers("cuda")   # from here on every copy is verified
    transfers.watch(model, optimizer)
    for batch in transfers.batches(loader):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    transfers.check()
    transfers.save(model.state_dict(), "result")
    transfers.write_report("result")

Every copy between host and card, whoever asks for it, is verified at torch's dispatcher (`transfer.interception`).
`VerifiedTransfers.watch` finds weights, optimizer state and batches that change in the card's memory afterwards (it has
no ECC). What the program itself writes is no fault: operations count in torch's version counters, copies through
``tensor.data`` are seen at the dispatcher, and a storage that was replaced was replaced by the program. Not covered: a
write through ``tensor.data`` that is no copy (``weight.data.add_(...)``) looks like a fault; use ``with
torch.no_grad(): weight.add_(...)``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_rocm_tune.errors import MemoryFaultError, UsageError, listed
from hf_rocm_tune.models.sentinels import (
    BatchSentinel,
    Change,
    FrozenSentinel,
    Listed,
    TrainedSentinel,
    version_of,
)
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.models.tensors import findable_tensors_of
from hf_rocm_tune.saved_result import save_result
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.transfer import Digest, FaultSpec, Mover, TransferReport, TransferSettings
from hf_rocm_tune.transfer.digest import device_method, host_method
from hf_rocm_tune.transfer.interception import copies_on_card, watch_writes
from hf_rocm_tune.transfer.nested import map_tensors
from hf_rocm_tune.transfer.raw_bytes import not_plain
from hf_rocm_tune.transfer.report import coverage_of, to_json

REPORT_NAME = "transfer_report.json"
SCHEMA = 2

_WHAT = {
    "frozen": "frozen weights",
    "trained": "trained weights or optimizer state",
    "batches": "batch tensors on the device",
}
_ADVICE = (
    "Nothing has been saved since. Load the latest state that was saved and verified, and resume from it; if it "
    "happens again, run hf-rocm-tune doctor --full and a memory test"
)
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # of normalisations, which forward changes


class VerifiedTransfers:
    """Verifies every copy between the host and one card from its creation until `close`.

    Args:
        device: ``cuda`` (HIP too), ``cuda:1`` ... or ``cpu``, where nothing crosses: the same calls then check the same
            memory without transfers.
        verify: ``full``; ``sample``: every 16th copy; ``off``.
        on_corruption: ``recover``: a copy that arrived wrong is sent again in other ways; ``stop``: it raises at once.
        check_every: each frozen weight is checked once in so many updates.
        faults: faults to inject, for tests; by default those of ``HF_ROCM_TUNE_FAULT``.

    Attributes:
        report: counters and incidents (`TransferReport`).
        step: updates so far.

    Raises, from any call that copies or checks, or from ``optimizer.step()``:
        CorruptionError: a tensor could not be transferred correctly.
        MemoryFaultError: a watched tensor changed in memory.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        *,
        verify: str = "full",
        on_corruption: str = "recover",
        check_every: int = 50,
        faults: FaultSpec | None = None,
    ) -> None:
        if check_every < 1:
            raise UsageError(f"check_every is {check_every}; give 1 or more updates")
        self._mover = Mover(
            _checked_device(device),
            settings=TransferSettings(verify=verify, on_corruption=on_corruption),
            faults=faults or FaultSpec.from_environment(),
        )
        self.step = 0
        self._check_every = check_every
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[_WatchedOptimizer] = []
        self._frozen: _FrozenWeights | None = None
        self._used_batches = BatchSentinel(self._mover.verdict_of)

    @property
    def device(self) -> torch.device:
        return self._mover.device

    @property
    def mover(self) -> Mover:
        """The transfer engine, for what has no call here."""
        return self._mover

    @property
    def report(self) -> TransferReport:
        return self._mover.report

    # ---- watching -------------------------------------------------------------------------------------------

    def watch(self, *watched: nn.Module | Optimizer) -> None:
        """Check models and optimizers from now on: several, in any order, again after they were changed.

        Before each ``optimizer.step()`` a slice of the frozen weights, what this optimizer trains, its state, and the
        batches that were used are compared with what they were.
        """
        for target in watched:
            if isinstance(target, nn.Module):
                if all(reference() is not target for reference in self._models):
                    self._models.append(weakref.ref(target))
            else:
                optimizer = _innermost(target)
                if not isinstance(optimizer, Optimizer):
                    raise UsageError(f"watch takes models and optimizers, not {type(target).__name__}")
                if all(row.optimizer() is not optimizer for row in self._optimizers):
                    self._optimizers.append(_WatchedOptimizer(optimizer, self))
            self._frozen = None  # listed again before the next update

    def forget(self) -> None:
        """Watch nothing any more; `watch` begins anew."""
        for watched in self._optimizers:
            watched.remove()
        self._optimizers, self._models, self._frozen = [], [], None

    def watches(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is watched."""
        return any(row.optimizer() is _innermost(optimizer) for row in self._optimizers)

    def check(self) -> None:
        """Check everything that is watched, now, and wait for the result."""
        self._raise_failure()
        changes = self._frozen_weights().check_all()
        for watched in self._optimizers:
            watched.sentinel.queue_check()
            changes += watched.sentinel.collect()
        self._used_batches.queue_check()
        changes += self._used_batches.collect()
        self._report_changes(changes, f"after {self.step} updates")

    def before_update(self, watched: _WatchedOptimizer) -> None:
        """Called by an optimizer's hook before its step."""
        self._raise_failure()
        self._mover.step = self.step + 1
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # nothing may wait here
            self._leave_to_replays(watched)
        if watched.is_captured:
            return
        watched.sentinel.queue_check()
        self._used_batches.queue_check()
        changes = self._frozen_weights().check_slice() if watched is self._optimizers[0] else []
        changes += watched.sentinel.collect() + self._used_batches.collect()
        self._report_changes(changes, f"before the update of step {self.step + 1}")

    def _leave_to_replays(self, watched: _WatchedOptimizer) -> None:
        """Check no longer what an optimizer trains: replays of a captured graph change it without a trace."""
        if not watched.is_captured:
            watched.is_captured = True
            watched.sentinel.forget()
            why = "an update was captured in a graph, whose replays change them: not checked from here on"
            self.report.rebaselined("trained weights and optimizer state", why, self.step)

    def after_update(self, watched: _WatchedOptimizer) -> None:
        """Called by an optimizer's hook after its step: what it has changed is right."""
        if not watched.is_captured:
            watched.take()
        if watched is self._optimizers[0]:
            self.step += 1

    def _frozen_weights(self) -> _FrozenWeights:
        if self._frozen is None:
            self._frozen = _FrozenWeights(self._list_frozen, self._check_every, self._mover)
            self._report_changes(self._frozen.changed_at_start, "between the load and the first check")
        return self._frozen

    def _list_frozen(self) -> Iterator[Listed]:
        trained = {id(parameter) for watched in self._optimizers for parameter in watched.parameters()}
        seen: set[int] = set()
        models = []
        for reference in self._models:
            model = reference()
            if model is not None:
                models.append(model)
        for number, model in enumerate(models):
            prefix = "" if len(models) == 1 else f"model {number}: "
            for name, tensor, find in findable_tensors_of(model):
                storage = tensor.untyped_storage()._cdata
                if tensor.requires_grad or id(tensor) in trained or storage in seen or name.endswith(_RUNNING):
                    continue
                seen.add(storage)
                yield prefix + name, tensor, find

    def _raise_failure(self) -> None:
        """A transfer failed, and whoever asked for the copy swallowed the error."""
        if self._mover.failure is not None:
            raise self._mover.failure

    def _report_changes(self, changes: list[Change], when: str) -> None:
        changes = [change for change in changes if change.kind != "removed"]  # by the program
        wrong = Counter(change.stage for change in changes)
        if self._frozen is not None:
            self.report.watched(
                "frozen", passes=self._frozen.passes, tensors=self._frozen.tensors, new_mismatches=wrong["frozen"]
            )
        checks = sum(watched.sentinel.checks for watched in self._optimizers)
        rewritten = sum(watched.sentinel.rewritten for watched in self._optimizers)
        self.report.watched("trained", checks=checks, rewritten=rewritten, new_mismatches=wrong["trained"])
        if not changes:
            return
        self.report.add("batches", mismatches=wrong["batches"])
        for change in changes:
            row = {"step": self.step, "stage": change.stage, "tensor": change.name, "kind": change.kind}
            self.report.incident({**row, "outcome": "stopped"})
        names = listed([change.name for change in changes])
        raise MemoryFaultError(f"{_WHAT[changes[0].stage]} {changes[0].kind} ({when}): {names}", _ADVICE)

    # ---- batches --------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The batches of a loader, on the device and verified; the next one crosses while this one is used."""
        return Batches(self, loader)

    def begin(self, batch: Any) -> Any:
        """Start the transfer of a nested batch, see `Mover.begin`; `deliver` gives what may be used."""
        return self._mover.begin(map_tensors(batch, self._place_unusual))

    def deliver(self, batch: Any) -> Any:
        """Wait until a batch that was begun is verified, and check it again after its use."""
        self._mover.wait_verified(batch)
        self._used_batches.use(batch)
        return batch

    def _place_unusual(self, tensor: Tensor) -> Tensor:
        """Sparse and quantised tensors have no plain bytes: torch copies their parts, which are verified."""
        if tensor.device.type == "cpu" and not_plain(tensor):
            return tensor.to(self.device)  # device: verified at the dispatcher
        return tensor

    # ---- results --------------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any], directory: str | Path) -> None:
        """Save a state dict, or a mapping of them: written aside, read back, compared, renamed and sealed.

        A flat mapping of names to tensors becomes ``model.safetensors``; anything else ``state.pt``, which
        ``torch.load`` reads. ``integrity.json`` beside it holds sizes and SHA-256 digests. All that is watched is
        checked first.

        Raises:
            UsageError: the directory exists and was not saved by this package.
            CorruptionError: the file does not hold the state.
        """
        self.check()
        save_result(state, Path(directory), step=self.step)

    def write_report(self, directory: str | Path) -> Path:
        """Write ``transfer_report.json``: what crossed, what of it was verified, who asked for it, incidents."""
        target = Path(directory) / REPORT_NAME
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(target, to_json(self.describe()))
        return target

    def describe(self) -> dict[str, Any]:
        """The content of the report."""
        counters = self.report.to_dict()
        return {
            "schema": SCHEMA,
            "verify": self._mover.settings.verify,
            "fault_injection": self._mover.fault_injection(),
            "device": str(self.device),
            "copies_on_card": copies_on_card(),
            "digest": {"host": asdict(host_method()), "device": asdict(device_method(self.device))},
            "versions": {"torch": torch.__version__},
            "steps": self.step,
            "coverage": coverage_of(counters),
            **counters,
        }

    # ---- end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop verifying and watching. Does nothing the second time."""
        self.forget()
        self._mover.close()

    def __enter__(self) -> VerifiedTransfers:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
        if error is None:
            self._raise_failure()
        self._mover.raise_swallowed(error)


class Batches:
    """A loader's batches, each verified before it is handed out. Its length is the loader's."""

    def __init__(self, transfers: VerifiedTransfers, loader: Iterable[Any]) -> None:
        self._transfers, self.loader = transfers, loader

    def __iter__(self) -> Iterator[Any]:
        transfers, under_way = self._transfers, []
        for batch in self.loader:
            under_way.append(transfers.begin(batch))
            if len(under_way) == 2:
                yield transfers.deliver(under_way.pop(0))
        for batch in under_way:
            yield transfers.deliver(batch)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises its own TypeError


class _WatchedOptimizer:
    """An optimizer with torch's public hooks before and after its step. It is not kept alive."""

    def __init__(self, optimizer: Optimizer, transfers: VerifiedTransfers) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.sentinel = TrainedSentinel(weakref.proxy(optimizer), excuse_writes=True)
        self.is_captured = False  # its updates are in a graph
        owner = weakref.ref(transfers)

        def before(*_: Any) -> None:
            transfers = owner()
            if transfers is not None:
                transfers.before_update(self)

        def after(*_: Any) -> None:
            transfers = owner()
            if transfers is not None:
                transfers.after_update(self)

        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        self.take()

    def parameters(self) -> Iterator[Tensor]:
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return (parameter for group in groups for parameter in group["params"])

    def take(self) -> None:
        for parameter in self.parameters():
            watch_writes(local(parameter))
        self.sentinel.take()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _FrozenWeights(FrozenSentinel):
    """Frozen weights of a program that may rewrite them on purpose: what it writes is the new baseline."""

    def __init__(self, list_tensors: Callable[[], Iterator[Listed]], period: int, mover: Mover) -> None:
        self._mover = mover
        self._written: dict[str, tuple[int, tuple[int, int]]] = {}  # storage and version, by name
        self._as_arrived: set[int] = set()  # storages to which nothing has been written since they were made
        for name, tensor, _ in list_tensors():
            watch_writes(tensor)
            self._written[name] = storage, version = _state_of(tensor)
            if version == (0, 0):
                self._as_arrived.add(storage)
        super().__init__(list_tensors, period, self._arrived_with, self._explained)

    def _arrived_with(self, data: Tensor) -> Digest | None:
        """The digest with which a weight arrived, unless the program may have written to it since."""
        return self._mover.digest_of(data) if data.untyped_storage()._cdata in self._as_arrived else None

    def _explained(self, name: str, tensor: Tensor, same: bool) -> str | None:
        now = _state_of(tensor)
        before, self._written[name] = self._written.get(name), now
        watch_writes(tensor)
        if before is None:
            return "added by the program"
        if same or before != now:
            self._mover.report.rebaselined(name, "written by the program", self._mover.step)
            return "written by the program"
        return None


def _state_of(tensor: Tensor) -> tuple[int, tuple[int, int]]:
    return tensor.untyped_storage()._cdata, version_of(tensor)


def _innermost(optimizer: Any) -> Any:
    """The optimizer within wrappers such as Accelerate's, which has the hooks."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r}: {str(error).splitlines()[0]}") from error
    if checked.type not in ("cuda", "cpu"):
        raise UsageError(f"device {device!r}: give cuda (HIP too), cuda:1 ... or cpu")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r}: torch sees no GPU here; run hf-rocm-tune doctor, or give cpu")
    return checked
