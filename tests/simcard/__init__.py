"""A simulated card: plays a CUDA device on the CPU, below a CPU build of torch, so that code for a device runs there.

`card.cpp` is the device (allocator, streams that are threads, events, page-locked memory, copies, kernels by the CPU's
own operators), `card` builds, loads and controls it, `cuda` is what ``torch.cuda`` answers, `ranks` stands in for RCCL,
`quantised` for bitsandbytes' kernels, and `log` reads what crossed. `boot/sitecustomize.py` puts all that below torch
in every process that has ``SIMCARD=1`` and its directory on PYTHONPATH; there this package is called `simcard`.

Kept to, because the code under test depends on it: each stream runs in order and later than the call; a kernel waits
for its own stream and for awaited events only; freed memory goes to the next allocation of the same stream at once; a
non-blocking copy touches page-locked memory when it runs; host tensors are refused as operands; allocations beyond the
capacity raise ``torch.OutOfMemoryError``; a process that has asked for its cards leaves its forked children without;
Triton can be imported and its driver does not compile, as without Python's headers. With ``SIMCARD_GFX1100=1`` it does,
and its kernels and those of bitsandbytes' ROCm library are executed as gfx1100 machine code (`tests.gfx1100`).

With ``SIMCARD_BLAS`` beside it the card's products are those of AMD's own libraries (`tests.gfx1100.rocm_libs`).

Not simulated: real DMA, RCCL and peer copies, a card's attention, the allocator's fragmentation, and speed.
"""

from __future__ import annotations

import os

from .card import HERE, NAME, NoCompiler, configure, counts, delay, library, poison, sync_ops

__all__ = [
    "NAME", "NoCompiler", "after_torch", "before_torch", "configure", "counts", "delay", "environment", "library",
    "poison", "sync_ops",
]  # fmt: skip


def environment(*, gfx1100: bool = False) -> dict[str, str]:
    """What a process needs to have the card; built first where it is not yet.

    Args:
        gfx1100: kernels are executed as the machine code of that card.

    Raises:
        NoCompiler: it cannot be built here.
    """
    library()
    kernels = {}
    if gfx1100:
        from tests.gfx1100 import build, hip

        try:
            build.library(), hip.library()
        except build.NoCompiler as error:
            raise NoCompiler(str(error)) from None
        cache = HERE.parents[1] / "build" / "gfx1100" / "triton"
        kernels = {"SIMCARD_GFX1100": "1", "TRITON_CACHE_DIR": str(cache)}
    path = (str(HERE.parents[1]), str(HERE / "boot"), os.environ.get("PYTHONPATH", ""))
    return {"SIMCARD": "1", "PYTHONPATH": os.pathsep.join(filter(None, path)), **kernels}


def before_torch() -> None:
    """Before torch is executed: it asks once whether there is a CUDA."""
    from . import card

    card.load()


def after_torch() -> None:
    """After it was: tells the Python side of torch, and sees to libraries that are imported later."""
    from . import cuda, ranks

    cuda.install()
    ranks.install()
    configure()
