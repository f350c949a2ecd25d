"""``hf-rocm-tune doctor --drill``: faults of every kind injected into real transfers on the user's device, and whether
they are detected.

The transfers use the same mover, ring, digests and retries as a run; faults are injected into copies, at the backend.
What arrived is compared byte by byte, in memory that was poisoned before: allocators reuse memory, so memory that was
never written may hold the correct bytes of an earlier transfer. Not covered: the libraries above the mover (real runs
under ``HF_ROCM_TUNE_FAULT``), speed (``benchmarks/transfer.py``), casts and memory at rest (``doctor``).
"""

from __future__ import annotations

import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.transfer import (
    STAGES,
    AcceleratorBackend,
    Backend,
    FaultSpec,
    HostBackend,
    Mover,
    TransferSettings,
    digest,
)
from hf_rocm_tune.transfer.damage import POISON
from hf_rocm_tune.transfer.faults import KINDS
from hf_rocm_tune.transfer.raw_bytes import as_bytes, typed_view

SLOT_BYTES = 16 << 10
"""Bytes of a staging slot in the drill: small, so that tensors of several chunks are sent fast."""
SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 255, 256, 257, 1023, 4095, 4096, 4097),
    *(SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES + 1, 5 * SLOT_BYTES + 3),
)
"""Bytes: one, words and their tails, the alignment in a batch, and around the size of a slot."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)
CELLS = (
    *((kind, persist, stage) for kind in KINDS if kind != "after" for persist in (False, True) for stage in STAGES),
    ("after", False, "weights"),
)
"""Kind of fault, whether it affects retries, too, and stage. ``after`` corrupts a weight that was verified."""
COUNTS = ("injected", "detected", "recovered", "stopped", "missed", "false alarms")
"""Transfers whose bytes were changed (a fault without an effect does not count); of these, those that were reported
with the tensor's name; reported, and correct at the end; ended by an error, and nothing counted as verified; not
reported, or wrong bytes that counted as verified. Last: reports of tensors without a fault."""
_TARGET = "target"  # the tensor with the fault; in a batch, its neighbours must arrive correctly
_POOL_BYTES = 1 << 20
_ORDINARY_BYTES = 1024
_LARGE_EVERY = 50

Tally = Counter[str]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Drill:
    """The result of a drill."""

    device: str
    seed: int
    faults: Mapping[tuple[str, bool], Tally]  # of each kind and persistence, the `COUNTS`
    # of transfers without an injected fault: ``transfers``; ``false alarms``: reports of tensors whose bytes were
    # correct when read back; ``corrupted``: whose bytes were wrong, so this machine corrupts transfers; ``missed``:
    # tensors that counted as verified and were wrong when read back
    clean: Tally
    example: str  # the first report of a clean transfer, or empty
    seconds: float

    @property
    def total(self) -> Tally:
        return sum(self.faults.values(), Counter())

    def failures(self) -> list[str]:
        """Counts of missed faults, false alarms and the like, one text each; empty if there are none."""
        # Faults that occur once can be recovered from, except in memory at rest.
        once = [tally for (kind, persist), tally in self.faults.items() if not persist and kind != "after"]
        counts = {
            "faults missed": self.total["missed"] + self.clean["missed"],
            "faults that occurred once not recovered": sum(tally["detected"] - tally["recovered"] for tally in once),
            "false alarms": self.total["false alarms"] + self.clean["false alarms"],
            f"transfers corrupted by this machine itself (the first: {self.example})": self.clean["corrupted"],
        }
        return [f"{count:,} {what}" for what, count in counts.items() if count]

    def to_dict(self) -> dict[str, Any]:
        def counts(tally: Tally, names: Iterable[str] = COUNTS) -> dict[str, int]:
            return {name: tally[name] for name in names}

        rows = [{"kind": kind, "persist": persist, **counts(tally)} for (kind, persist), tally in self.faults.items()]
        about = {"device": self.device, "seed": self.seed, "torch": torch.__version__}
        clean = counts(self.clean, ("transfers", "false alarms", "corrupted", "missed"))
        result = {"faults": rows, "faults_total": counts(self.total), "clean": clean}
        return {"schema": 3, **about, "failures": self.failures(), **result, "seconds": round(self.seconds, 1)}

    def table(self) -> str:
        """The table of faults, and lines on clean transfers and on the verdict."""
        lines = [
            f"drill on {self.device}, seed {self.seed}, {self.seconds:.0f} s\n",
            f"{'fault':<11} {'hits':<6}" + "".join(f"{name:>13}" for name in COUNTS),
        ]
        rows = []
        for (kind, persist), tally in self.faults.items():
            rows.append((kind, "always" if persist else "once", tally))
        rows.append(("all", "", self.total))
        for kind, hits, tally in rows:
            cells = {name: f"{tally[name]:,}" for name in COUNTS}
            if kind == "after":  # it is found by a sentinel's digest; a run recovers or stops then
                cells |= dict.fromkeys(COUNTS[2:4], "-")
            lines.append(f"{kind:<11} {hits:<6}" + "".join(f"{cell:>13}" for cell in cells.values()))
        counts = ", ".join(f"{self.clean[name]} {name}" for name in ("false alarms", "corrupted", "missed"))
        verdict = "; ".join(self.failures()) or "every fault was found, without a false alarm"
        lines += [f"\nclean        {self.clean['transfers']:,} transfers: {counts}", f"verdict      {verdict}"]
        return "\n".join(lines)


def run(device: str | None, *, faults: int = 2000, clean: int = 5000, seed: int = 0) -> Drill:
    """Run a drill. Shows a progress bar on a terminal; writes nothing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no accelerator; drill on the CPU with --device cpu")
    if not device:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    name = f"cpu ({platform.processor() or platform.machine()})"
    if target.type == "cuda":
        platform_name = "hip" if torch.version.hip else "cuda"
        name = f"{platform_name} ({torch.cuda.get_device_name(target)})"
    began = time.perf_counter()
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        advance = partial(bar.advance, bar.add_task("faults", total=faults))
        injected = inject(target, faults=faults, seed=seed, on_fault=advance)
        advance = partial(bar.advance, bar.add_task("clean transfers", total=clean))
        sent, example = send_clean(target, transfers=clean, seed=seed, on_transfer=advance)
    seconds = time.perf_counter() - began
    return Drill(device=name, seed=seed, faults=injected, clean=sent, example=example, seconds=seconds)


class Samples:
    """Seeded host tensors: random bytes, token ids, and masks of ones, contiguous or strided, at any address."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
        ids = torch.randint(1, 32_000, (_POOL_BYTES // 8,), generator=generator)
        mask = torch.ones(_POOL_BYTES // 8, dtype=torch.int64)
        self._pools = [noise, noise, ids.view(torch.uint8), mask.view(torch.uint8)]
        self._bools = torch.randint(0, 2, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
        self._dtypes = self._shuffled(DTYPES)
        self._sizes = self._shuffled(SIZES)

    def tensor(self, *, largest: int = SIZES[-1]) -> Tensor:
        """The next tensor, of about `largest` bytes at most; all dtypes and sizes occur equally often."""
        dtype = next(self._dtypes)
        nbytes = next(self._sizes)
        if self._rng.random() < 0.5:
            nbytes = int(2 ** self._rng.uniform(0, nbytes.bit_length()))
        count = max(min(nbytes, largest) // dtype.itemsize, 1)
        pool = self._bools if dtype is torch.bool else self._rng.choice(self._pools)
        offset = self._rng.randrange(_POOL_BYTES // dtype.itemsize - 2 * count) * dtype.itemsize
        if self._rng.random() < 0.25:
            return typed_view(pool, offset, dtype, (count, 2))[:, 0]
        return typed_view(pool, offset, dtype, (count,))

    def sent(self, stage: str, target: Tensor) -> dict[str, Tensor]:
        """The tensors of a transfer: in a batch, `target` is between two small neighbours."""
        if stage != "batches":
            return {_TARGET: target}
        return {"before": self.tensor(largest=300), _TARGET: target, "behind": self.tensor(largest=300)}

    def _shuffled(self, values: tuple[Value, ...]) -> Iterator[Value]:
        while True:
            yield from self._rng.sample(values, len(values))


def _taken(mover: Mover) -> list[dict[str, Any]]:
    """The incidents of the last transfer."""
    taken = mover.report._incidents
    mover.report._incidents = []
    return taken


def _mover(device: torch.device, faults: FaultSpec | None = None) -> Mover:
    """A mover that poisons device memory when it allocates it."""
    backend: Backend = AcceleratorBackend(device) if device.type == "cuda" else HostBackend()
    allocate = backend.allocate

    def poisoned(nbytes: int, *, long_lived: bool) -> Tensor:
        buffer = allocate(nbytes, long_lived=long_lived)
        backend.fill(buffer, POISON)  # an accelerator's on the copy stream
        return buffer

    backend.allocate = poisoned  # type: ignore[method-assign]
    settings = TransferSettings(slot_bytes=SLOT_BYTES, slots=3)
    return Mover(device, settings=settings, faults=faults, backend=backend)


def _send(mover: Mover, stage: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], CorruptionError | None]:
    """Send as a run does: a batch in one copy, else tensor by tensor. Returns what arrived and the final error."""
    arrived: dict[str, Tensor] = {}
    try:
        if stage == "batches":
            arrived = mover.begin(tensors)
        else:
            arrived = {name: mover.move(tensor, name=name, stage=stage) for name, tensor in tensors.items()}
        mover.wait_verified(arrived)
    except CorruptionError as error:
        return arrived, error
    return arrived, None


def _same_bytes(arrived: Tensor, source: Tensor) -> bool:
    return arrived.shape == source.shape and torch.equal(as_bytes(arrived.cpu()), as_bytes(source.contiguous()))


def inject(
    device: torch.device, *, faults: int, seed: int, on_fault: Callable[[], object]
) -> dict[tuple[str, bool], Tally]:
    """Inject faults into transfers until `faults` of them, evenly over `CELLS`, have changed bytes."""
    tallies: dict[tuple[str, bool], Tally] = {(kind, persist): Counter() for kind, persist, _ in CELLS}
    samples = Samples(seed)
    with ExitStack() as stack:
        movers = {
            key: stack.enter_context(_mover(device, FaultSpec(kind=key[0], persist=key[1], seed=seed, tensor=_TARGET)))
            for key in tallies
        }
        for number, (kind, persist, stage) in enumerate(CELLS):
            mover = movers[kind, persist]
            tally = tallies[kind, persist]
            fault = _memory_fault if kind == "after" else _transfer_fault
            wanted = tally["injected"] + faults // len(CELLS)
            if number < faults % len(CELLS):
                wanted += 1
            while tally["injected"] < wanted:
                # A fault may change nothing: a swap in a tensor of one word does not.
                before = tally["injected"]
                tally.update(fault(mover, samples.sent(stage, samples.tensor()), stage))
                if tally["injected"] > before:
                    on_fault()
    return tallies


def _injected(mover: Mover) -> int:
    return int((mover.fault_injection() or {})["injected"])


def _transfer_fault(mover: Mover, tensors: dict[str, Tensor], stage: str) -> Tally:
    before = _injected(mover)
    arrived, error = _send(mover, stage, tensors)
    stopped = error is not None
    rows = _taken(mover)
    changed = _injected(mover) > before
    named = any(row["tensor"] == _TARGET for row in rows)
    wrong = any(not _same_bytes(tensor, tensors[name]) for name, tensor in arrived.items())
    verified = any(mover.was_verified(tensor) for tensor in arrived.values())
    return Counter({
        "injected": int(changed),
        "detected": int(changed and named),
        "stopped": int(changed and named and stopped),
        "recovered": int(changed and named and not stopped and not wrong),
        "missed": int((changed and not named) or (verified and (stopped or wrong))),
        "false alarms": sum(row["tensor"] != _TARGET or not changed for row in rows),
    })  # fmt: skip


def _memory_fault(mover: Mover, tensors: dict[str, Tensor], stage: str) -> Tally:
    """A weight that is corrupted after its verdict is found by another digest, as the sentinel does."""
    before = _injected(mover)
    weight = mover.move(tensors[_TARGET], name=_TARGET)
    changed = _injected(mover) > before
    differs = digest(weight) != mover.digest_of(weight)
    return Counter({
        "injected": int(changed),
        "detected": int(changed and differs),
        "missed": int(changed and not differs),
        "false alarms": int(differs and not changed) + len(_taken(mover)),
    })  # fmt: skip


def send_clean(
    device: torch.device, *, transfers: int, seed: int, on_transfer: Callable[[], object], mover: Mover | None = None
) -> tuple[Tally, str]:
    """Send tensors of every dtype and size, through all stages in turn, and compare what arrived byte by byte.

    ``mover``: to use instead of a new one. Returns `Drill.clean` and the example.
    """
    tally: Tally = Counter()
    example = ""
    samples = Samples(seed + 1)
    rng = random.Random(seed)
    with mover or _mover(device) as sender:
        for number in range(transfers):
            # Most are small: the number of verdicts limits the rate of false alarms, not their bytes.
            largest = SIZES[-1] if rng.randrange(_LARGE_EVERY) == 0 else _ORDINARY_BYTES
            stage = STAGES[number % len(STAGES)]
            tensors = samples.sent(stage, samples.tensor(largest=largest))
            arrived, error = _send(sender, stage, tensors)
            if error and not example:
                example = str(error)
            for row in _taken(sender):
                if row["kind"] == "late":  # it was correct when read again, which may be a false verdict as well
                    tally["false alarms"] += 1
                else:
                    tally["corrupted"] += 1
                example = example or f"{row['stage']} tensor: {row['kind']}, {row['outcome']}"
            wrong = [name for name, tensor in arrived.items() if not _same_bytes(tensor, tensors[name])]
            tally["missed"] += len(wrong)
            tally["transfers"] += 1
            on_transfer()
    return tally, example
