"""A step of somebody else's script on the simulated card: processor time of `hf-rocm-tune script` over stock's.

    python benchmarks/script_step.py --sources DIR [--pairs 3] [--steps 12] [--json FILE]

``--sources`` holds a checkout of minGPT; its ``adder.py`` runs unmodified with three sizes of model. Stock and ours run
in turns. A step is what lies between two ends of ``optimizer.step``, in processor seconds of all threads, the simulated
card's among them, which computes on the processor: a card's own time is not in it. The first four steps are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import in_turns, main, print_table, ratios, show, spread
from benchmarks.foreign_scripts import CARD
from hf_rocm_tune.errors import UsageError

SIZES = ("gpt-nano", "gpt-micro", "gpt-mini", "gopher-44m")
LEFT_OUT = 4
NOTE = """
import json, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
import torch
if sys.argv[1] == "ours":
    from hf_rocm_tune import script
ends = []
def after(*_):
    torch.cuda.synchronize()
    ends.append((time.process_time(), time.thread_time()))
sys.argv = sys.argv[2:]
sys.path[0] = str(__import__("pathlib").Path(sys.argv[0]).resolve().parent)
register_optimizer_step_post_hook(after)
try:
    if "script" in globals():
        script.main(list(sys.argv))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("ENDS", json.dumps(ends))
"""


def run(side: str, script: Path, size: str, steps: int) -> tuple[float, float]:
    """Medians of a step: processor seconds of the process, and of the training thread alone."""
    with tempfile.TemporaryDirectory() as scratch:
        words = (f"--trainer.max_iters={steps + LEFT_OUT + 1}", f"--model.model_type={size}", "--trainer.num_workers=0")
        paths = (CARD["PYTHONPATH"], str(script.parents[2]))
        done = subprocess.run(
            [sys.executable, "-c", NOTE, side, str(script), *words, f"--system.work_dir='{scratch}'"],
            env={**os.environ, **CARD, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            cwd=scratch, capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ENDS ")]
    if done.returncode or not lines:
        raise UsageError(f"{script.name} ended with {done.returncode}: {done.stderr[-800:]}")
    ends = json.loads(lines[0].removeprefix("ENDS "))[LEFT_OUT:]
    pairs = [(late[0] - early[0], late[1] - early[1]) for early, late in pairwise(ends)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def measure(wanted: argparse.Namespace) -> dict[str, Any]:
    script = wanted.sources / "minGPT" / "projects" / "adder" / "adder.py"
    if not script.is_file():
        raise UsageError(f"--sources {wanted.sources}: no minGPT/projects/adder/adder.py there")
    found, table = {}, []
    for size in wanted.sizes:
        times: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
        for turn, side in in_turns(times, wanted.pairs):
            measured = run(side, script.resolve(), size, wanted.steps)
            if turn:
                times[side].append(measured)
        rows = {side: [row[0] for row in each] for side, each in times.items()}
        host = {side: [row[1] for row in each] for side, each in times.items()}
        found[size] = {
            **{f"{side}_seconds": spread(each) for side, each in rows.items()},
            **{f"{side}_training_thread_seconds": spread(each) for side, each in host.items()},
            "ratio": ratios(rows["ours"], rows["stock"]),
            "training_thread_ratio": ratios(host["ours"], host["stock"]),
        }
        one = found[size]
        table.append((size, show(one["stock_seconds"], 1, 1e3), show(one["ours_seconds"], 1, 1e3), show(one["ratio"])))
        print(size, one, flush=True)
    print_table(("model", "stock ms", "ours ms", "ratio"), table)
    return {"sizes": found}


if __name__ == "__main__":
    main(
        measure,
        __doc__,
        {
            "sources": {"type": Path, "required": True},
            "pairs": {"type": int, "default": 3},
            "steps": {"type": int, "default": 12},
            "sizes": {"nargs": "*", "default": list(SIZES), "choices": SIZES},
        },
    )
