"""The child's half of ``gemm``: matrix products of every dtype against float64, by shape, layout and kind of call.

Each product is made twice: with small integers, where any order of sums gives the same bits, so nothing may differ, and
with normally distributed values against the bound of `rounding`. For the latter, sums in reduced precision
(``allow_*_reduced_precision_reduction``) are off, because the bound is that of float32 sums; for the former they are as
torch has them by default.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.doctor.measured.rounding import Reference, exact_factors, name_of, product, roundoff, spread
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    (1, 1, 1),
    (3, 5, 7),
    (17, 31, 63),
    (64, 64, 64),
    (127, 257, 129),
    (256, 512, 256),
    (1, 1024, 257),
    (513, 129, 1),
    (384, 1024, 16),
    (384, 16, 1024),
)
"""m, k, n. Odd ones, where a tile is cut; one row or column, which takes other kernels; the two of a LoRA pair."""
FULL_SHAPES = ((1023, 1025, 1027), (2048, 4096, 2048), (2048, 64, 4096), (1, 4096, 4096))
LAYOUTS = ((False, False), (False, True), (True, False), (True, True))
"""Whether the left and the right factor is a transposed view. A linear layer's forward, input gradient and weight
gradient are three of the four."""
LAYOUT_SHAPES = ((64, 64, 64), (127, 257, 129))
INT8_SHAPES = ((32, 64, 48), (33, 1024, 128), (256, 512, 256))
"""What CUDA's kernel takes: more than 16 rows, the others multiples of 8."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply.

    Args:
        request: ``device``, ``address``; ``full``: larger shapes too; ``seed``; ``fault``, see `tally`.

    Returns:
        See `Tally.result`; ``unavailable``: dtype to the reason why this device does not multiply it.
    """
    device = device_of(request)
    tally = Tally(request)
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    shapes = SHAPES + FULL_SHAPES if request.get("full") else SHAPES
    with Mover(device) as mover:
        bench = _Bench(mover, tally, generator)
        for dtype in DTYPES:
            for shape in shapes:
                bench.product(dtype, shape, (False, False))
            for shape, layout in itertools.product(LAYOUT_SHAPES, LAYOUTS[1:]):
                bench.product(dtype, shape, layout)
            bench.batched(dtype)
            bench.linear(dtype)
        unavailable = bench.int8()
    return tally.result(unavailable=unavailable)


class _Bench:
    """Products of one device."""

    def __init__(self, mover: Mover, tally: Tally, generator: torch.Generator) -> None:
        self._mover, self._tally, self._generator = mover, tally, generator

    def product(self, dtype: torch.dtype, shape: tuple[int, int, int], layout: tuple[bool, bool]) -> None:
        """One shape, exact and with rounding."""
        m, k, n = shape
        signs = " @ ".join("x.T" if transposed else "x" for transposed in layout)
        name = f"{name_of(dtype)} {m}x{k} by {k}x{n}{'' if layout == (False, False) else f' as {signs}'}"
        left, right = exact_factors(m, k, n, dtype, self._generator)
        self._exact(f"{name}, exact", left, right, layout)
        left, right = (spread(size, dtype, self._generator) for size in ((m, k), (k, n)))
        self._rounded(name, left, right, layout)

    def batched(self, dtype: torch.dtype) -> None:
        """``bmm``: 3 products at once."""
        left, right = (spread((3, *size), dtype, self._generator) for size in ((33, 65), (65, 31)))
        self._rounded(f"{name_of(dtype)} batch of 3, 33x65 by 65x31", left, right, (False, False))

    def linear(self, dtype: torch.dtype) -> None:
        """``functional.linear`` with a bias, which libraries add in the product's epilogue."""
        sizes = ((65, 127), (96, 127), (96,))
        inputs, weight, bias = (spread(size, dtype, self._generator) for size in sizes)
        plain, added = product(inputs.double(), weight.double().t(), dtype), bias.double()
        # Where the bias is added apart, the product was rounded to the dtype once before.
        twice = 2 * roundoff(dtype) * (plain.right.abs() + plain.bound + added.abs())
        name = f"{name_of(dtype)} linear layer with bias, 65x127 to 96"
        placed = [self._move(tensor) for tensor in (inputs, weight, bias)]
        with _float32_sums():
            self._run(name, lambda: functional.linear(*placed), Reference(plain.right + added, plain.bound + twice))

    def int8(self) -> dict[str, str]:
        """``torch._int_mm``, where the device has it; its sums are exact."""
        for m, k, n in INT8_SHAPES:
            left, right = exact_factors(m, k, n, torch.int8, self._generator)
            placed = [self._move(tensor) for tensor in (left, right)]
            name = f"int8 {m}x{k} by {k}x{n}, exact"
            step(f"computing {name}")
            try:
                found = torch._int_mm(*placed)
            except (RuntimeError, NotImplementedError) as error:  # older cards and libraries have no such kernel
                if isinstance(error, torch.AcceleratorError):
                    raise
                return {"int8": " ".join(str(error).split())[:200]}
            self._tally.exact(name, found, (left.double() @ right.double()).to(torch.int32))
        return {}

    def _exact(self, name: str, left: Tensor, right: Tensor, layout: tuple[bool, bool]) -> None:
        self._run(name, self._call(left, right, layout), (left.double() @ right.double()).to(left.dtype))

    def _rounded(self, name: str, left: Tensor, right: Tensor, layout: tuple[bool, bool]) -> None:
        with _float32_sums():
            self._run(name, self._call(left, right, layout), product(left.double(), right.double(), left.dtype))

    def _call(self, left: Tensor, right: Tensor, layout: tuple[bool, bool]) -> Callable[[], Tensor]:
        first, second = (self._place(factor, turned) for factor, turned in zip((left, right), layout, strict=True))
        return lambda: first @ second

    def _run(self, name: str, compute: Callable[[], Tensor], right: Tensor | Reference) -> None:
        step(f"computing {name}")
        try:
            found = compute()
        except RuntimeError as error:  # every device has these: a refusal is a fault of the installation
            self._tally.refused(name, error)
            return
        if isinstance(right, Reference):
            self._tally.close(name, found, right)
        else:
            self._tally.exact(name, found, right)

    def _place(self, factor: Tensor, transposed: bool) -> Tensor:
        return self._move(factor.mT.contiguous()).mT if transposed else self._move(factor)

    def _move(self, tensor: Tensor) -> Tensor:
        return self._mover.move(tensor, name="factor")


@contextmanager
def _float32_sums() -> Iterator[None]:
    """Sums in float32 also where a library splits them over several kernels."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
