"""The child's half of ``blas``: the same matrix products by rocBLAS and by hipBLASLt, their results and their times.

On a CUDA build the two names stand for cuBLAS and cuBLASLt; a CPU build has no such choice and times one library twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.doctor.measured.rounding import exact_factors, spread
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

LIBRARIES = {"rocblas": "cublas", "hipblaslt": "cublaslt"}
"""By the names of ``torch.backends.cuda.preferred_blas_library``."""
CARD_SHAPES = ((2048, 4096, 4096), (2048, 4096, 1024), (2048, 16, 4096))
"""Rows, inputs and outputs of linear layers in bfloat16: a projection, a grouped one, half of a LoRA pair."""
HOST_SHAPES = ((64, 128, 96),)
_CHECKED_SHAPE = (192, 512, 320)
_REPEATS = 7


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply by each library in turn.

    Args:
        request: ``device``, ``address``; ``seed``; ``fault``, see `tally`, with ``where`` a library's name.

    Returns:
        See `Tally.result`; ``seconds``: library to the median times of one forward and backward product by shape;
        ``shapes``; ``unavailable``: library to the reason why torch does not take it here; ``wrong_by``: the libraries
        that gave a wrong result.
    """
    device = device_of(request)
    tally = Tally(request)
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    unavailable = {name: reason for name in LIBRARIES if (reason := _refusal(name, device))}
    names = [name for name in LIBRARIES if name not in unavailable]
    wrong_by = []
    shapes = CARD_SHAPES if device.type == "cuda" else HOST_SHAPES
    with Mover(device) as mover:
        left, right = exact_factors(*_CHECKED_SHAPE, torch.bfloat16, generator)
        reference = (left.double() @ right.double()).to(torch.bfloat16)
        placed = [mover.move(tensor, name="factor") for tensor in (left, right)]
        for name in names:
            step(f"computing a product by {name}")
            _prefer(name, device)
            if not tally.exact(f"bfloat16 product by {name}", placed[0] @ placed[1], reference):
                wrong_by.append(name)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for shape in shapes:
            timed = [mover.move(spread(size, torch.bfloat16, generator), name="factor") for size in _sizes(shape)]
            times: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(_REPEATS + 1):
                for name in names:  # in turn, so that a clock that changes changes it for both
                    step(f"timing {shape} by {name}")
                    _prefer(name, device)
                    times[name].append(_time(timed, device))
            for name in names:
                seconds[name].append(statistics.median(times[name][1:]))  # the first one loads kernels
    return tally.result(seconds=seconds, shapes=[list(s) for s in shapes], unavailable=unavailable, wrong_by=wrong_by)


def _sizes(shape: tuple[int, int, int]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Inputs, weight, gradient of the outputs."""
    rows, inputs, outputs = shape
    return (rows, inputs), (outputs, inputs), (rows, outputs)


def _prefer(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        torch.backends.cuda.preferred_blas_library(LIBRARIES[name])


def _refusal(name: str, device: torch.device) -> str:
    """Why torch does not take a library here; empty where it does. It may also take another one without raising."""
    if device.type != "cuda":
        return ""
    try:
        taken = torch.backends.cuda.preferred_blas_library(LIBRARIES[name])
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    library = str(taken).rpartition(".")[2]  # an enumeration of C++: "_BlasBackend.Cublaslt"
    return "" if library.lower() == LIBRARIES[name] else f"torch takes {library} on this architecture"


def _time(factors: list[Tensor], device: torch.device) -> float:
    """Seconds of a forward product and the two of its backward pass."""
    inputs, weight, upstream = factors
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    functional.linear(inputs, weight)
    upstream @ weight
    upstream.t() @ inputs
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
