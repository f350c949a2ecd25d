"""Faults on purpose, and what became of each: found or not, put right, stopped, or used unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from hf_rocm_tune.doctor.catalogue import SLOT_BYTES, Cell, Samples, cells
from hf_rocm_tune.doctor.poisoned import poisoned
from hf_rocm_tune.doctor.sending import Listener, begin, same_bytes
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest
from hf_rocm_tune.transfer.raw_bytes import byte_count

TARGET = "target"
"""The name of the tensor that is harmed. In a batch, its neighbours must stay right."""


@dataclass(kw_only=True)
class Tally:
    """Counts of one kind of fault, transient or persistent.

    Attributes:
        injected: transfers whose bytes were really changed; a fault that leaves them as they are is not one.
        detected: of these, those that were reported with the tensor's name.
        recovered: reported, and the right bytes were there in the end.
        stopped: refused with an error, and nothing of it counted as verified.
        missed: not reported, or wrong bytes that counted as verified.
        false_alarms: reports of neighbours that nobody had harmed.
    """

    injected: int = 0
    detected: int = 0
    recovered: int = 0
    stopped: int = 0
    missed: int = 0
    false_alarms: int = 0


@dataclass(kw_only=True)
class InjectedFaults:
    """All tallies, by kind of fault and whether retries were hit too, and what the faults were spread over."""

    tallies: dict[tuple[str, bool], Tally] = field(default_factory=dict)
    stages: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)

    def total(self) -> Tally:
        """The sum of all tallies."""
        names = vars(Tally())
        return Tally(**{name: sum(getattr(tally, name) for tally in self.tallies.values()) for name in names})

    @property
    def unrecovered(self) -> int:
        """Faults that hit only once and were not put right, though they could have been."""
        on_the_way = (tally for (kind, persist), tally in self.tallies.items() if not persist and kind != "after")
        return sum(tally.detected - tally.recovered for tally in on_the_way)

    @property
    def good(self) -> bool:
        """Whether every fault was found, every transient one put right, and nothing else reported."""
        total = self.total()
        return total.detected == total.injected and not (total.missed or total.false_alarms or self.unrecovered)


def inject(device: torch.device, *, faults: int, seed: int, on_fault: Callable[[], None]) -> InjectedFaults:
    """Put faults into real transfers to a device until `faults` of them have changed bytes.

    Args:
        device: ``cuda`` or ``cpu``.
        faults: how many; they are spread evenly over `catalogue.cells`.
        seed: of what is sent and where it is harmed.
        on_fault: called after each.
    """
    found = InjectedFaults()
    samples = Samples(seed)
    with ExitStack() as stack:
        benches: dict[tuple[str, bool], _Bench] = {}
        for cell in cells():
            key = (cell.kind, cell.persist)
            if key not in benches:
                benches[key] = stack.enter_context(_Bench(device, cell, seed))
                found.tallies[key] = Tally()
        table = cells()
        quotas = [faults // len(table) + (number < faults % len(table)) for number in range(len(table))]
        for cell, quota in zip(table, quotas, strict=True):
            key = (cell.kind, cell.persist)
            for _ in range(quota):
                _one_fault(benches[key], cell, samples, found)
                on_fault()
    return found


class _Bench:
    """A mover whose transfers of `TARGET` are all harmed in one way."""

    def __init__(self, device: torch.device, cell: Cell, seed: int) -> None:
        spec = FaultSpec(kind=cell.kind, persist=cell.persist, seed=seed, tensor=TARGET)
        self.listener = Listener()
        settings, backend = TransferSettings(slot_bytes=SLOT_BYTES, slots=3), poisoned(device)
        self.mover = Mover(device, settings=settings, report=self.listener, faults=spec, backend=backend)

    @property
    def injected(self) -> int:
        return int((self.mover.fault_injection() or {})["injected"])

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.close()


def _one_fault(bench: _Bench, cell: Cell, samples: Samples, found: InjectedFaults) -> None:
    """Send until a fault has changed something: a swap in a tensor of one word, say, changes nothing."""
    tally = found.tallies[cell.kind, cell.persist]
    before = tally.injected
    while tally.injected == before:
        target = samples.tensor()
        if cell.kind == "after":
            _memory_fault(bench, target, tally)
        else:
            tensors = samples.batch(target, TARGET) if cell.stage == "batches" else {TARGET: target}
            _transfer_fault(bench, cell.stage, tensors, tally)
    found.stages[cell.stage] += 1
    found.dtypes[str(target.dtype).removeprefix("torch.")] += 1
    found.sizes[byte_count(target)] += 1


def _transfer_fault(bench: _Bench, stage: str, tensors: dict[str, torch.Tensor], tally: Tally) -> None:
    before, stopped = bench.injected, False
    arrived: dict[str, torch.Tensor] = {}
    try:
        arrived = begin(bench.mover, stage, tensors)
        bench.mover.settle(arrived)
    except CorruptionError:
        stopped = True
    rows = bench.listener.take()
    named = any(row["tensor"] == TARGET for row in rows)
    harmed = bench.injected > before
    wrong = [name for name, tensor in arrived.items() if not same_bytes(tensor, tensors[name])]
    vouched = any(bench.mover.was_verified(tensor) for tensor in arrived.values())
    tally.injected += harmed
    tally.detected += harmed and named
    tally.stopped += harmed and named and stopped
    tally.recovered += harmed and named and not stopped and not wrong
    tally.missed += (harmed and not named) or (vouched and (stopped or bool(wrong)))
    tally.false_alarms += sum(row["tensor"] != TARGET or not harmed for row in rows)


def _memory_fault(bench: _Bench, target: torch.Tensor, tally: Tally) -> None:
    """Right on arrival and harmed just after the verdict: found as the sentinel does it, by digesting it again."""
    before = bench.injected
    weight = bench.mover.move(target, name=TARGET)
    harmed = bench.injected > before
    differs = digest(weight) != bench.mover.digest_of(weight)
    tally.injected += harmed
    tally.detected += harmed and differs
    tally.missed += harmed and not differs
    tally.false_alarms += differs and not harmed
    tally.false_alarms += len(bench.listener.take())
