"""Memory that libraries take of the card for themselves, taken and measured before the weights are loaded.

The first matrix product of a thread makes a BLAS handle with a workspace, and the first kernel of a library loads its
code: both outside torch's allocator, which keeps what it once had and cannot be asked for it. Where the weights and the
allocator's cache have filled the card by then, a run dies of a few megabytes (pytorch#128601), or, inside bitsandbytes,
without an exception. So one operation of each kind runs while there is room. It is also the first look at whether this
card computes at all.

Not covered: kernels that only other shapes or dtypes select, Triton's, RCCL's buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.errors import OutOfMemoryError, StallError, TuneError, device_shortage
from hf_rocm_tune.transfer import digest_on_device

_GIB = 1 << 30
_SIDE = 64  # of the operands


def warm_up(device: torch.device, *, bits: int | None = None) -> int:
    """One matrix product, forward and backward, one attention, one digest, and one operation on quantised weights.

    Args:
        device: does nothing for the host.
        bits: of the weights that bitsandbytes will quantise: 4, 8 or None.

    Returns:
        Bytes that the card has less since, beyond what torch's allocator has taken; what other processes take or give
        back meanwhile counts as well, so this is a measurement and no promise.

    Raises:
        OutOfMemoryError: there is hardly any memory on the card.
        StallError: the card cannot compute this, with the reason.
    """
    if device.type != "cuda":
        return 0
    try:
        with torch.cuda.device(device):
            before = _outside(device)
            for dtype in (torch.float32, torch.bfloat16):
                _multiply(torch.ones(_SIDE, _SIDE, dtype=dtype, device=device, requires_grad=True))
            weight = torch.ones(_SIDE, _SIDE, dtype=torch.float16, device=device)
            digest_on_device(weight)
            if bits is not None:
                _quantise(weight, bits)
            torch.cuda.synchronize(device)
            return max(0, _outside(device) - before)
    except RuntimeError as error:
        raise _refusal(error, device) from error


def _outside(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _multiply(operand: Tensor) -> None:
    """Backward runs in a thread of its own, which has a BLAS handle of its own."""
    rows = (operand @ operand).view(1, 1, _SIDE, _SIDE)
    functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True).sum().backward()


def _quantise(weight: Tensor, bits: int) -> None:
    """By bitsandbytes' operators themselves: its functions would bring their tables to the card, round the engine."""
    import bitsandbytes  # noqa: F401  # registers them

    operators = torch.ops.bitsandbytes
    if bits == 4:
        packed, scales = operators.quantize_4bit(weight, 64, "nf4", torch.uint8)
        operators.dequantize_4bit(packed, scales, 64, "nf4", list(weight.shape), weight.dtype)
    else:
        rows = operators.int8_vectorwise_quant(weight, 0.0)[0]
        operators.int8_linear_matmul(rows, rows)


def _refusal(error: RuntimeError, device: torch.device) -> TuneError:
    free, total = torch.cuda.mem_get_info(device)
    room = f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"
    said = device_shortage(error)
    if said is not None and free < _GIB:
        return OutOfMemoryError(f"{room} on the card before a weight is loaded ({said}): end what else uses the card")
    why = said or str(error).strip().partition("\n")[0]
    # A shortage that is none: hipBLAS says so of some installations, TheRock#1708.
    beside = f" although {room}" if said is not None else ""
    return StallError(f"the card cannot do what training needs{beside} ({why}): see `hf-rocm-tune doctor`")
