"""Counts what kernels cost on a gfx1100, by executing their machine code on the simulated card; nothing is measured.

    python benchmarks/gfx1100_kernels.py [--json FILE]

From instructions and bytes follows the least time that a 7900 XT can need: the larger of what 84 compute units of two
SIMDs take at 2.4 GHz to issue the vector instructions, and what 800 GB/s take for operands and results, moved once.
Latency, clocks under load, caches and launches make it longer. Beside it stands what `hf-rocm-tune plan` assumes of a
kernel that moves as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_rocm_tune.plan.estimate import BANDWIDTH_SHARE

ROOT = Path(__file__).resolve().parents[1]
SIMDS, HERTZ, BANDWIDTH, REGISTERS = 84 * 2, 2.4e9, 800e9, 1536
WAVES = 16
"""The most that a SIMD holds."""
NOTE = "counted from emulated gfx1100 machine code, not measured"


def cases() -> dict[str, tuple[int, Callable[[], object]]]:
    """What is executed, by name, with the bytes of its operands and results."""
    import bitsandbytes
    import torch
    from bitsandbytes import functional as bnb

    from hf_rocm_tune.transfer.digest_triton import triton_sums

    card = torch.device("cuda", 0)
    torch.manual_seed(0)
    data = torch.randint(0, 256, ((32 << 20) + 16,), dtype=torch.uint8, device=card)
    sums = torch.zeros(2, dtype=torch.int64, device=card)
    weight = torch.randn(1024, 2048, dtype=torch.bfloat16, device=card)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    rows = {count: torch.randn(count, 2048, dtype=torch.bfloat16, device=card) for count in (1, 8)}
    parameter = torch.randn(1 << 20, device=card).requires_grad_()
    parameter.grad = torch.randn(1 << 20, device=card)
    adam = bitsandbytes.optim.AdamW8bit([parameter])
    mib, weights = 1 << 20, weight.numel()
    packed_bytes = weights // 2 + weights // 64
    return {
        "digest, 32 MiB, 16-byte loads": (32 * mib, lambda: triton_sums(data[: 32 * mib], 0, sums)),
        "digest, 32 MiB, skewed": (32 * mib, lambda: triton_sums(data[: 32 * mib], 17, sums)),
        "digest, 1 MiB, byte by byte": (mib, lambda: triton_sums(data[1 : 1 + mib], 0, sums)),
        "NF4 quantised, 2 Mi of bfloat16": (
            2 * weights + weights // 2 + weights // 16,
            lambda: bnb.quantize_4bit(weight, quant_type="nf4"),
        ),
        "NF4 dequantised, 2 Mi to bfloat16": (
            2 * weights + packed_bytes,
            lambda: bnb.dequantize_4bit(packed, state),
        ),
        **{
            f"fused NF4 product, {count} by 1024 by 2048": (
                packed_bytes + 2 * count * (1024 + 2048),
                lambda count=count: bitsandbytes.matmul_4bit(rows[count], packed.t(), state),
            )
            for count in rows
        },
        # parameter and two quantised moments read and written, the gradient read
        "AdamW in 8 bits, 1 Mi parameters": ((8 + 4 + 4) * mib, adam.step),
    }


def count() -> None:
    """In a process with the card: runs each case, and says how many launches there were before and after."""
    import torch

    log = Path(os.environ["SIMCARD_GFX1100_LOG"])
    told = {}
    for name, (nbytes, work) in cases().items():
        torch.cuda.synchronize()
        before = len(log.read_text().splitlines()) if log.exists() else 0
        work()
        torch.cuda.synchronize()
        told[name] = [nbytes, before, len(log.read_text().splitlines())]
    print(json.dumps(told))


def row(name: str, nbytes: int, launches: list[Any]) -> dict[str, Any]:
    """The counts of a case, and the bound that follows."""
    counts = {key: sum(each.counts[key] for each in launches) for key in launches[0].counts}
    vgprs, lds = (max(each.counts[key] for each in launches) for key in ("vgprs", "lds_bytes"))
    issue, memory = counts["valu_cycles"] / SIMDS / HERTZ, nbytes / BANDWIDTH
    classes = ("salu", "valu", "trans", "vmem_load", "vmem_store", "atomics", "lds", "smem", "wmma", "branches")
    return {
        "case": name,
        "kernels": sorted({each.name for each in launches}),
        "launches": len(launches),
        "waves": counts["waves"],
        "instructions": {key: counts[key] for key in classes},
        "bytes": nbytes,
        "bytes_that_lanes_moved": counts["bytes_loaded"] + counts["bytes_stored"],
        "lds_conflict_cycles": counts["lds_conflict_cycles"],
        "registers_of_a_lane": vgprs,
        "waves_of_a_simd": min(WAVES, REGISTERS // max(vgprs, 1)),
        "lds_bytes": lds,
        "issue_microseconds": round(issue * 1e6, 3),
        "memory_microseconds": round(memory * 1e6, 3),
        "plan_assumes_microseconds": round(memory / BANDWIDTH_SHARE * 1e6, 3),
        "bound_by": "arithmetic" if issue > memory else "memory",
        "gigabytes_per_second_at_most": round(nbytes / max(issue, memory) / 1e9, 1),
    }


def main() -> None:
    """Executes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the counts to this file, too")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count()
        return
    sys.path.insert(0, str(ROOT))
    from tests import simcard
    from tests.gfx1100.hip import ran

    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        environment = {**os.environ, **simcard.environment(gfx1100=True), "SIMCARD_GFX1100_LOG": str(log)}
        command = [sys.executable, "-W", "ignore", __file__, "--count"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        launches = list(ran(log))
    told = json.loads(done.stdout.splitlines()[-1])
    rows = [row(name, nbytes, launches[begin:end]) for name, (nbytes, begin, end) in told.items()]
    print(f"{NOTE}\n{'':42}{'issue us':>10}{'memory us':>10}{'plan us':>10}{'at most':>12}{'registers':>10}  bound by")
    for each in rows:
        rate = f"{each['gigabytes_per_second_at_most']:.0f} GB/s"
        print(
            f"{each['case']:42}{each['issue_microseconds']:10.1f}{each['memory_microseconds']:10.1f}"
            f"{each['plan_assumes_microseconds']:10.1f}{rate:>12}"
            f"{each['registers_of_a_lane']:10}  {each['bound_by']}"
        )
    if options.json:
        card = {"simds": SIMDS, "hertz": HERTZ, "bytes_per_second": BANDWIDTH}
        options.json.write_text(json.dumps({"note": NOTE, "card": card, "kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
