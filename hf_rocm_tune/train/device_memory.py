"""Device memory beside the model: a fragmented cache, and memory of libraries.

What was reserved and never in use at any one time, ``reserved - peak of allocated``, a lower bound, indicates
fragmentation: the cache is then returned between steps (in every healthy run much of it is free there). A library's
first kernel takes memory outside torch's allocator, for which a card that weights and cache have filled has no room
(pytorch#128601): one operation of each kind runs first. Not covered: kernels for other shapes or dtypes, Triton, RCCL.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import TrainerCallback

from hf_rocm_tune.errors import OutOfMemoryError, StallError, device_shortage
from hf_rocm_tune.models.placement import release_memory
from hf_rocm_tune.transfer import digest_on_device

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.transfer import TransferReport

logger = logging.getLogger(__name__)

LOOK_EVERY = 10
"""Steps between two checks for fragmentation."""
PAUSE = 50
"""Fewest steps between two returns of the cache: the allocations after a return are slow."""
LITTLE_FREE, MUCH_UNUSED = 0.05, 0.10
"""Shares of the device's memory: too little is free, and too much was never in use."""
_GIB = 2**30
_SIDE = 64  # of the operands of the libraries' first operations


class AllocatorReading(NamedTuple):
    """The memory of one device at one moment, in bytes."""

    total: int
    free: int  # as the driver says; what other processes hold is not free
    allocated: int  # held by tensors
    allocated_peak: int  # the most that tensors held at once since the process began
    reserved: int  # taken from the driver
    inactive_split: int  # free, in blocks of which another part is in use
    retries: int  # allocations that failed at first and succeeded after the cache was returned

    def for_log(self) -> dict[str, float]:
        """The figures that are logged beside the loss, in GiB."""
        names = ("allocated", "reserved", "inactive_split")
        return {f"memory/{name}_gib": round(getattr(self, name) / _GIB, 3) for name in names}


def read(device: torch.device) -> AllocatorReading:
    """The memory of an accelerator now. Waits for nothing on the device."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)  # empty before the first allocation
    return AllocatorReading(
        total=total,
        free=free,
        allocated=stats.get("allocated_bytes.all.current", 0),
        allocated_peak=stats.get("allocated_bytes.all.peak", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        inactive_split=stats.get("inactive_split_bytes.all.current", 0),
        retries=stats.get("num_alloc_retries", 0),
    )


def reason_to_empty(now: AllocatorReading, earlier: AllocatorReading | None) -> str | None:
    """Why the cache should be returned at the next safe point; None when it should stay."""
    if earlier is not None and now.retries > earlier.retries:
        return f"{now.retries - earlier.retries} allocations succeeded only after the cache was returned"
    never_in_use = now.reserved - now.allocated_peak
    if now.free < LITTLE_FREE * now.total and never_in_use > MUCH_UNUSED * now.total:
        return (
            f"{never_in_use / _GIB:.1f} GiB are reserved beyond what was ever in use at once, and "
            f"{now.free / _GIB:.1f} GiB are left"
        )
    return None


class FragmentationCallback(TrainerCallback):
    """Reads the allocator of a device every few steps, and returns its cache where `reason_to_empty` gives a reason."""

    def __init__(self, device: torch.device, report: TransferReport) -> None:
        self._device, self._report = device, report
        self._earlier: AllocatorReading | None = None
        self._quiet_until = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = state.global_step
        if self._device.type != "cuda" or step % LOOK_EVERY:
            return
        earlier, before = self._earlier, read(self._device)
        self._earlier = before
        reason = reason_to_empty(before, earlier)
        if reason is None or step < self._quiet_until:
            return
        self._quiet_until = step + PAUSE
        release_memory()
        self._earlier = after = read(self._device)
        returned, stays = before.reserved - after.reserved, after.inactive_split
        logger.warning(
            "step %d: the allocator's cache was returned to the driver (%s): %.1f GiB; %.1f GiB stay in blocks partly "
            "in use. Batches of similar length (--train_sampling_strategy group_by_length) or of few shapes "
            "(--pad_to_multiple_of 64) fragment it less",
            *(step, reason, returned / _GIB, stays / _GIB),
        )
        self._report.count("memory", cache_given_back=1)
        row = {"step": step, "stage": "memory", "kind": "fragmented", "reason": reason, "returned_bytes": returned}
        self._report.incident({**row, "inactive_split_bytes": stays, "outcome": "cache given back"})


# ---- libraries ----------------------------------------------------------------------------------------------


def warm_up(device: torch.device, *, bits: int | None = None) -> int:
    """Run one matrix product, forward and backward, one attention, one digest, one operation on quantised weights."""
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
        free, total = torch.cuda.mem_get_info(device)
        room = f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"
        shortage = device_shortage(error)
        if shortage is not None and free < _GIB:
            fix = "end other users of the card"
            raise OutOfMemoryError(f"{room} on the card before a weight is loaded ({shortage}): {fix}") from error
        why = f"({str(error).strip().partition(chr(10))[0]})"
        if shortage:  # with some installations hipBLAS reports one although memory is free, TheRock#1708
            why = f"although {room} ({shortage})"
        raise StallError(f"the card cannot do what training needs {why}: see `hf-rocm-tune doctor`") from error


def _outside(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _multiply(operand: Tensor) -> None:
    """Forward and backward: backward runs in a thread of its own, with a BLAS handle of its own."""
    rows = (operand @ operand).view(1, 1, _SIDE, _SIDE)
    functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True).sum().backward()


def _quantise(weight: Tensor, bits: int) -> None:
    """Calls bitsandbytes' operators: its Python functions would copy their tables to the card, outside the mover."""
    import bitsandbytes  # noqa: F401  # registers them

    operators = torch.ops.bitsandbytes
    if bits == 4:
        packed, scales = operators.quantize_4bit(weight, 64, "nf4", torch.uint8)
        operators.dequantize_4bit(packed, scales, 64, "nf4", list(weight.shape), weight.dtype)
    else:
        rows = operators.int8_vectorwise_quant(weight, 0.0)[0]
        operators.int8_linear_matmul(rows, rows)
