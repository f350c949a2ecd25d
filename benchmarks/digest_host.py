"""Ways of computing the host digest, by speed: ``python benchmarks/digest_host.py [--mib N] [--json FILE]``.

Every way reads 32-bit words, sums them and sums them weighted with a table of 64-bit numbers, in blocks of a size that
stays in the cache. Each is run in turn, several rounds, in one thread but where it says two; GB/s are 10^9 bytes a
second, the median of the rounds and their range. ``reading alone`` is the bound: a sum over 64-bit words. Numba takes
part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from hf_rocm_tune.transfer import digest, digest_on_device
from hf_rocm_tune.transfer.digest import host_method, plain_sums

Way = Callable[[], object]


def reading_alone(data: torch.Tensor) -> Way:
    words = data.numpy().view(np.uint64)
    return lambda: words.sum()


def torch_blocks(data: torch.Tensor, block: int) -> Way:
    words = data.view(torch.uint32)
    table, wide = torch.arange(block), torch.empty(block, dtype=torch.int64)

    def run() -> None:
        for start in range(0, words.numel(), block):
            wide.copy_(words[start : start + block])
            int(wide.sum()), int(torch.dot(wide, table))

    return run


def numpy_blocks(data: torch.Tensor, block: int, *, einsum: bool) -> Way:
    words = data.numpy().view(np.uint32)
    table, wide = np.arange(block, dtype=np.uint64), np.empty(block, dtype=np.uint64)

    def run() -> None:
        for start in range(0, words.size, block):
            np.copyto(wide, words[start : start + block])
            int(wide.sum()), int(np.einsum("i,i->", wide, table) if einsum else np.dot(wide, table))

    return run


def numba_blocks(data: torch.Tensor, block: int) -> Way:
    import numba

    @numba.njit(nogil=True)
    def reduce(words: np.ndarray, table: np.ndarray) -> tuple[np.uint64, np.uint64]:
        plain = weighted = np.uint64(0)
        for i in range(words.size):
            word = np.uint64(words[i])
            plain += word
            weighted += word * table[i]
        return plain, weighted

    words = data.numpy().view(np.uint32)
    table = np.arange(block, dtype=np.uint64)
    return lambda: [reduce(words[start : start + block], table) for start in range(0, words.size, block)]


def in_two_threads(way: Callable[[torch.Tensor], object], data: torch.Tensor) -> Way:
    pool = ThreadPoolExecutor(2)
    halves = data.chunk(2)
    return lambda: list(pool.map(way, halves))


def ways(data: torch.Tensor) -> dict[str, Way]:
    table: dict[str, Way] = {"reading alone": reading_alone(data)}
    for block in (1 << 14, 1 << 16, 1 << 18):
        table[f"torch int64, dot, block {block}"] = torch_blocks(data, block)
        table[f"NumPy uint64, dot, block {block}"] = numpy_blocks(data, block, einsum=False)
        table[f"NumPy uint64, einsum, block {block}"] = numpy_blocks(data, block, einsum=True)
    if importlib.util.find_spec("numba"):
        table["Numba, block 65536"] = numba_blocks(data, 1 << 16)
    table["plain torch (the fallback)"] = lambda: plain_sums(data, 0)
    table[f"digest ({host_method().name}, as shipped)"] = lambda: digest(data)
    table["reading alone, two threads"] = in_two_threads(lambda half: half.numpy().view(np.uint64).sum(), data)
    table["plain torch, two threads"] = in_two_threads(lambda half: plain_sums(half, 0), data)
    table[f"digest ({host_method().name}), two threads"] = in_two_threads(digest, data)
    table["digest_on_device, on the CPU"] = lambda: digest_on_device(data)
    return table


def measure(table: dict[str, Way], nbytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s per way: median, least and most; the ways take turns in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(rounds + 1):
        for name, way in table.items():
            begun = time.perf_counter()
            way()
            speeds[name].append(nbytes / (time.perf_counter() - begun) / 1e9)
    return {
        name: {
            "median_gb_per_s": round(statistics.median(values[1:]), 3),
            "min_gb_per_s": round(min(values[1:]), 3),
            "max_gb_per_s": round(max(values[1:]), 3),
        }
        for name, values in speeds.items()
    }


def machine() -> dict[str, object]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    return {"cpu": model, "cpus": os.cpu_count(), **versions, "method": host_method().reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the data in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the last line to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.randint(0, 256, (arguments.mib << 20,), dtype=torch.uint8)
    results = measure(ways(data), data.numel(), arguments.rounds)
    for name, row in results.items():
        speed = f"{row['median_gb_per_s']:8.2f} GB/s  ({row['min_gb_per_s']:.2f} to {row['max_gb_per_s']:.2f})"
        print(f"{name:40s} {speed}")
    line = json.dumps({"benchmark": "digest_host", "mib": arguments.mib, **machine(), "results": results})
    print(line)
    if arguments.json:
        arguments.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
