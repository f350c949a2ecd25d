"""Casts of weights, made on the device from verified tensors and compared there with the CPU's on a sample.

A conversion kernel that is wrong comes after the digest of the transfer and would go unseen (pytorch#16448 was one
that gave zeros). The sample is the beginning, the middle and the end of each tensor, compared by digest. Payloads of
NaN may differ: processors choose them freely. Not covered: elements outside the sample; ``hf-rocm-tune drill --full``
casts every bit pattern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover

SAMPLE_ELEMENTS = 64 << 10
"""Elements of each of the three pieces of a sample."""


def cast_verified(moved: Tensor, source: Tensor, dtype: torch.dtype, *, name: str, mover: Mover) -> Tensor:
    """Casts a weight on its device; under ``verify="full"`` a sample must be bit for bit what the CPU makes of it.

    Args:
        moved: the weight on the device, verified.
        source: the same weight on the host.
        dtype: to cast to.
        name: for incidents.
        mover: through which it came; its report counts casts that were compared.

    Returns:
        The cast, on the device, known to the mover as derived.

    Raises:
        CorruptionError: the device casts wrongly, the second time as well.
    """
    cast = cast_on_device(moved, dtype)
    if mover.settings.verify == "full":
        expected = _sample(source).to(dtype)
        right = _same(_sample(cast), expected)
        mover.report.count("casts", checked=1, mismatches=int(not right))
        if not right:
            cast = cast_on_device(moved, dtype)
            _judge_again(cast, expected, f"{moved.dtype} to {dtype}", name, mover)
    mover.mark_derived(cast, "cast on the device")
    return cast


def cast_on_device(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast itself."""
    return tensor.to(dtype=dtype)


def _judge_again(cast: Tensor, expected: Tensor, pair: str, name: str, mover: Mover) -> None:
    right = _same(_sample(cast), expected)
    row = {"stage": "weights", "tensor": name, "kind": "wrong cast", "outcome": "recovered" if right else "stopped"}
    mover.report.incident(row)
    if not right:
        raise CorruptionError(
            f"weights tensor '{name}': {mover.device} casts {pair.replace('torch.', '')} wrongly, twice, but its bytes "
            "arrived right: arithmetic, not transfer. Nothing of it was used; run hf-rocm-tune drill --full"
        )
    mover.report.count("casts", recovered=1)


def _sample(tensor: Tensor) -> Tensor:
    """First, middle and last elements; all of a small tensor."""
    flat = tensor.reshape(-1)
    if flat.numel() <= 3 * SAMPLE_ELEMENTS:
        return flat
    middle = (flat.numel() - SAMPLE_ELEMENTS) // 2
    return torch.cat([flat.narrow(0, start, SAMPLE_ELEMENTS) for start in (0, middle, flat.numel() - SAMPLE_ELEMENTS)])


def _same(found: Tensor, expected: Tensor) -> bool:
    return digest(found) == digest(expected) or digest(_plain_nan(found)) == digest(_plain_nan(expected))


def _plain_nan(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(tensor.isnan(), float("nan")) if tensor.is_floating_point() else tensor
