"""Selects the GEMM library for the loss's gradient on a Radeon card, by timing each once per process and card.

The fused head adds ``tile @ head`` to a float32 sum, of bfloat16 factors, for which rocBLAS has no tuned kernel on
gfx1100, but hipBLASLt has. A bfloat16 result is tuned in both, and is rounded once more: used only over the whole
vocabulary, where nothing is summed after it, and only where it is `WORTH_ROUNDING` times as fast.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LIBRARIES = {"rocBLAS": "cublas", "hipBLASLt": "cublaslt"}
ROUNDED = "bfloat16 result"
WORTH_ROUNDING = 1.5
_SHAPES = ((128, 4096, 512), (512, 16384, 2048))  # tokens, words, width; the second is 34 GFLOP and 91 MB
_TOO_SLOW = 0.05  # TFLOP/s: something other than a card, which should not be asked for more
_TIMES = 4


def libraries() -> tuple[str, ...]:
    """The libraries that may be used: not hipBLASLt where the user has switched it off (RDNA4: TheRock#7699)."""
    off = os.environ.get("TORCH_BLAS_PREFER_HIPBLASLT", "").strip() == "0"
    return tuple(name for name in LIBRARIES if not (off and name == "hipBLASLt"))


@dataclass(frozen=True, kw_only=True)
class ProductChoice:
    """The library for a float32 result, whether a whole product gets a bfloat16 one, and TFLOP/s of each way."""

    library: str
    rounded: bool
    rates: dict[str, float]

    def describe(self) -> str:
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in self.rates.items())
        chosen = f"{ROUNDED} in the one-pass loss, else {self.library}" if self.rounded else self.library
        return f"products of the loss gradient: {chosen} (TFLOP/s: {rates})"


@cache
def choose(device: torch.device) -> ProductChoice | None:
    """What is used on `device`; None where upstream's own choice is kept, because the card is no AMD card."""
    if device.type != "cpu" and device.index is None:
        return choose(torch.device(device.type, 0))
    rates = {} if device.type == "cpu" or torch.version.hip is None else measure(device)
    libraries = {name: rate for name, rate in rates.items() if name != ROUNDED}
    if not libraries:
        return None
    best = max(libraries, key=libraries.__getitem__)
    rounded = rates.get(ROUNDED, 0.0) > WORTH_ROUNDING * libraries[best]
    return ProductChoice(library=best, rounded=rounded, rates=rates)


def measure(device: torch.device) -> dict[str, float]:
    rates: dict[str, float] = {}
    for shape in _SHAPES:
        tokens, words, width = shape
        with torch.no_grad():
            left = torch.ones(tokens, words, dtype=torch.bfloat16, device=device)
            right = torch.ones(words, width, dtype=torch.bfloat16, device=device)
            total = torch.zeros(tokens, width, device=device)
            for name in (*libraries(), ROUNDED):
                try:
                    add(total, left, right, library=name)
                    torch.cuda.synchronize(device)
                except RuntimeError:  # a library that this build or this card does not have
                    rates.pop(name, None)
                    continue
                begun = time.perf_counter()
                for _ in range(_TIMES):
                    add(total, left, right, library=name)
                torch.cuda.synchronize(device)
                rates[name] = 2e-12 * tokens * words * width * _TIMES / (time.perf_counter() - begun)
        if min(rates.values(), default=0.0) < _TOO_SLOW:
            break
    return rates


def add(total: Tensor, left: Tensor, right: Tensor, *, library: str) -> None:
    """``total += left @ right``; float32 (M, N), bfloat16 (M, K) and (K, N); by a library, or with a rounded result."""
    if library == ROUNDED:
        total += left @ right
    else:
        with _preferred(LIBRARIES[library]):
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@contextmanager
def _preferred(backend: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(backend)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


ON_HOST = ("oneDNN", "BLAS")


def current_library(device: torch.device) -> str:
    if device.type == "cpu":
        return ON_HOST[not torch.backends.mkldnn.enabled]
    chosen = str(torch.backends.cuda.preferred_blas_library())  # "_BlasBackend.Cublaslt"
    return "hipBLASLt" if chosen.lower().endswith("blaslt") else "rocBLAS"


def use_library(device: torch.device, name: str) -> None:
    """Let torch prefer a library from now on; RuntimeError: this build of torch does not have it."""
    if device.type == "cpu":
        torch.backends.mkldnn.enabled = name == ON_HOST[0]  # type: ignore[assignment]  # a descriptor of the module
    else:
        torch.backends.cuda.preferred_blas_library(LIBRARIES[name])


def each_library(device: torch.device) -> Iterator[str]:
    """Switch to each library in turn, the current one first, and back at the end; leaves out those that are absent."""
    before = current_library(device)
    names = ON_HOST if device.type == "cpu" else libraries()
    try:
        for name in sorted(names, key=lambda name: name != before):
            try:
                use_library(device, name)
            except RuntimeError:
                continue
            yield name
    finally:
        use_library(device, before)
