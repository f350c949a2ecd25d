"""The child's half of ``nf4``: what bitsandbytes quantises, dequantises and multiplies in NF4, against `nf4_reference`.

Each step gets right inputs, whatever the step before it made: dequantisation and products work on bytes and scales that
the reference made on the CPU. Products with few rows, as in decoding, run kernels of their own.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.nf4_reference import accept_undecided, quantise, ternary, values_of
from hf_rocm_tune.doctor.measured.rounding import (
    FLOAT32_ROUNDOFF,
    Reference,
    name_of,
    product,
    roundoff,
    spread,
    stored,
)
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE = (192, 512)
ROWS = (1, 2, 4, 8, 9, 33)
"""Rows of the other factor: bitsandbytes 0.50 has a kernel of its own for up to 8 of them on RDNA3."""
FULL_SHAPES = ((1024, 4096), (4096, 1024))
_BLOCK = 64
_STATISTICS_BLOCK = 256


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Quantise, dequantise and multiply.

    Args:
        request: ``device``, ``address``; ``full``: larger weights too; ``seed``; ``fault``, see `tally`, or ``absmax``:
            one scale is doubled before it is used.

    Returns:
        See `Tally.result`; ``missing``: bitsandbytes is not installed; ``unavailable``: why it does not work at all;
        ``error``: mean absolute error of quantising normally distributed values, by dtype.
    """
    device = device_of(request)
    tally = Tally(request)
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    if importlib.util.find_spec("bitsandbytes") is None:
        return tally.result(missing=True, unavailable="", error={})
    step("importing bitsandbytes")
    functional = importlib.import_module("bitsandbytes.functional")
    matmul = importlib.import_module("bitsandbytes").matmul_4bit
    errors: dict[str, float] = {}
    spoilt = (request.get("fault") or {}).get("kind") == "absmax"
    shapes = (SHAPE, *(FULL_SHAPES if request.get("full") else ()))
    with Mover(device) as mover:
        try:
            for dtype, shape in itertools.product(DTYPES, shapes):
                bench = _Bench(mover, tally, functional, matmul, spread(shape, dtype, generator))
                errors[name_of(dtype)] = bench.quantisation(_BLOCK)
                bench.quantisation(None)
                bench.dequantisation(spoilt)
                bench.statistics(generator)
                for rows in ROWS:
                    bench.products(rows, generator)
                    bench.exact_products(rows, generator)
        except (RuntimeError, NotImplementedError) as error:
            if tally.cases or isinstance(error, torch.AcceleratorError):
                raise
            return tally.result(missing=False, unavailable=" ".join(str(error).split())[:300], error={})
    return tally.result(missing=False, unavailable="", error=errors)


class _Bench:
    """One weight, and bitsandbytes on one device."""

    def __init__(self, mover: Mover, tally: Tally, functional: Any, matmul: Any, weight: Tensor) -> None:
        self._mover, self._tally, self._functional, self._matmul = mover, tally, functional, matmul
        self._weight, self._placed = weight, mover.move(weight, name="weight")
        self._label = f"{name_of(weight.dtype)} NF4 {weight.shape[0]}x{weight.shape[1]}"
        self._right = quantise(weight, _BLOCK)
        # The library's state for this shape, with the reference's numbers and scales in it.
        _, self._state = functional.quantize_4bit(self._placed, blocksize=_BLOCK, quant_type="nf4")
        self._packed = mover.move(self._right.packed.view(-1, 1), name="packed")
        self._state.absmax = mover.move(self._right.absmax, name="absmax")

    def quantisation(self, blocksize: int | None) -> float:
        """Quantise with blocks of that size, or of the size that bitsandbytes takes by itself; the mean error."""
        label = f"{self._label}, {'default blocks' if blocksize is None else f'blocks of {blocksize}'}"
        step(f"quantising {label}")
        packed, state = self._functional.quantize_4bit(self._placed, blocksize=blocksize, quant_type="nf4")
        right = self._right if state.blocksize == _BLOCK else quantise(self._weight, state.blocksize)
        self._tally.exact(f"{label}: absmax", state.absmax.view(-1), right.absmax)
        self._tally.exact(f"{label}: numbers", packed.view(-1), accept_undecided(packed.cpu(), right))
        through = self._functional.dequantize_4bit(packed, state).cpu().double()
        return float((through - self._weight.double()).abs().mean())

    def dequantisation(self, spoilt: bool) -> None:
        """The reference's numbers and scales back to values; ``spoilt`` doubles a scale first."""
        label = f"{self._label}, dequantised"
        step(f"computing {label}")
        if spoilt:
            self._state.absmax[self._state.absmax.numel() // 2] *= 2
        restored = self._functional.dequantize_4bit(self._packed, self._state)
        self._tally.close(label, restored, self._stored(self._right.values, self._right.values.abs(), 2))

    def statistics(self, generator: torch.Generator) -> None:
        """Double quantisation: the scales are quantised to 8 bits as well."""
        label = f"{self._label}, double quantisation"
        step(f"computing {label}")
        _, state = self._functional.quantize_4bit(
            self._placed, blocksize=_BLOCK, quant_type="nf4", compress_statistics=True
        )
        code, offset = state.state2.code.cpu().double(), float(state.offset)
        scale = state.state2.absmax.cpu().double().repeat_interleave(_STATISTICS_BLOCK)[: self._right.absmax.numel()]
        quotients = (self._right.absmax.double() - offset) / scale
        nearest = torch.bucketize(quotients, (code[1:] + code[:-1]) / 2)
        found = state.absmax.cpu().view(-1).long()
        # Near enough is right: bitsandbytes' own search does not always find the nearest number (seen on the CPU).
        accepted = torch.where((code[found] - quotients).abs() <= code.diff().max(), found, nearest)
        self._tally.exact(f"{label}: scales", state.absmax.view(-1), accepted.to(torch.uint8))

        part = code[accepted] * scale
        values, size = (self._values(absmax) for absmax in (part + offset, part.abs() + abs(offset)))
        restored = self._functional.dequantize_4bit(self._packed, state)
        self._tally.close(f"{label}: dequantised", restored, self._stored(values, size.abs(), 4))
        for rows in ROWS[::3]:
            x = spread((rows, self._weight.shape[1]), self._weight.dtype, generator)
            found = self._multiply(self._mover.move(x, name="x"), self._packed, state)
            self._tally.close(f"{label}, product with {rows} rows", found, self._product(x, values.t()))

    def products(self, rows: int, generator: torch.Generator) -> None:
        """``x W'``, without and with a gradient, and the gradient of x."""
        outputs, width = self._weight.shape
        label = f"{self._label}, product with {rows} rows"
        step(f"computing {label}")
        x, upstream = (spread((rows, size), self._weight.dtype, generator) for size in (width, outputs))
        placed, right = self._mover.move(x, name="x"), self._product(x, self._right.values.t())
        self._tally.close(label, self._multiply(placed, self._packed, self._state), right)
        output = self._multiply(placed.requires_grad_(), self._packed, self._state)
        self._tally.close(f"{label}, in training", output, right)
        (gradient,) = torch.autograd.grad(output, placed, self._mover.move(upstream, name="upstream"))
        self._tally.close(f"{label}: gradient", gradient, self._product(upstream, self._right.values), gradient=True)

    def exact_products(self, rows: int, generator: torch.Generator) -> None:
        """Weights of 0, 1, 2 and their negatives and inputs of 1 and -1: no rounding, whatever the kernel."""
        label = f"{self._label}, exact product with {rows} rows"
        step(f"computing {label}")
        outputs, width = self._weight.shape
        exact = ternary(outputs, width, _BLOCK, generator)
        x = (torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1).to(self._weight.dtype)
        state = copy.copy(self._state)
        state.absmax = self._mover.move(exact.absmax, name="absmax")
        packed = self._mover.move(exact.packed.view(-1, 1), name="packed")
        right = (x.double() @ exact.values.t()).to(x.dtype)
        self._tally.exact(label, self._multiply(self._mover.move(x, name="x"), packed, state), right)

    def _multiply(self, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        # Transposed, as the library's own layers have it: releases before 0.50 take it in no other way.
        result: Tensor = self._matmul(x, packed.t(), quant_state=state)
        return result

    def _values(self, absmax: Tensor) -> Tensor:
        return values_of(self._right.packed, absmax, _BLOCK, tuple(self._weight.shape))

    def _stored(self, values: Tensor, size: Tensor, roundings: int) -> Reference:
        """A few roundings in float32 of something of that size, then one to the dtype."""
        return Reference(values, stored(values, roundings * FLOAT32_ROUNDOFF * size, self._weight.dtype))

    def _product(self, left: Tensor, right: Tensor) -> Reference:
        """A product with dequantised values; a kernel may round the value, the scale and their product to the dtype."""
        plain = product(left.double(), right, left.dtype)
        slack = 3 * roundoff(left.dtype) * (1 + roundoff(left.dtype)) * (left.double().abs() @ right.abs())
        return Reference(plain.right, plain.bound + slack)
