"""Measured transfers and memory of one card: copies to it and back, casts, the rate of the link, and memory that must
not change while other memory is allocated and freed.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.drill import DTYPES
from hf_rocm_tune.doctor.findings import Finding, fail, ok, problem_lines, size_words, unknown, warn
from hf_rocm_tune.doctor.links import LinkRate
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.machine.gpus import read_upward
from hf_rocm_tune.machine.sysfs import Files
from hf_rocm_tune.transfer import Mover, digest, gb_per_s
from hf_rocm_tune.transfer.damage import (
    POISON,
    Copies,
    Damage,
    count_wrong,
    examine,
    fill_with_pattern,
    wait_for,
)
from hf_rocm_tune.transfer.raw_bytes import typed_view

# ---- copies to the card and back -----------------------------------------------------------------------------------

SIZES = (1, 3, 255, 4096, 4097, 65_536, (1 << 20) - 4, (1 << 20) + 4, 2 << 20, (20 << 20) + 4, 64 << 20, 256 << 20)
"""Bytes. At 1 MiB HIP changes the engine of copies between cards; 2 and 20 MiB are sizes of pages and segments."""
_DTYPE_BYTES = 16 * 6001
_REPEATED_BYTES = 1 << 20
_SETTINGS = (
    "unset expandable_segments and backend:*MallocAsync in all three ALLOC_CONF variables, and run the check again; "
    "then another kernel and driver"
)
_STOCK = (
    "undo overclocking, undervolting and amdgpu.ppfeaturemask; seat the card without a riser, in another slot; check "
    "the PCIe error counters"
)
# Title, text, fix and source of each verdict on a copy.
_VERDICTS = {
    "source": ("Bytes changed in host memory",
               "the source of a copy to {device} changed in host memory: the transfer is not the cause",
               "test the host's memory (memtest86+), and undo overclocking and memory profiles (EXPO, XMP)",
               "general knowledge, lower confidence"),
    "read_back": ("Two read-backs of the same bytes differ",
                  "memory of {device} was read back twice with different results: copies to the host are at fault",
                  f"{_STOCK}. If the check passes with HSA_ENABLE_SDMA=0, that is a workaround",
                  "rocm-libraries#12344; rocm-systems#5815; rocm-systems#1469"),
    "not_written": ("A copy reported success and wrote nothing",
                    "the destination on {device} kept its old content, read back twice", _SETTINGS,
                    "rocm-systems#11693; ROCm/ROCm#6123"),
    "sending": ("A copy to the card was wrong, and correct when repeated",
                "the content on {device} was wrong, and correct after the same copy again: it fails now and then",
                f"{_STOCK}. Training with --verify full recovers from this, and counts it",
                "ROCm/ROCm#6123; rocm-libraries#12344"),
    "memory": ("The card has other bytes than were sent",
               "the same wrong bytes were read back from {device} twice, also after another copy: memory, its mapping, "
               "or every copy of this kind is at fault", f"{_SETTINGS}; then other hardware",
               "ROCm/ROCm#6603; rocm-systems#10943; rocm-systems#11693"),
    "disagree": ("Card and host read other bytes at the same place",
                 "a kernel on {device} and the host do not agree: mapping, cache or kernel is wrong, or bytes are late",
                 f"see the measured checks of arithmetic; {_SETTINGS}", "rocm-systems#11693; ROCm/ROCm#6603"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CopyCase:
    """One kind of copy: ``strided``: the source is every second element of a larger tensor; ``reused``: the destination
    is that of the case before."""

    nbytes: int
    dtype: torch.dtype = torch.uint8
    pinned: bool = False
    non_blocking: bool = False
    strided: bool = False
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
        return f"{self.label} {', '.join(parts)}".strip()


def _cases(largest: int, repeats: int) -> Iterator[CopyCase]:
    sizes = [size for size in SIZES if size <= largest]
    nbytes = min(_REPEATED_BYTES, largest)
    yield CopyCase(nbytes=sizes[-1], label="cold:")  # the first copy of this process
    for size, pinned, non_blocking in itertools.product(sizes, (False, True), (False, True)):
        yield CopyCase(nbytes=size, pinned=pinned, non_blocking=non_blocking)
    for dtype, fast in itertools.product(DTYPES, (False, True)):
        yield CopyCase(nbytes=_DTYPE_BYTES, dtype=dtype, pinned=fast, non_blocking=fast)
    for dtype, non_blocking in itertools.product((torch.int16, torch.int32), (False, True)):
        yield CopyCase(nbytes=nbytes, dtype=dtype, non_blocking=non_blocking, strided=True)
    for number in range(repeats):
        label = f"repeat {number + 1}:"
        yield CopyCase(nbytes=nbytes, non_blocking=number % 2 == 1, reused=number % 4 > 1, label=label)


def round_trip(request: Mapping[str, Any]) -> list[Finding]:
    """Copy to the device and back: one finding if all bytes are correct, else one for each verdict.

    ``repeats``: number of copies of the repeated case; ``largest``: bytes of the largest case; ``seconds`` after which
    no case begins.
    """
    ends = time.monotonic() + request.get("seconds", math.inf)
    device = device_of(request)
    name = request["device"]
    trial = _RoundTrip(device, Copies())
    problems: dict[str, list[dict[str, Any]]] = {}
    cases = list(_cases(request["largest"], request["repeats"]))
    done = 0
    for number, case in enumerate(cases):
        if done and time.monotonic() >= ends:
            break
        done += 1
        step(f"sending {case} to {device} and back")
        verdict, damage = trial.judge(case, number)
        if verdict:
            problems.setdefault(verdict, []).append({"case": str(case), "damage": damage and asdict(damage)})
    left = ""
    if done < len(cases):
        left = f"; {len(cases) - done} cases were left out for time"
    lines = [f"{sum(map(len, problems.values()))} wrong of {done} cases, there and back twice{left}"]
    if not problems:
        text = f"on {name}, for all tested sizes, dtypes and kinds of copy, cold and warm{left}"
        return [ok("round_trip_right", "copies", text, "ROCm/ROCm#6123; rocm-systems#5815", subject=name, read=lines)]
    findings = []
    for verdict, of_verdict in problems.items():
        title, text, fix, source = _VERDICTS[verdict]
        read = [*problem_lines(of_verdict), *lines]
        findings.append(
            fail(f"round_trip_{verdict}", title, text.format(device=name), fix, source, subject=name, read=read)
        )
    return findings


class _RoundTrip:
    """Copies to one device and back.

    For each case, the destination is filled with poison, and a pattern that differs at every position is copied to it.
    The device counts wrong bytes, and the bytes are read back twice into poisoned memory, pageable and page-locked.
    """

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self._device = device
        self._copies = copies
        self._destination = torch.empty(0, dtype=torch.uint8)
        self._earlier: Tensor | None = None

    def judge(self, case: CopyCase, number: int) -> tuple[str, Damage | None]:
        """A key of `_VERDICTS`, or empty if all bytes are correct; and the damage that was read back."""
        source = self._host(case.nbytes, pinned=case.pinned)
        fill_with_pattern(source, number, keep=case.keep)
        if not case.reused or self._destination.numel() != case.nbytes:
            self._destination = torch.empty(case.nbytes, dtype=torch.uint8, device=self._device)
        self._send(case, source)
        on_device = count_wrong(self._destination, number, keep=case.keep)
        reads = [self._read(case, pinned=pinned) for pinned in (False, True)]
        damages = [examine(read, source, earlier=self._earlier) for read in reads]
        shown = next((damage for damage in damages if damage is not None), None)
        self._earlier = source
        if not on_device and shown is None:
            return "", None
        if count_wrong(source, number, keep=case.keep):
            return "source", shown
        if not torch.equal(*reads):
            return "read_back", shown
        if shown is None or not on_device:
            return "disagree", shown
        if shown.kind == "poison":
            return "not_written", shown
        self._send(case, source)
        return "sending" if examine(self._read(case, pinned=False), source) is None else "memory", shown

    def _send(self, case: CopyCase, source: Tensor) -> None:
        wait_for(self._destination.fill_(POISON))
        sent = _typed(source, case.dtype)
        if case.strided:
            apart = torch.empty(sent.numel(), 2, dtype=case.dtype)
            apart[:, 0] = sent
            sent = apart[:, 0]
        what = f"{case} to {self._device}"
        self._copies.copy(_typed(self._destination, case.dtype), sent, what=what, non_blocking=case.non_blocking)
        wait_for(self._destination)

    def _read(self, case: CopyCase, *, pinned: bool) -> Tensor:
        """Read back, blocking into pageable or non-blocking into page-locked memory."""
        read = self._host(case.nbytes, pinned=pinned).fill_(POISON)
        memory = "page-locked" if pinned else "pageable"
        what = f"{case} back from {self._device} to {memory} memory"
        self._copies.copy(read, self._destination, what=what, non_blocking=pinned)
        wait_for(self._destination)
        return read

    def _host(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and self._device.type == "cuda")


def _typed(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    return typed_view(buffer, 0, dtype, (buffer.numel() // dtype.itemsize,))


# ---- casts -----------------------------------------------------------------------------------------------------------

_VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor[1:-2],
    lambda tensor: tensor[: tensor.numel() // 7 * 7].view(7, -1).t(),
)


def casts(request: Mapping[str, Any]) -> list[Finding]:
    """Casts on the device, as of weights after they were verified, compared with those of the CPU, bit for bit.

    Every 16-bit pattern is cast, and float32 with every exponent and sign. NaN are equal whatever their payload, which
    differs between processors. Not covered: copies that cast on their way, which this package never makes.
    """
    device = device_of(request)
    name = request["device"]
    elements = 0
    wrong = 0
    example = ""
    with Mover(device) as mover:
        for source, target in itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2):
            step(f"casting {source} to {target} on {device}")
            values = _all_values(source)
            arrived = mover.move(values, name=f"{source} values")
            for view in _VIEWS:
                result = cast(view(arrived), target).cpu()
                expected = view(values).to(target)
                bits = torch.int32 if target is torch.float32 else torch.int16
                same = result.contiguous().view(bits) == expected.contiguous().view(bits)
                differs = ~(same | (result.isnan() & expected.isnan()))
                elements += expected.numel()
                wrong += int(differs.sum())
                if not example and bool(differs.any()):
                    instead = float(expected[differs][0])
                    example = f"{source} to {target}: {float(result[differs][0])} instead of {instead}"
    read = [f"{elements:,} elements cast, {wrong:,} differ"]
    issues = "pytorch#16448; torch Copy.cu"
    if not wrong:
        text = f"between float32, bfloat16 and float16 on {name}, as on the CPU"
        return [ok("casts_right", "casts", text, issues, subject=name, read=read)]
    return [fail("casts_wrong", "A cast on the card differs from the CPU's",
                 f"a cast between float32, bfloat16 and float16 on {name} is wrong",
                 "use another torch build, and report it: no such fault of gfx1100 is known", issues, name,
                 [*read, f"the first: {example}"])]  # fmt: skip


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


def _all_values(dtype: torch.dtype) -> Tensor:
    """Every 16-bit pattern, for float32 as the upper half, with lower halves that decide the rounding and others."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype is not torch.float32:
        return bits.to(torch.int16).view(dtype)
    lower = torch.randint(0, 1 << 16, (4, 1 << 16), generator=torch.Generator().manual_seed(0)).int()
    edges = torch.tensor([[0], [0x7FFF], [0x8000], [0x8001]], dtype=torch.int32).expand(4, 1 << 16)
    return (bits << 16 | torch.cat((lower, edges))).flatten().view(dtype)


# ---- the rate of the link --------------------------------------------------------------------------------------------

_LEAST_SHARE = 0.7
"""Share of a link's arithmetic rate: our own bound. A healthy x16 measured 0.90 to 0.92 of it (ROCm/ROCm#2253)."""


def bandwidth(request: Mapping[str, Any]) -> list[Finding]:
    """Copy page-locked memory both ways, ``mib`` at a time, and read the state of the link during the copies.

    ``root`` in the request replaces ``/`` when the link is read.
    """
    device = device_of(request)
    address = request.get("address")
    nbytes = request["mib"] << 20
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    rates: dict[str, list[float]] = {"to": [], "from": []}
    links: list[LinkRate] = []
    directions = (("to", there, host), ("from", host, there))
    for _, (direction, target, source) in itertools.product(range(6), directions):
        step(f"copying {request['mib']} MiB {direction} {device}")
        began = time.perf_counter()
        for _ in range(4):
            Copies().copy(target, source, what="", non_blocking=True)
        if address is not None:  # during the copies: an idle link may be slower
            path = read_upward(Files(Path(request.get("root", "/"))), address).links
            links = [LinkRate(link.width, link.speed, link.device) for link in path if link.width and link.speed]
        wait_for(there)
        rates[direction].append(gb_per_s(4 * nbytes, time.perf_counter() - began))
    # Without the first round, in which the link leaves its idle state.
    to_device = statistics.median(rates["to"][1:])
    from_device = statistics.median(rates["from"][1:])
    return [assess_bandwidth(request["device"], to_device, from_device, links)]


def assess_bandwidth(device: str, there: float, back: float, links: Sequence[LinkRate]) -> Finding:
    """The finding on the rates (10^9 bytes a second) ``there`` and ``back`` and the links that were read under load."""
    title = f"{there:.1f} GB/s to the card, {back:.1f} from it"
    source = "ROCm/ROCm#2253"
    if not links:
        return unknown(f"{title}; the link could not be read: a 7900 XTX measured 28 to 29 GB/s on PCIe 4.0 x16, x8 "
                       "gives 13 to 14 and x4 6.5 to 7", subject=device)  # fmt: skip
    link = min(links, key=lambda rate: rate.gb_s)
    share = min(there, back) / link.gb_s
    text = (
        f"{title}; {device}: x{link.width} at {link.speed:g} GT/s (under load, at {link.where}) gives {link.gb_s:.1f} "
        "GB/s each way by arithmetic; a 7900 XTX measured 28 to 29 of 31.5"
    )
    if share >= _LEAST_SHARE:
        return ok("bandwidth_right", title, text, source, subject=device)
    return warn("bandwidth_low", f"The link reaches {100 * share:.0f} % of its rate", text,
                "stop other programs on the card and run the check again; check the PCIe error counters; unset "
                "HSA_ENABLE_SDMA=0; seat the card without a riser", source, device)  # fmt: skip


# ---- canaries: memory at rest ----------------------------------------------------------------------------------------
# Reported: live tensors that were right and later read as zeros, in whole segments, after other memory was mapped and
# unmapped (ROCm/ROCm#6603 with an RX 7900 XT). A copy to the device and back does not show that. Not covered:
# allocators other than torch's in this process, and corruption that disappears within one cycle.

_CHURN = 0x5C
_SMALLEST = 512
_CANARIES = 4


def canaries(request: Mapping[str, Any]) -> list[Finding]:
    """Blocks with a pattern that differs at every position, digested on the device after each cycle of allocating and
    freeing blocks of all sizes; ``cycles``: at most; ``seconds`` after which no cycle begins; ``room``: bytes of these
    blocks at most."""
    device = device_of(request)
    name = request["device"]
    size = 1 << 20
    room = 64 << 20
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(64 << 20, free // 64 // 4 * 4)
        room = max(min(int(0.9 * free), request.get("room", free)) - _CANARIES * size, _SMALLEST)
    # Written by the device itself, so that no copy is part of the test; the expected digests come from the host.
    blocks = [fill_with_pattern(torch.empty(size, dtype=torch.uint8, device=device), n) for n in range(_CANARIES)]
    expected = [digest(_pattern(n, size)) for n in range(_CANARIES)]
    rng = random.Random(0)
    run = 0
    ends = time.monotonic() + request["seconds"]
    churned: list[Tensor] = []
    while True:
        bad = [number for number in range(_CANARIES) if digest(blocks[number]) != expected[number]]
        if bad or run >= request["cycles"] or time.monotonic() >= ends:
            break
        run += 1
        step(f"allocating and freeing memory beside canaries on {device}, cycle {run}")
        churned = _churn(churned, room, rng, device, ends)
    sizes = f"{_CANARIES} canaries of {size_words(size)} beside up to {size_words(room)} of other blocks, {run} cycles"
    source = "ROCm/ROCm#6603; rocm-systems#10943; ROCm/ROCm#6178"
    if not bad:
        proof = "the RX 7900 XT of the report failed in cycle 144"
        if run <= 144:
            proof += "; --full runs more cycles"
        text = f"on {name}, while other memory was allocated and freed; {proof}"
        title = f"stable for {run} cycle" if run == 1 else f"stable for {run} cycles"
        return [ok("canaries_held", title, text, source, subject=name, read=[sizes])]
    reading = blocks[bad[0]].cpu()
    again = blocks[bad[0]].cpu()
    damage = examine(reading, _pattern(bad[0], size))
    problem = {"case": f"cycle {run}, canary {bad[0]}", "damage": None if damage is None else asdict(damage)}
    same = "the same" if torch.equal(reading, again) else "not the same"
    return [fail("canaries_changed", "Memory has changed",
                 f"an unused block of memory on {name} had other bytes after {run} cycles of allocating and freeing "
                 "others. Weights would change in the same way, without an error",
                 f"{_SETTINGS}; if it changes without them, too, undo overclocking and undervolting: GDDR6 has no ECC",
                 source, subject=name,
                 read=[*problem_lines([problem]), f"read twice: {same}", sizes])]  # fmt: skip


def _churn(churned: list[Tensor], room: int, rng: random.Random, device: torch.device, ends: float) -> list[Tensor]:
    """One cycle: allocate and fill blocks of all sizes up to a random level, then free a random half of them."""
    level = rng.uniform(0.3, 1.0) * room
    while True:
        left = int(level) - sum(block.numel() for block in churned)
        if left < _SMALLEST:
            break
        size = min(int(_SMALLEST * math.exp(rng.uniform(0, math.log(left / _SMALLEST)))), left)
        if rng.random() < 0.5:
            size = max(size, left // 4)  # sizes are drawn by magnitude: large ones would be rare
        if time.monotonic() >= ends + 1:
            break
        try:
            churned.append(torch.full((size,), _CHURN, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            break  # another process took memory: this cycle stays below its level
    rng.shuffle(churned)
    churned = churned[len(churned) // 2 :]
    if device.type == "cuda" and rng.random() < 0.5:
        torch.cuda.empty_cache()  # so that the next cycle maps memory again
    return churned


def _pattern(number: int, size: int) -> Tensor:
    """What a canary should hold, on the host."""
    return fill_with_pattern(torch.empty(size, dtype=torch.uint8), number)
