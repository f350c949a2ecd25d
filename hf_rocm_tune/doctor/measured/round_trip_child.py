"""The child's half of ``round_trip``: bytes to the device and back, by size, dtype and way of copying.

For each case: the destination is filled with poison, a pattern that differs at every position is copied to it, the
device counts wrong bytes by itself, and the bytes are read back twice, by two ways, into poisoned memory. What is wrong
is sent once more, to tell a copy that failed from a place that does not hold what is written to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.catalogue import DTYPES
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer.damage import Damage, examine
from hf_rocm_tune.transfer.diagnosis import POISON
from hf_rocm_tune.transfer.pattern import count_wrong, fill_with_pattern
from hf_rocm_tune.transfer.raw_bytes import typed_view
from hf_rocm_tune.transfer.raw_copies import Copies, copies_for, wait_for

SIZES = (1, 3, 255, 4096, 4097, 65_536, (1 << 20) - 4, (1 << 20) + 4, 2 << 20, (20 << 20) + 4, 64 << 20, 256 << 20)
"""Bytes. 1 MiB: HIP changes engine for copies between cards there; 2 and 20 MiB: sizes of pages and of segments."""

_DTYPE_BYTES = 16 * 6001
_REPEATED_BYTES = 1 << 20
_KEPT_PROBLEMS = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of sending some bytes.

    Attributes:
        nbytes: how many.
        dtype: as what they are copied.
        pinned: the source is page-locked.
        non_blocking: as torch's.
        strided: the source is every second element of a larger tensor.
        skew: bytes by which source and destination stand beside an aligned address.
        reused: the destination is the one of the case before.
        label: in front of the description.
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
        """Bits of a byte that can be sent: torch may normalise a bool that is neither 0 nor 1."""
        return 1 if self.dtype is torch.bool else 0xFF

    def __str__(self) -> str:
        words = [f"{self.nbytes:,} bytes of {str(self.dtype).removeprefix('torch.')}", self._memory()]
        words += [word for word in ("non_blocking", "strided", "reused") if getattr(self, word)]
        words += [f"{self.skew} bytes off"] if self.skew else []
        return f"{self.label} {', '.join(words)}".strip()

    def _memory(self) -> str:
        return "page-locked" if self.pinned else "pageable"


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Send everything there and back.

    Args:
        request: ``device``, ``address``; ``repeats``: how often the repeated case is sent; ``largest``: bytes of the
            largest case; ``fault``: one of ``raw_copies.FAULTS``.

    Returns:
        ``cases``, ``bytes`` and ``wrong``: how many cases, their bytes, and how many of them were wrong; ``problems``:
        the first of these, see `_problem`; ``left_out``: cases that this torch cannot copy.
    """
    device = device_of(request)
    bench = _Bench(device, copies_for(request))
    problems: list[dict[str, Any]] = []
    left_out: list[str] = []
    wrong = cases = nbytes = 0
    for number, case in enumerate(_cases(request["largest"], request["repeats"])):
        step(f"sending {case} to {device} and back")
        try:
            problem = bench.try_case(case, number)
        except NotImplementedError:  # torch may know a dtype and no copy of it on this device
            left_out.append(str(case))
            continue
        cases, nbytes, wrong = cases + 1, nbytes + case.nbytes, wrong + (problem is not None)
        if problem is not None and len(problems) < _KEPT_PROBLEMS:
            problems.append(problem)
    return {"cases": cases, "bytes": nbytes, "wrong": wrong, "problems": problems, "left_out": left_out}


def _cases(largest: int, repeats: int) -> Iterator[Case]:
    sizes = [size for size in SIZES if size <= largest]
    # First of all, so that it is the first copy of this process.
    yield Case(nbytes=sizes[-1], label="cold:")
    for size in sizes:
        for pinned in (False, True):
            for non_blocking in (False, True):
                yield Case(nbytes=size, pinned=pinned, non_blocking=non_blocking)
    for dtype in DTYPES:
        yield Case(nbytes=_DTYPE_BYTES, dtype=dtype)
        yield Case(nbytes=_DTYPE_BYTES, dtype=dtype, pinned=True, non_blocking=True)
    nbytes = min(_REPEATED_BYTES, largest)
    for dtype in (torch.int16, torch.int32):
        for non_blocking in (False, True):
            yield Case(nbytes=nbytes, dtype=dtype, non_blocking=non_blocking, strided=True)
    for skew in (1, 3, 4):
        for pinned in (False, True):
            yield Case(nbytes=nbytes - 5, pinned=pinned, non_blocking=pinned, skew=skew)
    for number in range(repeats):
        label = f"repeat {number + 1}:"
        yield Case(nbytes=nbytes, non_blocking=number % 2 == 1, reused=number % 4 > 1, label=label)


class _Bench:
    """One device, and what was there before."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self._device, self._copies = device, copies
        self._destination = torch.empty(0, dtype=torch.uint8)
        self._earlier: Tensor | None = None

    def try_case(self, case: Case, number: int) -> dict[str, Any] | None:
        """Send, look, read back twice. None when all is right, else what is wrong."""
        source = self._host(case.nbytes, pinned=case.pinned and not case.skew)
        fill_with_pattern(source, number, keep=case.keep)
        destination = self._place(case)
        self._send(case, source, destination)
        on_device = self._wrong_on_device(destination, case, number)
        reads = [self._read(case, destination, pinned=pinned) for pinned in (False, True)]
        damages = [examine(read, source, earlier=self._earlier) for read in reads]
        problem = None
        if on_device or any(damages):
            problem = self._problem(case, number, source, destination, on_device, reads, damages)
        self._earlier = source
        return problem

    def _problem(
        self,
        case: Case,
        number: int,
        source: Tensor,
        destination: Tensor,
        on_device: int,
        reads: list[Tensor],
        damages: list[Damage | None],
    ) -> dict[str, Any]:
        """The case, the verdict, and where what differs.

        Verdicts: ``source``: the host's own bytes changed; ``read_back``: two read-backs differ, so the way back is at
        fault; ``not_written``: what was there before is there still; ``device_only``: it reads back right, and the
        device sees other bytes; ``mapping``: the device sees the right bytes, and the host reads wrong ones, twice the
        same; ``sending``: wrong in the same way everywhere, and right when sent once more; ``memory``: wrong in the
        same way everywhere, and wrong again.
        """
        shown = next((damage for damage in damages if damage is not None), None)
        if count_wrong(source, number, keep=case.keep):
            verdict = "source"
        elif not torch.equal(*reads):
            verdict = "read_back"
        elif shown is not None and on_device and shown.kind == "poison":
            verdict = "not_written"
        elif shown is None:
            verdict = "device_only"
        elif not on_device:
            verdict = "mapping"
        else:
            self._send(case, source, destination.fill_(POISON))
            again = examine(self._read(case, destination, pinned=False), source)
            verdict = "sending" if again is None else "memory"
        return {
            "case": str(case),
            "verdict": verdict,
            "wrong_on_device": on_device,
            "damage": None if shown is None else {**asdict(shown), "kind": shown.kind},
        }

    def _send(self, case: Case, source: Tensor, destination: Tensor) -> None:
        words = f"{case} to {self._device}"
        target, sent = _typed(destination, case.dtype), source
        if case.skew:
            sent = self._host(case.nbytes + case.skew, pinned=case.pinned)[case.skew :]
            sent[:] = source
        sent = _typed(sent, case.dtype)
        if case.strided:
            spread = torch.empty(sent.numel(), 2, dtype=case.dtype)
            spread[:, 0] = sent
            sent = spread[:, 0]
        self._copies.copy(target, sent, what=words, non_blocking=case.non_blocking)
        wait_for(destination)

    def _read(self, case: Case, destination: Tensor, *, pinned: bool) -> Tensor:
        """Read back: blocking into pageable memory, or non-blocking into page-locked memory and waited for."""
        read = self._host(case.nbytes, pinned=pinned).fill_(POISON)
        words = f"{case} back from {self._device} to {'page-locked' if pinned else 'pageable'} memory"
        self._copies.copy(read, destination, what=words, non_blocking=pinned)
        wait_for(destination)
        return read

    def _wrong_on_device(self, destination: Tensor, case: Case, number: int) -> int:
        return count_wrong(destination, number, keep=case.keep)

    def _place(self, case: Case) -> Tensor:
        if not case.reused or self._destination.numel() != case.nbytes:
            whole = torch.empty(case.nbytes + case.skew, dtype=torch.uint8, device=self._device)
            self._destination = whole[case.skew :]
        self._destination.fill_(POISON)
        wait_for(self._destination)
        return self._destination

    def _host(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and self._device.type == "cuda")


def _typed(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    return typed_view(buffer, 0, dtype, (buffer.numel() // size,))
