"""Triton kernels with a fault each, on the simulated card; prints what was said of each as a JSON line."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl


@triton.jit
def reads_behind(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at), mask=at < n)  # the mask of the load was dropped


@triton.jit
def writes_behind(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n, other=0), mask=at <= n)  # one too many


@triton.jit
def reads_by_data(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    far = tl.load(source + at, mask=at < n, other=0).to(tl.int64) << 20  # a shift too far
    tl.store(target + at, tl.load(source + far, mask=at < n), mask=at < n)


def main() -> None:
    """Runs each on its own memory."""
    for kernel in (reads_behind, writes_behind, reads_by_data):
        source, target = (
            torch.ones(1000, dtype=torch.int32, device="cuda"),
            torch.empty(1000, dtype=torch.int32, device="cuda"),
        )
        kernel[(8,)](source, target, 1000, BLOCK=256)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(json.dumps({kernel.fn.__name__: str(error)}), flush=True)
    host = torch.ones(1000, dtype=torch.int32)
    try:
        writes_behind[(1,)](host, host, 1000, BLOCK=256)
    except ValueError as error:
        print(json.dumps({"host": str(error)}), flush=True)


if __name__ == "__main__":
    main()
