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

FAULTY_REPEAT, FAULTY_CYCLE = 37, 2


def with_fault(result: Tensor, kind: str) -> Tensor:
    """A copy with every element zero, or one NaN, or one negated and less by one."""
    broken = result.clone(memory_format=torch.contiguous_format)
    flat, at = broken.view(-1), broken.numel() // 2
    if kind == "zeros":
        flat.zero_()
    else:
        flat[at] = float("nan") if kind == "nan" else -flat[at] - 1
    return broken


def harm(patch: pytest.MonkeyPatch, name: str, kind: str, where: str) -> None:
    """Harm the first result of a check whose case contains ``where``, or what ``kind`` says."""
    {"gemm": harm_products, "canaries": harm_canaries}.get(name, harm_results)(patch, kind, where)


def harm_results(patch: pytest.MonkeyPatch, kind: str, where: str) -> None:
    right, left, backend = arithmetic.Comparison.close, [1], arithmetic._backend

    def close(self: Any, case: str, result: Tensor, *reference: Tensor) -> bool:
        wanted = kind != "gradient" or case.rpartition(": ")[2].startswith("gradient")
        if left and kind != "math" and wanted and where in case:
            left.clear()
            result = with_fault(result.detach(), kind)
        return right(self, case, result, *reference)

    def by_math(compare: Any, batch: str) -> str:
        with sdpa_kernel(SDPBackend.MATH) if kind == "math" and where in batch else nullcontext():
            return backend(compare, batch)

    patch.setattr(arithmetic.Comparison, "close", close)
    patch.setattr(arithmetic, "_backend", by_math)


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
