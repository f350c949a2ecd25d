"""The child's half of ``gemm_repeat``: the same matrix product again and again, every result against the first.

The first result is compared with float64; every later one with the first, bit for bit, on the device. One that differs
is brought to the CPU: if all of it is still within the rounding bound, the library only adds in another order from call
to call; if not, it is wrong. On an accelerator a second stream keeps the memory busy meanwhile.

Not covered: a device that is wrong in the same way every time; ``gemm`` looks for that in more shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.rounding import Reference, exact_factors, name_of, product, spread
from hf_rocm_tune.doctor.measured.tally import Tally, harmed
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.float16, torch.int8, torch.bfloat16, torch.float32)
"""float16 and int8 first: they are the ones of rocm-libraries#12344."""
CARD_SHAPE = (512, 4096, 1024)
HOST_SHAPE = (96, 128, 112)
SECONDS = 0.4
HARMED_REPEAT = 37
"""The repeat that a fault on purpose goes into."""

_RING = 4
_LEAST_REPEATS = 40
_BUSY_BYTES = 96 << 20
"""More than the Infinity Cache of an RX 7900 XT (80 MB), so that its memory is busy."""


@dataclass(frozen=True)
class _Problem:
    """Factors on the device, and what their product should be."""

    left: Tensor
    right: Tensor
    reference: Reference

    @property
    def multiply(self) -> Callable[..., Tensor]:
        return torch._int_mm if self.left.dtype is torch.int8 else torch.mm


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply and compare.

    Args:
        request: ``device``, ``address``; ``seconds``: how long in each dtype; ``seed``; ``fault``: ``wrong``, ``nan``
            or ``zeros``, in the 37th repeat of the first dtype that contains ``where``.

    Returns:
        See `Tally.result`; by dtype ``repeats``, ``varying`` (how many differ from the first within rounding) and
        ``unavailable``.
    """
    device = device_of(request)
    tally = Tally({})
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    repeats: dict[str, int] = {}
    varying: dict[str, int] = {}
    unavailable: dict[str, str] = {}
    fault = dict(request.get("fault") or {})
    with Mover(device) as mover:
        for dtype in DTYPES:
            name = name_of(dtype)
            run = _Run(name, _problem(mover, dtype, generator), tally)
            try:
                run.first()
            except (RuntimeError, NotImplementedError) as error:
                # Not every device and library multiplies int8.
                if dtype is not torch.int8 or isinstance(error, torch.AcceleratorError):
                    raise
                unavailable[name] = " ".join(str(error).split())[:200]
                continue
            kind = fault.pop("kind", "") if fault.get("where", "") in name else ""
            repeats[name], varying[name] = run.go_on(request.get("seconds", SECONDS), kind)
    return tally.result(repeats=repeats, varying=varying, unavailable=unavailable)


def _problem(mover: Mover, dtype: torch.dtype, generator: torch.Generator) -> _Problem:
    m, k, n = CARD_SHAPE if mover.device.type == "cuda" else HOST_SHAPE
    if dtype is torch.int8:
        left, right = exact_factors(m, k, n, dtype, generator)
        exact = left.double() @ right.double()
        reference = Reference(exact, torch.zeros_like(exact))
    else:
        left, right = (spread(size, dtype, generator) for size in ((m, k), (k, n)))
        reference = product(left.double(), right.double(), dtype)
    return _Problem(mover.move(left, name="left"), mover.move(right, name="right"), reference)


class _Run:
    """The repeats of one dtype."""

    def __init__(self, name: str, problem: _Problem, tally: Tally) -> None:
        self._name, self._problem, self._tally = name, problem, tally
        self._varying = 0

    def first(self) -> None:
        """The result that all others are compared with."""
        step(f"computing {self._name}, the first")
        self._first = self._problem.multiply(self._problem.left, self._problem.right)
        # Into a buffer of its own each time: what is read has to have been written by this call.
        self._ring = [torch.empty_like(self._first) for _ in range(_RING)]
        self._right = self._tally.close(f"{self._name}, the first", self._first, self._problem.reference)

    def go_on(self, seconds: float, fault: str) -> tuple[int, int]:
        """Repeat for some seconds; how often, and how many results differed within the bound."""
        load = _Load(self._first.device)
        number, ends = 1, time.monotonic() + seconds
        while number <= _LEAST_REPEATS or time.monotonic() < ends:
            step(f"computing {self._name}, repeats {number + 1} to {number + _RING}")
            counts = []
            load.add()
            for place in range(_RING):
                number += 1
                self._multiply(place, fault if number == HARMED_REPEAT else "")
                counts.append((self._bits(self._ring[place]) != self._bits(self._first)).sum())
            self._tally.cases += _RING
            for place, count in enumerate(torch.stack(counts).tolist()):
                if count:
                    self._differs(number - _RING + 1 + place, self._ring[place])
        return number, self._varying

    def _multiply(self, place: int, fault: str) -> None:
        self._problem.multiply(self._problem.left, self._problem.right, out=self._ring[place])
        if fault:
            self._ring[place] = harmed(self._ring[place], fault)

    def _differs(self, number: int, result: Tensor) -> None:
        self._tally.cases -= 1  # `close` counts it
        case = f"{self._name}, repeat {number}"
        # Where the first was wrong already, a repeat that differs from it may be the right one.
        if self._tally.close(case, result, self._problem.reference) and self._right:
            self._varying += 1

    def _bits(self, tensor: Tensor) -> Tensor:
        return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


class _Load:
    """Traffic on a second stream of an accelerator; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._busy = torch.ones(_BUSY_BYTES // 4, device=device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._busy.record_stream(self._stream)  # or its memory would be given to a result while it is still written

    def add(self) -> None:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._busy.neg_()
