"""Faults in measured results, put in by replacing what computes or compares them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_rocm_tune.doctor import arithmetic, transfers
from hf_rocm_tune.transfer.damage import Copies, wait_for
from hf_rocm_tune.transfer.raw_bytes import as_bytes, typed_view

FAULTY_REPEAT, FAULTY_CYCLE = 37, 2
_RANGE_BYTES = 4096


def with_fault(result: Tensor, kind: str) -> Tensor:
    """A copy with every element zero, or one NaN, or one negated and less by one."""
    broken = result.clone(memory_format=torch.contiguous_format)
    flat, at = broken.view(-1), broken.numel() // 2
    if kind == "zeros":
        flat.zero_()
    else:
        flat[at] = float("nan") if kind == "nan" else -flat[at] - 1
    return broken


class FaultyCopies(Copies):
    """torch's copies, of which those whose description contains ``where`` get a fault.

    ``zeros``, or ``zero_range`` from a 4 KiB boundary on; ``flip`` of one bit; ``stale`` bytes of the copy before;
    ``drop``: nothing is copied; ``unstable``: other wrong bytes each time.
    """

    def __init__(self, kind: str, where: str = "") -> None:
        self._kind, self._where = kind, where
        self._earlier: Tensor | None = None
        self._count = 0

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """Copy, then corrupt the destination if this copy is selected."""
        if self._where not in what or not destination.numel():
            super().copy(destination, source, what=what, non_blocking=non_blocking)
        elif self._kind != "drop":
            destination.copy_(source, non_blocking=non_blocking)
            wait_for(destination)  # the corrupted bytes must be written after the copy, whatever stream that used
            corrupted = self._corrupted(as_bytes(destination.contiguous()).cpu().clone())
            destination.copy_(typed_view(corrupted, 0, destination.dtype, destination.shape))
            wait_for(destination)

    def _corrupted(self, data: Tensor) -> Tensor:
        corrupted, third = data.clone(), data.numel() // 3
        self._count += 1
        if self._kind == "zeros":
            corrupted.zero_()
        elif self._kind == "zero_range":
            corrupted[data.numel() // 2 // _RANGE_BYTES * _RANGE_BYTES :] = 0
        elif self._kind == "flip":
            corrupted[third] ^= 4
        elif self._kind == "unstable":
            corrupted[third:] ^= 1 + self._count % 255
        elif self._earlier is not None:
            size = min(self._earlier.numel(), data.numel())
            corrupted[:size] = self._earlier[:size]
        self._earlier = data
        return corrupted


def harm(patch: pytest.MonkeyPatch, name: str, kind: str, where: str) -> None:
    """Harm the first result of a check whose case contains ``where``, or what ``kind`` says."""
    if name == "round_trip":
        patch.setattr(transfers, "Copies", lambda: FaultyCopies(kind, where))
    else:
        {"gemm": harm_products, "canaries": harm_canaries}.get(name, harm_results)(patch, kind, where)


def harm_results(patch: pytest.MonkeyPatch, kind: str, where: str) -> None:
    right, left, attend = arithmetic.Comparison.close, [1], arithmetic.scaled_dot_product_attention

    def close(self: Any, case: str, result: Tensor, *reference: Tensor) -> bool:
        wanted = kind != "gradient" or case.rpartition(": ")[2].startswith("gradient")
        if left and kind != "math" and wanted and where in case:
            left.clear()
            result = with_fault(result.detach(), kind)
        return right(self, case, result, *reference)

    def by_math(*inputs: Tensor, **options: Any) -> Tensor:
        with (
            sdpa_kernel(SDPBackend.MATH) if kind == "math" and (not where or "attn_mask" in options) else nullcontext()
        ):
            return attend(*inputs, **options)

    patch.setattr(arithmetic.Comparison, "close", close)
    patch.setattr(arithmetic, "scaled_dot_product_attention", by_math)


def harm_products(patch: pytest.MonkeyPatch, kind: str, where: str) -> None:
    multiply, calls = torch.mm, Counter[str]()

    def product(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        result, name = multiply(left, right, **options), str(left.dtype)
        calls[name] += len(left) != len(right)  # not those that are timed
        if calls[name] == FAULTY_REPEAT and where in name and not calls["harmed"]:
            calls["harmed"] = 1
            result.copy_(with_fault(result, kind))
        return result

    patch.setattr(torch, "mm", product)


def harm_canaries(patch: pytest.MonkeyPatch, kind: str, _where: str) -> None:
    fill, churn, blocks, cycles = transfers.fill_with_pattern, transfers._churn, list[Tensor](), [0]

    def filled(buffer: Tensor, number: int, **more: Any) -> Tensor:
        if len(blocks) < transfers._CANARIES:  # those of the device come first
            blocks.append(buffer)
        return fill(buffer, number, **more)

    def churned(*arguments: Any) -> list[Tensor]:
        cycles[0] += 1
        if cycles[0] == FAULTY_CYCLE and kind == "zeros":
            blocks[-1][8192 : 8192 + 4096] = 0
        elif cycles[0] == FAULTY_CYCLE:
            blocks[-1][12_345] ^= 16
        return churn(*arguments)

    patch.setattr(transfers, "fill_with_pattern", filled)
    patch.setattr(transfers, "_churn", churned)
