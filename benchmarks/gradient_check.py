"""What the check of gradient averages costs a step: DistributedDataParallel over gloo, stock and checked.

Two processes on this machine train the same stack of low-rank adapters in both ways, turn by turn in one run. Times are
those of backward with the averages and, where they are checked, of the verdict; forward and optimizer are left out, so
the share of a real step is smaller than the ratio shown. Prints a table and, as the last line, one JSON object.

    python benchmarks/gradient_check.py [--million 10] [--dtype float32] [--steps 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.ranks.gradients import GradientCheck, watch
from hf_rocm_tune.transfer import Mover

RANKS, WIDTH, RANK = 2, 4096, 16
WARM_UP = 3


class Adapters(nn.Module):
    """As many low-rank pairs of an 8B model's shape as make the number of parameters; forward reads each once."""

    def __init__(self, million: float, dtype: torch.dtype) -> None:
        super().__init__()
        pairs = max(1, round(million * 1e6 / (2 * WIDTH * RANK)))
        shapes = [(RANK, WIDTH), (WIDTH, RANK)] * pairs
        self.weights = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(weight * scale).sum() for weight in self.weights]).sum()


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=10.0, help="trainable parameters, in millions")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "seconds.json"
        multiprocessing.spawn(_rank, (scratch, wanted.million, wanted.dtype, wanted.steps, output), nprocs=RANKS)
        measured = json.loads(output.read_text())
    result = {"machine": _machine(), "dtype": wanted.dtype, "steps": wanted.steps, **_summary(measured)}
    _print_table(result)
    text = json.dumps(result)
    if wanted.json:
        wanted.json.write_text(text + "\n")
    print(text)


def _rank(rank: int, scratch: str, million: float, dtype: str, steps: int, output: Path) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    stock, checked = (DistributedDataParallel(Adapters(million, getattr(torch, dtype))) for _ in range(2))
    seconds: dict[str, list[float]] = {"stock": [], "checked": [], "verdict": []}
    with Mover(torch.device("cpu")) as mover:
        check = watch(checked, mover, None)
        assert check is not None
        for step in range(steps + WARM_UP):
            sample = {"stock": _step(stock, None)[0]}
            sample["checked"], sample["verdict"] = _step(checked, check)
            if step >= WARM_UP:  # the first steps rebuild buckets and fill caches
                for name, value in sample.items():
                    seconds[name].append(value)
        found = mover.report.to_dict()["gradients"]
    assert found["mismatches"] == 0
    if rank == 0:
        parameters = sum(weight.numel() for weight in stock.parameters())
        output.write_text(json.dumps({"seconds": seconds, "parameters": parameters, **found}))
    dist.destroy_process_group()


def _step(model: DistributedDataParallel, check: GradientCheck | None) -> tuple[float, float]:
    """Seconds of backward with averages and verdict, and of the verdict alone."""
    model.zero_grad()
    loss = model(torch.ones((), dtype=next(model.parameters()).dtype))
    dist.barrier()
    begun = time.perf_counter()
    loss.backward()
    averaged = time.perf_counter()
    if check is not None:
        check.settle(step=1)
    ended = time.perf_counter()
    return ended - begun, ended - averaged


def _summary(measured: dict[str, Any]) -> dict[str, Any]:
    seconds = measured["seconds"]
    ratios = [ours / stock for ours, stock in zip(seconds["checked"], seconds["stock"], strict=True)]
    extra = [ours - stock for ours, stock in zip(seconds["checked"], seconds["stock"], strict=True)]
    per_million = [1000 * each / (measured["parameters"] / 1e6) for each in extra]
    figures = {f"{name}_ms": _spread([1000 * each for each in values]) for name, values in seconds.items()}
    figures |= {"extra_ms_per_million_parameters": _spread(per_million), "checked/stock": _spread(ratios)}
    return {"parameters": measured["parameters"], "buckets": measured["buckets"], "figures": figures}


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def _machine() -> dict[str, Any]:
    return {
        "device": "cpu",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.platform(),
        "torch": torch.__version__,
    }


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['parameters'] / 1e6:.1f} million parameters, {result['dtype']}, {RANKS} ranks over gloo")
    print(f"{'':34}{'median':>10}{'min':>10}{'max':>10}")
    for name, row in result["figures"].items():
        print(f"{name:34}" + "".join(f"{row[key]:>10.3f}" for key in ("median", "min", "max")))


if __name__ == "__main__":
    main()
