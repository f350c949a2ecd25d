"""Transfers and memory of one card: copies to it and back (``round_trip``), from mapped files (``mmap_heap``), casts
(``casts``), and memory that must not change while other memory is allocated and freed (``canaries``).

Injected faults: those of ``transfer.damage``, with ``where=to cuda:0`` for copies to the card, ``where=back`` for those
from it, ``where=non_blocking`` or ``where=torch.bfloat16`` for some casts; ``slow`` delays the mapped copy; in the
second cycle, ``zeros`` zeroes a range of a canary and ``flip`` flips one bit.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_rocm_tune.doctor.canaries import Canaries, CanarySettings, watch
from hf_rocm_tune.doctor.drill import DTYPES
from hf_rocm_tune.doctor.findings import Again, Finding, from_row, problem_lines, size_words, with_evidence
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.damage import (
    POISON,
    Copies,
    Damage,
    copies_for,
    count_wrong,
    examine,
    fill_with_pattern,
    wait_for,
)
from hf_rocm_tune.transfer.raw_bytes import typed_view

SIZES = (1, 3, 255, 4096, 4097, 65_536, (1 << 20) - 4, (1 << 20) + 4, 2 << 20, (20 << 20) + 4, 64 << 20, 256 << 20)
"""Bytes. At 1 MiB HIP changes the engine of copies between cards; 2 and 20 MiB are sizes of pages and segments."""
VERDICTS = ("source", "read_back", "not_written", "sending", "memory", "mapping", "device_only")
"""Each has a row ``round_trip_VERDICT``; see `_RoundTrip._verdict`."""
STALL_RATIO = 20
"""Bound on the time from a mapped file over that from the heap; reported were 5 s against 4 ms (ROCm/ROCm#6523)."""
_DTYPE_BYTES = 16 * 6001
_REPEATED_BYTES = 1 << 20
_KEPT_PROBLEMS = 12
_FIRST_MIB, _MIB = 8, 32
_ROUNDS = 3
_LONG_SECONDS, _SLOW_SECONDS = 1.0, 1.5

_CASTS = tuple(itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2))
CAST_WAYS = (
    "on the device",
    "to the device, blocking",
    "to the device, non_blocking",
    "from the device, blocking",
    "from the device, non_blocking",
)
_POISONED = -21.5
"""Content of the destination before a cast: any value that is exact in all three dtypes."""
_PATTERNS = 1 << 16
_VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor[1:],
    lambda tensor: tensor[3:-2],
    lambda tensor: tensor[::2],
    lambda tensor: tensor[5:6],
    lambda tensor: tensor[: tensor.numel() // 7 * 7].view(7, -1).t(),
)

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_REPORTED_CYCLE = 144
"""The cycle in which the RX 7900 XT of ROCm/ROCm#6603 failed."""
_FAULTY_CYCLE = 2


@dataclass(frozen=True, kw_only=True)
class CopyCase:
    """One kind of copy.

    Attributes:
        dtype: of the copied tensors.
        pinned: the source is page-locked.
        non_blocking: as torch's.
        strided: the source is every second element of a larger tensor.
        skew: offset of source and destination from an aligned address, in bytes.
        reused: the destination is that of the case before.
        label: prefix of the description.
    """

    nbytes: int
    dtype: torch.dtype = torch.uint8
    pinned: bool = False
    non_blocking: bool = False
    strided: bool = False
    skew: int = 0
    reused: bool = False
    label: str = ""

    @property
    def keep(self) -> int:
        """Mask of the bits that are sent: torch may normalise a bool that is neither 0 nor 1."""
        return 1 if self.dtype is torch.bool else 0xFF

    def __str__(self) -> str:
        parts = [f"{self.nbytes:,} bytes of {str(self.dtype).removeprefix('torch.')}"]
        parts += ["page-locked" if self.pinned else "pageable"]
        parts += [name for name in ("non_blocking", "strided", "reused") if getattr(self, name)]
        parts += [f"offset by {self.skew} bytes"] if self.skew else []
        return f"{self.label} {', '.join(parts)}".strip()


def round_trip(request: Mapping[str, Any]) -> list[Finding] | Again:
    """Copy to the device and back: one finding if all bytes are correct, else one for each verdict.

    If bytes are wrong on ROCm, another process repeats the check without the copy engines (SDMA), to find the cause.

    Args:
        request: ``repeats``: number of copies of the repeated case; ``largest``: bytes of the largest case;
            ``first``: the findings of the process that found wrong bytes.
    """
    device, name = device_of(request), request["device"]
    trial = _RoundTrip(device, copies_for(request))
    problems: list[dict[str, Any]] = []
    left_out: list[str] = []
    wrong = cases = nbytes = 0
    for number, case in enumerate(_cases(request["largest"], request["repeats"])):
        step(f"sending {case} to {device} and back")
        try:
            problem = trial.problem(case, number)
        except NotImplementedError:  # torch may have a dtype without copies of it on this device
            left_out.append(str(case))
            continue
        cases, nbytes, wrong = cases + 1, nbytes + case.nbytes, wrong + (problem is not None)
        if problem is not None and len(problems) < _KEPT_PROBLEMS:
            problems.append(problem)
    if request["first"]:
        result = f"{wrong} wrong" if wrong else "none wrong, so the copy engines or their driver are involved"
        return with_evidence(request["first"], f"with HSA_ENABLE_SDMA=0: {result}")
    total = f"{cases} cases, {size_words(nbytes)} there and back twice"
    lines = [f"wrong: {wrong} of {total}" if wrong else total]
    lines += [f"not tried, torch has no such copy: {'; '.join(left_out)}"] if left_out else []
    if not wrong:
        return [from_row("round_trip_right", subject=name, evidence=lines)]
    findings = []
    for verdict in VERDICTS:
        of_it = [problem for problem in problems if problem["verdict"] == verdict]
        if of_it:
            findings.append(from_row(f"round_trip_{verdict}", subject=name, evidence=[*problem_lines(of_it), *lines]))
    if not request.get("hip"):
        return findings
    return Again(findings=findings, environ={"HSA_ENABLE_SDMA": "0"}, words="with HSA_ENABLE_SDMA=0")


def _cases(largest: int, repeats: int) -> Iterator[CopyCase]:
    sizes = [size for size in SIZES if size <= largest]
    # The first copy of this process.
    yield CopyCase(nbytes=sizes[-1], label="cold:")
    for size in sizes:
        for pinned in (False, True):
            for non_blocking in (False, True):
                yield CopyCase(nbytes=size, pinned=pinned, non_blocking=non_blocking)
    for dtype in DTYPES:
        yield CopyCase(nbytes=_DTYPE_BYTES, dtype=dtype)
        yield CopyCase(nbytes=_DTYPE_BYTES, dtype=dtype, pinned=True, non_blocking=True)
    nbytes = min(_REPEATED_BYTES, largest)
    for dtype in (torch.int16, torch.int32):
        for non_blocking in (False, True):
            yield CopyCase(nbytes=nbytes, dtype=dtype, non_blocking=non_blocking, strided=True)
    for skew in (1, 3, 4):
        for pinned in (False, True):
            yield CopyCase(nbytes=nbytes - 5, pinned=pinned, non_blocking=pinned, skew=skew)
    for number in range(repeats):
        label = f"repeat {number + 1}:"
        yield CopyCase(nbytes=nbytes, non_blocking=number % 2 == 1, reused=number % 4 > 1, label=label)


class _RoundTrip:
    """Copies to one device and back.

    For each case, the destination is filled with poison, and a pattern that differs at every position is copied to it.
    The device counts wrong bytes, and the bytes are read back twice into poisoned memory, pageable and page-locked.
    """

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self._device, self._copies = device, copies
        self._destination = torch.empty(0, dtype=torch.uint8)
        self._earlier: Tensor | None = None

    def problem(self, case: CopyCase, number: int) -> dict[str, Any] | None:
        """None if all bytes are correct, else the case, the verdict and the damage."""
        source = self._host(case.nbytes, pinned=case.pinned and not case.skew)
        fill_with_pattern(source, number, keep=case.keep)
        destination = self._place(case)
        self._send(case, source, destination)
        on_device = count_wrong(destination, number, keep=case.keep)
        reads = [self._read(case, destination, pinned=pinned) for pinned in (False, True)]
        damages = [examine(read, source, earlier=self._earlier) for read in reads]
        self._earlier = source
        if not on_device and not any(damages):
            return None
        shown = next((damage for damage in damages if damage is not None), None)
        if count_wrong(source, number, keep=case.keep):
            verdict = "source"
        elif not torch.equal(*reads):
            verdict = "read_back"
        else:
            verdict = self._verdict(case, source, destination, on_device, shown)
        damage = None if shown is None else {**asdict(shown), "kind": shown.kind}
        return {"case": str(case), "verdict": verdict, "damage": damage}

    def _verdict(
        self, case: CopyCase, source: Tensor, destination: Tensor, on_device: int, shown: Damage | None
    ) -> str:
        """What is wrong, if the source is correct and both readbacks agree.

        ``not_written``: the destination still has its poison; ``device_only``: the readback is correct, and the device
        counts wrong bytes; ``mapping``: the device counts none, and the readback is wrong; ``sending``: both are wrong,
        and correct after another copy; ``memory``: wrong again.
        """
        if shown is None:
            return "device_only"
        if not on_device:
            return "mapping"
        if shown.kind == "poison":
            return "not_written"
        self._send(case, source, destination.fill_(POISON))
        return "sending" if examine(self._read(case, destination, pinned=False), source) is None else "memory"

    def _send(self, case: CopyCase, source: Tensor, destination: Tensor) -> None:
        sent = source
        if case.skew:
            sent = self._host(case.nbytes + case.skew, pinned=case.pinned)[case.skew :]
            sent[:] = source
        sent = _typed(sent, case.dtype)
        if case.strided:
            apart = torch.empty(sent.numel(), 2, dtype=case.dtype)
            apart[:, 0] = sent
            sent = apart[:, 0]
        what = f"{case} to {self._device}"
        self._copies.copy(_typed(destination, case.dtype), sent, what=what, non_blocking=case.non_blocking)
        wait_for(destination)

    def _read(self, case: CopyCase, destination: Tensor, *, pinned: bool) -> Tensor:
        """Read back, blocking into pageable or non-blocking into page-locked memory."""
        read = self._host(case.nbytes, pinned=pinned).fill_(POISON)
        what = f"{case} back from {self._device} to {'page-locked' if pinned else 'pageable'} memory"
        self._copies.copy(read, destination, what=what, non_blocking=pinned)
        wait_for(destination)
        return read

    def _place(self, case: CopyCase) -> Tensor:
        if not case.reused or self._destination.numel() != case.nbytes:
            whole = torch.empty(case.nbytes + case.skew, dtype=torch.uint8, device=self._device)
            self._destination = whole[case.skew :]
        self._destination.fill_(POISON)
        wait_for(self._destination)
        return self._destination

    def _host(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and self._device.type == "cuda")


def _typed(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    return typed_view(buffer, 0, dtype, (buffer.numel() // dtype.itemsize,))


def mmap_heap(request: Mapping[str, Any]) -> list[Finding]:
    """Copy a tensor to the card from a mapped file and from the heap, and compare the times.

    On some kernels the mapped one takes a thousand times as long (ROCm/ROCm#6523).
    """
    device, name = device_of(request), request["device"]
    slow = (request.get("fault") or {}).get("kind") == "slow"
    copies = copies_for(request)

    def once(file: Path) -> tuple[float, float, float, int]:
        """Seconds from a new mapping, from the heap and by our mover, and the number of wrong bytes of the first."""
        with safe_open(file, framework="pt") as opened:
            mapped, arrived = _timed(copies, opened.get_tensor("weight"), "a mapped tensor", device)
        with safe_open(file, framework="pt") as opened:
            heap, _ = _timed(copies, opened.get_tensor("weight").clone(), "a tensor on the heap", device)
        return mapped + slow * _SLOW_SECONDS, heap, _moved(file, device), count_wrong(arrived, 0)

    directory = _directory()
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-doctor-", dir=directory) as folder:
        mib, file = _FIRST_MIB, write_tensor(Path(folder), _FIRST_MIB)
        with safe_open(file, framework="pt") as opened:  # the first copy of a process starts the runtime
            _timed(copies, opened.get_tensor("weight").clone(), "a tensor on the heap", device)
        rounds = [once(file)]
        # On a kernel that stalls, 8 MiB take seconds, and more need not be measured.
        if rounds[0][0] < _LONG_SECONDS:
            mib, file = _MIB, write_tensor(Path(folder), _MIB)
            rounds = [once(file) for _ in range(_ROUNDS)]
    mapped, heap, moved, _ = (statistics.median(column) for column in zip(*rounds, strict=True))
    wrong, ratio = sum(one[3] for one in rounds), mapped / heap
    evidence = [
        f"{mib} MiB to {name}: {1000 * mapped:.1f} ms from a mapped file in {directory}, "
        f"{1000 * heap:.1f} ms from the heap",
        f"the same mapped tensor through this project's page-locked slots: {1000 * moved:.1f} ms",
    ]
    if wrong:
        return [from_row("mapped_file_wrong", subject=name, evidence=evidence, wrong=wrong)]
    row = "mapped_file_stall" if ratio > STALL_RATIO else "mapped_file_fast"
    values = {"mib": mib, "mapped_ms": 1000 * mapped, "heap_ms": 1000 * heap, "ratio": ratio}
    return [from_row(row, subject=name, evidence=evidence, **values)]


def _timed(copies: Copies, tensor: Tensor, what: str, device: torch.device) -> tuple[float, Tensor]:
    step(f"copying {what} of {tensor.nbytes >> 20} MiB to {device}")
    destination = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    wait_for(destination)
    began = time.perf_counter()
    copies.copy(destination, tensor, what=f"{what} to {device}")
    wait_for(destination)
    return time.perf_counter() - began, destination


def _moved(file: Path, device: torch.device) -> float:
    """Seconds of a verified transfer from a new mapping by our mover, as weights are loaded."""
    step(f"moving a mapped tensor to {device} through page-locked slots")
    with safe_open(file, framework="pt") as opened, Mover(device) as mover:
        mover.move(fill_with_pattern(torch.empty(1 << 20, dtype=torch.uint8), 1), name="first")
        began = time.perf_counter()
        wait_for(mover.move(opened.get_tensor("weight"), name="weight"))
        return time.perf_counter() - began


def write_tensor(folder: Path, mib: int) -> Path:
    """Write a safetensors file with one tensor of a known pattern to the disk."""
    file = folder / f"{mib}.safetensors"
    save_file({"weight": fill_with_pattern(torch.empty(mib << 20, dtype=torch.uint8), 0)}, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())  # like a model's file: on the disk, and its pages in the page cache
    return file


def _directory() -> str:
    """A directory on a disk: the temporary one is in memory on many machines, and is mapped differently."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()


def casts(request: Mapping[str, Any]) -> list[Finding]:
    """Casts on the device and during copies to and from it, compared with those of the CPU, bit for bit.

    Weights are cast on the device after they were verified, so a wrong conversion kernel would act after the last
    digest (pytorch#16448 was one that gave zeros). A copy that changes the dtype is cast by the CPU if it is blocking
    and by the device if it is not (torch's Copy.cu), so both are tried. Every 16-bit pattern is cast, and float32 with
    every exponent and sign. Odd sizes and unaligned views take other paths of vectorised kernels. NaN are equal
    whatever their payload, which differs between processors.
    """
    device, copies = device_of(request), copies_for(request)
    step(f"casting on {device}, and to and from it")
    compared = elements = wrong = 0
    example = ""
    with Mover(device) as mover:
        for source, target in _CASTS:
            for values in _cast_sources(source):
                arrived = mover.move(values, name=f"{source} values")
                for view, way in itertools.product(_VIEWS, CAST_WAYS):
                    what = f"{source} to {target} {way}"
                    from_host = view(values if way.startswith("to") else arrived)
                    found, expected = _cast(copies, from_host, target, way, what, device), view(values).to(target)
                    differs = _differs(found, expected)
                    compared, elements, wrong = compared + 1, elements + expected.numel(), wrong + int(differs.sum())
                    if not example and bool(differs.any()):
                        example = f"{what}: {float(found[differs][0])} instead of {float(expected[differs][0])}"
    evidence = [f"{elements:,} elements in {compared} casts, {wrong:,} differ"]
    evidence += [f"the first: {example}"] if wrong else []
    return [from_row("casts_wrong" if wrong else "casts_right", subject=request["device"], evidence=evidence)]


def _cast(copies: Copies, source: Tensor, dtype: torch.dtype, way: str, what: str, device: torch.device) -> Tensor:
    """A tensor on the host or the device, cast in one of `CAST_WAYS`; returned on the host."""
    place = torch.device("cpu") if way.startswith("from") else device
    target = torch.full(source.shape, _POISONED, dtype=dtype, device=place)
    copies.copy(target, source, what=what, non_blocking=way.endswith("non_blocking"))
    wait_for(target, source)
    return target.cpu()


def _cast_sources(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every 16-bit pattern, for float32 as the upper half with random lower halves; in an even and an odd length."""
    bits = torch.arange(_PATTERNS, dtype=torch.int32)
    if dtype is torch.float32:
        lower = torch.randint(0, _PATTERNS, (4, _PATTERNS), generator=torch.Generator().manual_seed(0)).int()
        # Lower halves that decide the rounding: zero, and just below, at and just above the middle.
        edges = torch.tensor([[0], [0x7FFF], [0x8000], [0x8001]], dtype=torch.int32).expand(4, _PATTERNS)
        bits = (bits << 16 | torch.cat((lower, edges))).flatten()
    else:
        bits = bits.to(torch.int16)
    return bits.view(dtype), bits[:-1].view(dtype)


def _differs(found: Tensor, expected: Tensor) -> Tensor:
    integers = torch.int32 if expected.element_size() == 4 else torch.int16
    same = found.contiguous().view(integers) == expected.contiguous().view(integers)
    return ~(same | (found.isnan() & expected.isnan()))


def canaries(request: Mapping[str, Any]) -> list[Finding] | Again:
    """Watch unused memory while other memory is allocated and freed.

    If it changes, another process repeats the check without the user's allocator settings.

    Args:
        request: ``cycles``: at most; ``seconds`` after which no cycle begins; ``share`` of the free memory that is
            allocated and freed; ``first``: the findings of the process that found a change.
    """
    device = device_of(request)
    settings = CanarySettings.for_device(device, cycles=request["cycles"], share=request["share"])
    fault_kind, run = (request.get("fault") or {}).get("kind"), 0

    def on_cycle(cycle: int, canaries: Canaries) -> None:
        nonlocal run
        run = cycle
        step(f"allocating and freeing memory beside canaries on {device}, cycle {cycle}")
        victim = canaries.blocks[-1].view(torch.uint8)
        if fault_kind == "zeros" and cycle == _FAULTY_CYCLE:
            victim[8192 : 8192 + 4096] = 0
        elif fault_kind == "flip" and cycle == _FAULTY_CYCLE:
            victim[12_345] ^= 16

    fault = watch(device, settings, on_cycle=on_cycle, seconds=request["seconds"])
    if request["first"]:
        result = f"stable for {run} cycles" if fault is None else f"changed in cycle {fault.cycle} too"
        return with_evidence(request["first"], f"without allocator settings: {result}")
    sizes = (
        f"{settings.canaries} canaries of {size_words(settings.canary_bytes)} beside up to "
        f"{size_words(settings.churn_bytes)} that were allocated and freed, {run} cycles"
    )
    if fault is None:
        row = "canaries_held" if request["cycles"] > _REPORTED_CYCLE else "canaries_held_for_now"
        return [from_row(row, subject=request["device"], evidence=[sizes], cycles=run)]
    kinds = {"zeros": "zeros", "churn": "bytes of another block", "canary": "bytes of another canary"}
    line = (
        f"cycle {fault.cycle}, canary {fault.canary}: {fault.length:,} wrong bytes from offset "
        f"{fault.first_offset:,} (a multiple of {size_words(fault.alignment)}), "
        f"{kinds.get(fault.kind, fault.kind)}; read twice: {'the same' if fault.stable else 'not the same'}"
    )
    row = "canaries_changed" if fault.stable else "canaries_read_unstable"
    findings = [from_row(row, subject=request["device"], evidence=[line, sizes], cycles=run)]
    return Again(findings=findings, environ=dict.fromkeys(_ALLOCATOR_VARIABLES), words="without allocator settings")
