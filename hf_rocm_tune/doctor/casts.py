"""``casts``: changes of dtype on the device and on the way to and from it, against those of the CPU.

Weights are cast on the device after they were verified, so a conversion kernel that is wrong would come after the last
digest (pytorch#16448 was one that gave zeros). A copy that changes the dtype is cast by the CPU when it is blocking and
by the device when it is not (torch's Copy.cu), so both are tried. Every 16-bit pattern is cast, and float32 with every
exponent and sign; sizes are odd and views unaligned, because vectorised kernels treat those apart. NaN count as equal
whatever their payload: processors choose that differently.

Faults: those of ``raw_copies``; ``where=non_blocking`` or ``where=torch.bfloat16`` harms some of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.findings import Finding, from_row
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.raw_copies import Copies, RawCopies, copies_for, wait_for

PAIRS = tuple(itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2))
WAYS = (
    "on the device",
    "to the device, blocking",
    "to the device, non_blocking",
    "from the device, blocking",
    "from the device, non_blocking",
)
_POISONED = -21.5
"""What stands where a cast goes; any value that is exact in all three dtypes will do."""
_PATTERNS = 1 << 16
_VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor[1:],
    lambda tensor: tensor[3:-2],
    lambda tensor: tensor[::2],
    lambda tensor: tensor[5:6],
    lambda tensor: tensor[: tensor.numel() // 7 * 7].view(7, -1).t(),
)


@dataclass(kw_only=True)
class Casts:
    """How many casts were compared, elements in all, and elements that differ from the CPU's, with the first pair."""

    compared: int = 0
    elements: int = 0
    wrong: int = 0
    example: str | None = None


def casts(request: Mapping[str, Any]) -> list[Finding]:
    """Compare all casts.

    Args:
        request: ``device``, ``address``, ``fault``.
    """
    device = device_of(request)
    step(f"casting on {device}, and to and from it")
    found = compare_casts(device, seed=0, copies=copies_for(request))
    evidence = [f"{found.elements:,} elements in {found.compared} casts, {found.wrong:,} differ"]
    evidence += [f"the first: {found.example}"] if found.wrong else []
    return [from_row("casts_wrong" if found.wrong else "casts_right", subject=request["device"], evidence=evidence)]


def compare_casts(device: torch.device, *, seed: int, copies: Copies | None = None) -> Casts:
    """Cast in every way of `WAYS` and on the CPU, and compare bit for bit.

    Args:
        device: ``cuda`` or ``cpu``.
        seed: of the lower halves of float32.
        copies: what casts; torch unless given.

    Raises:
        CorruptionError: a source did not arrive.
    """
    found, caster = Casts(), copies or RawCopies()
    with Mover(device) as mover:
        for source, target in PAIRS:
            for values in _sources(source, seed):
                arrived = mover.move(values, name=f"{source} values")
                for view, way in itertools.product(_VIEWS, WAYS):
                    words = f"{source} to {target} {way}"
                    cast = _cast(view(values if way.startswith("to") else arrived), target, way, words, device, caster)
                    _compare(cast, view(values).to(target), words, found)
    return found


def _cast(source: Tensor, dtype: torch.dtype, way: str, words: str, device: torch.device, copies: Copies) -> Tensor:
    """A tensor of the host or the device, cast in one of `WAYS`; on the host."""
    place = torch.device("cpu") if way.startswith("from") else device
    target = torch.full(source.shape, _POISONED, dtype=dtype, device=place)
    copies.copy(target, source, what=words, non_blocking=way.endswith("non_blocking"))
    wait_for(target, source)
    return target.cpu()


def _sources(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Every 16-bit pattern, also as the upper half of a float32 with random lower halves; once of an odd length."""
    bits = torch.arange(_PATTERNS, dtype=torch.int32)
    if dtype is torch.float32:
        generator = torch.Generator().manual_seed(seed)
        lower = torch.randint(0, _PATTERNS, (4, _PATTERNS), generator=generator, dtype=torch.int32)
        # Lower halves that decide how the cut-off part is rounded: nothing, just below, at and just above the middle.
        edges = torch.tensor([[0], [0x7FFF], [0x8000], [0x8001]], dtype=torch.int32).expand(4, _PATTERNS)
        bits = (bits << 16 | torch.cat((lower, edges))).flatten()
    else:
        bits = bits.to(torch.int16)
    return bits.view(dtype), bits[:-1].view(dtype)


def _compare(found: Tensor, right: Tensor, pair: str, casts: Casts) -> None:
    integers = torch.int32 if right.element_size() == 4 else torch.int16
    same = found.contiguous().view(integers) == right.contiguous().view(integers)
    wrong = ~(same | (found.isnan() & right.isnan()))
    casts.compared += 1
    casts.elements += right.numel()
    casts.wrong += int(wrong.sum())
    if casts.example is None and bool(wrong.any()):
        casts.example = f"{pair}: {float(found[wrong][0])} instead of {float(right[wrong][0])}"
