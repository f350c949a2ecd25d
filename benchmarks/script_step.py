"""A step of somebody else's script on the simulated card: processor time of `hf-rocm-tune script` over stock's.

    python benchmarks/script_step.py --sources DIR [--pairs 3] [--steps 12] [--digest kernel] [--json FILE]

``--sources`` holds a checkout of minGPT; its ``adder.py`` runs unmodified with three sizes of model. Stock and ours run
in turns. A step is what lies between two ends of ``optimizer.step``, in processor seconds of all threads, the simulated
card's among them, which computes on the processor: a card's own time is not in it. The first four steps are left out.

``--digest torch``: the simulated card digests with torch's operators, as ours does there. ``kernel``: in one kernel, as
a real card does with Triton; here it is the C function of `transfer/digest_host.c`, queued on the card's stream.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
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
    if sys.argv.pop(2) == "kernel":
        from benchmarks.script_step import digest_in_a_kernel
        digest_in_a_kernel()
else:
    sys.argv.pop(2)
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


QUEUED = """
#include <stdint.h>
#include <stdlib.h>
typedef void (*digest)(const void *, void *, uint64_t, uint64_t, const void *, int, uint64_t *);
typedef void (*push)(void *, void (*)(void *), void *);
struct work { digest digest; const void *data; uint64_t nbytes, index; const void *table; uint64_t *sums; };
static void run(void *given) {
    struct work *work = given;
    work->digest(work->data, 0, work->nbytes, work->index, work->table, 1, work->sums);
    free(work);
}
void queue(push push, void *stream, digest digest, void *data, uint64_t nbytes, uint64_t index, void *table,
           uint64_t *sums) {
    struct work *work = malloc(sizeof *work);
    *work = (struct work){digest, data, nbytes, index, table, sums};
    push(stream, run, work);
}
"""


def digest_in_a_kernel() -> None:
    """In the measured process: the simulated card digests in one kernel, written in C."""
    import torch

    digest: Any = importlib.import_module("hf_rocm_tune.transfer.digest")
    found = digest.load_native()[0]
    if found is None:
        raise UsageError("--digest kernel needs a C compiler")
    card = sys.modules["simcard.card"].lib
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "queued.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=QUEUED, text=True, check=True)
        queue = ctypes.CDLL(str(library)).queue
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    queue.argtypes = (pointer, pointer, pointer, pointer, number, number, pointer, pointer)
    push, native = (ctypes.cast(each, pointer).value for each in (card.sim_push, found._function))

    def sums_of(flat: torch.Tensor, index: int, sums: torch.Tensor) -> None:
        stream = card.sim_stream(flat.device.index or 0)
        table = found._table.data_ptr()
        queue(push, stream, native, flat.data_ptr(), flat.numel(), index, table, sums.data_ptr())

    method = digest.DigestMethod(name="kernel", reason="stands for the kernel of a real card")
    digest._tried = lambda device: (sums_of, method) if device.type == "cuda" else (digest.torch_sums, method)


def run(side: str, script: Path, size: str, steps: int, digest: str) -> tuple[float, float]:
    """Medians of a step: processor seconds of the process, and of the training thread alone."""
    with tempfile.TemporaryDirectory() as scratch:
        words = (f"--trainer.max_iters={steps + LEFT_OUT + 1}", f"--model.model_type={size}", "--trainer.num_workers=0")
        paths = (CARD["PYTHONPATH"], str(script.parents[2]))
        done = subprocess.run(
            [sys.executable, "-c", NOTE, side, digest, str(script), *words, f"--system.work_dir='{scratch}'"],
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
            measured = run(side, script.resolve(), size, wanted.steps, wanted.digest)
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
    return {"sizes": found, "digest": wanted.digest}


if __name__ == "__main__":
    main(
        measure,
        __doc__,
        {
            "sources": {"type": Path, "required": True},
            "pairs": {"type": int, "default": 3},
            "steps": {"type": int, "default": 12},
            "digest": {"default": "torch", "choices": ("torch", "kernel")},
            "sizes": {"nargs": "*", "default": list(SIZES), "choices": SIZES},
        },
    )
