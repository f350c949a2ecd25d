"""A training step on the simulated card: Python calls, launches, copies, bytes, waits and host time; stock beside ours.

    python benchmarks/step_counts.py [--trees before=DIR after=.] [--steps 12] [--pairs 3] [--json FILE]

``--trees``: checkouts of this project, by name; all run on the simulated card of this one. Stock is the bare loop of
`sft_bare.py` (torch, transformers, PEFT): TRL's own loss needs Triton, which this card has not. A step is what lies
between two ends of ``optimizer.step``; the first four are left out. Counts are medians of the others: Python calls of
the training thread (by `sys.setprofile`, in a run of their own), the rest as the card's driver counts it. Host time is
the processor time of the training thread, of whole runs in turns, to stock's of the same turn. What a real card adds of
its own time is not in it.
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

from benchmarks import sft
from benchmarks.common import in_turns, main, print_table, ratios, show, spread
from hf_rocm_tune.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
STOCK = "stock"
LEFT_OUT = 4
SIZE = {"hidden": 256, "layers": 4, "batch": 2, "seq": 32}
METHODS: dict[str, list[str]] = {"LoRA": [], "QLoRA": ["--load_in_4bit", "true"]}
COUNTED = (
    "calls",
    "kernels_async",
    "kernels_sync",
    "copies_async",
    "copies_sync",
    "to_card_bytes",
    "to_host_bytes",
    "waits",
)
NOTE = """
import json, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
calls, ends = [0], []
def count(frame, event, _):
    if event == "call":
        calls[0] += 1
def after(*_):
    import simcard
    if profiled and not ends:
        sys.setprofile(count)
    ends.append({"calls": calls[0], "host_seconds": time.thread_time(), **simcard.counts()})
register_optimizer_step_post_hook(after)
profiled, name = sys.argv[1] == "1", sys.argv[2]
sys.argv = sys.argv[2:]
try:
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
finally:
    sys.setprofile(None)
    print("ENDS", json.dumps(ends), flush=True)
"""


def run(tree: Path, module: str, flags: list[str], *, profiled: bool) -> list[dict[str, float]]:
    """What lies in each step of a run but the first ones."""
    environment = {
        **os.environ, "SIMCARD": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT / "tests" / "simcard" / "boot"))),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", NOTE, str(int(profiled)), module, *flags],
        env=environment, cwd=tree, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ENDS ")]
    if not lines or done.returncode:
        raise UsageError(f"{module} in {tree.name} ended with {done.returncode}: {done.stderr[-800:]}")
    ends = json.loads(lines[0].removeprefix("ENDS "))[LEFT_OUT:]
    return [{name: late[name] - early[name] for name in late} for early, late in pairwise(ends)]


def median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(step[name] for step in steps)


def measure(wanted: argparse.Namespace) -> dict[str, Any]:
    trees = {name: Path(path).resolve() for name, _, path in (each.partition("=") for each in wanted.trees)}
    if absent := [str(path) for path in trees.values() if not (path / "hf_rocm_tune").is_dir()]:
        raise UsageError(f"--trees {' '.join(absent)}: give NAME=DIRECTORY of checkouts of this project")
    sides = {STOCK: (ROOT, str(Path(__file__).with_name("sft_bare.py")))}
    sides |= {name: (path, "hf_rocm_tune.sft") for name, path in trees.items()}
    methods = {}
    for method in wanted.methods:
        counts: dict[str, dict[str, float]] = {}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn, side in in_turns(sides, wanted.pairs):
            with tempfile.TemporaryDirectory() as scratch:
                model = sft._write_model(Path(scratch) / "model", SIZE)
                sft._write_rows(Path(scratch) / "rows", model, SIZE, wanted.steps)
                flags = sft._flags(model, Path(scratch), wanted.steps, SIZE, on_cpu=False)
                flags += ["--per_device_train_batch_size", str(SIZE["batch"]), "--lora_dropout", "0.0"]
                flags += ["--gradient_checkpointing", "true", *METHODS[method]]
                steps = run(*sides[side], flags, profiled=not turn)
            if turn:
                times[side].append(median(steps, "host_seconds"))
            else:
                counts[side] = {name: median(steps, name) for name in COUNTED}
                print(method, side, counts[side], flush=True)
        host = {side: spread(each) for side, each in times.items() if each}
        methods[method] = {
            "counts": counts,
            "host_seconds": host,
            "to_stock": {side: ratios(times[side], times[STOCK]) for side in host},
        }
        print(f"\n{method}, a step", flush=True)
        print_table(
            ("side", *COUNTED, "host ms", "to stock"),
            (
                (side, *(f"{counts[side][name]:,.0f}" for name in COUNTED),
                 *((show(host[side], 1, 1e3), show(methods[method]["to_stock"][side])) if host else ("", "")))
                for side in sides
            ),
        )  # fmt: skip
    return {"benchmark": "step_counts", "size": SIZE, "methods": methods}


if __name__ == "__main__":
    main(
        measure,
        __doc__,
        {
            "trees": {"nargs": "*", "default": [f"ours={ROOT}"], "metavar": "NAME=DIR"},
            "steps": {"type": int, "default": 12},
            "pairs": {
                "type": int,
                "default": 3,
                "help": "timed runs of each side, after one that counts; 0: none",
            },
            "methods": {"nargs": "*", "default": list(METHODS), "choices": METHODS},
        },
    )
