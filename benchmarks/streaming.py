"""Streamed weights on the simulated card: overlap with computing, and host memory over a training.

    SIMCARD=1 PYTHONPATH=$PWD:$PWD/tests/simcard/boot .venv/bin/python benchmarks/streaming.py --json FILE

**Overlap.** The card's streams are given times per task. Three ratios of link to compute. Each is timed three times in
turn: computing alone (copies take no time), the link alone, and both; the best schedule takes as long as the longer of
the two. Waits: layers for which the training thread waited, of all that were used, forward and backward.

**Host memory.** A QLoRA training of 200 steps, all layers streamed: memory of the process (which here holds the card's
too) and page-locked memory, read at the end of every step, beside what the plan counts.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plan_cases import SIMULATED_CASES
from benchmarks.plan_errors import job_of, quiet, streamed_model
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.models.streaming import streamer_of
from hf_rocm_tune.plan import CardMemory
from hf_rocm_tune.transfer import Mover
from tests import tiny

LAYERS = 8
KERNEL_US = 4000
RATIOS = (0.5, 1.0, 2.0)
REPEATS = 3


def passes(model: Any, rows: torch.Tensor, count: int = 1) -> float:
    """Seconds of forward and backward passes."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        model(input_ids=rows).logits.float().sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def overlap(simcard: Any) -> list[dict[str, Any]]:
    """A row for each ratio of link to compute."""
    values = {"num_hidden_layers": LAYERS}
    directory = tiny.build("llama3", Path(tempfile.mkdtemp()), dtype=torch.bfloat16, **values)
    mover = Mover(torch.device("cuda", 0))
    source = ModelSource(name=str(directory), init={"dtype": torch.bfloat16})
    model, _ = load_model(source, mover, streamed=Streamed("model.layers", tuple(range(LAYERS))))
    streamer = streamer_of(model)
    assert streamer is not None
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = mover.move(torch.arange(16)[None], name="rows")

    def timed(kernel_us: int, copy_us: int) -> float:
        simcard.delay(kernel_us, kernel_us, copy_us, copy_us)
        return passes(model, rows)

    timed(0, 0), timed(0, 0)
    compute, per_us = timed(KERNEL_US, 0), timed(0, 20_000) / 20_000
    table = []
    for ratio in RATIOS:
        copy_us = int(ratio * compute / per_us)
        rows_of: dict[str, list[float]] = {"compute": [], "link": [], "both": []}
        used, begun = 0, list(streamer.waits)
        for _ in range(REPEATS):
            rows_of["compute"].append(timed(KERNEL_US, 0))
            rows_of["link"].append(timed(0, copy_us))
            rows_of["both"].append(timed(KERNEL_US, copy_us))
            used += 2 * LAYERS
        waits = [now - before for now, before in zip(streamer.waits, begun, strict=True)]
        found = {name: statistics.median(each) for name, each in rows_of.items()}
        limit = max(found["compute"], found["link"])
        row = {"ratio": found["link"] / found["compute"], **found, "limit": limit, "of_limit": limit / found["both"]}
        row |= {f"{name}_busy": found[name] / found["both"] for name in ("compute", "link")}
        table.append(row | {"waits": sum(waits), "waits_by_layer": waits, "uses": used})
    return table


def host_memory(simcard: Any, steps: int) -> dict[str, Any]:
    """Bytes after steps of a training, and what the plan counts of the same."""
    import trl
    from transformers import TrainerCallback

    from hf_rocm_tune.plan import config_of, plan_for
    from hf_rocm_tune.plan.estimate import host
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

    case = next(each for each in SIMULATED_CASES if each.request.stream and each.request.methods == ("qlora",))
    card = CardMemory(name="any", usable=1 << 40, desktop=0, context=0)
    planned = plan_for(case.request, card=card, config=config_of(case.fields))
    chosen = next(each for each in planned.grid if each.case.streamed)
    expected = host(planned.variants["qlora"], chosen.case)
    process, seen = psutil.Process(), []

    class Watch(TrainerCallback):
        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            rows = ((ctypes.c_uint64 * 3) * 4096)()
            count = simcard.card.lib.sim_live(1, rows, len(rows))  # of a card that is not used: page-locked memory only
            seen.append((process.memory_info().rss, sum(row[1] for row in rows[:count])))

    with tempfile.TemporaryDirectory() as scratch, quiet():
        job = job_of(case, "cuda", Path(scratch), steps=steps)
        job |= streamed_model(case, job["model"], Path(scratch), "cuda")
        trainer = type("Verified", (VerifiedTransferMixin, trl.SFTTrainer), {})(**job, consent_unverified=True)
        trainer.add_callback(Watch())
        trainer.train()
        waiting = trainer.streamer.host_bytes
    quarter = len(seen) // 4
    means = [
        [statistics.mean(row[at] for row in part) for part in (seen[quarter : 2 * quarter], seen[-quarter:])]
        for at in (0, 1)
    ]
    return {
        "steps": steps,
        "process_bytes": means[0],
        "page_locked_bytes": means[1],
        "streamed_bytes": sum(waiting.values()),
        "planned": {name: expected[name] for name in ("streamed layers", "page-locked ring")},
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    simcard = importlib.import_module("simcard")  # there once torch is imported
    memory, table = host_memory(simcard, wanted.steps), overlap(simcard)
    print(f"{'link:compute':>12} {'compute s':>9} {'link s':>7} {'both s':>7} {'of limit':>8} {'waits':>9}")
    for row in table:
        seconds = f"{row['compute']:>9.2f} {row['link']:>7.2f} {row['both']:>7.2f}"
        print(f"{row['ratio']:>12.2f} {seconds} {row['of_limit']:>8.0%} {row['waits']:>4}/{row['uses']}")
    for name in ("process_bytes", "page_locked_bytes"):
        early, late = memory[name]
        print(f"{name}: {early / 2**20:.1f} MiB in the second quarter of the steps, {late / 2**20:.1f} in the last")
    found = {"benchmark": "streaming", "device": simcard.NAME, "layers": LAYERS, "torch": torch.__version__}
    text = json.dumps(found | {"repeats": REPEATS, "overlap": table, "host_memory": memory})
    print(text)
    if wanted.json is not None:
        wanted.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
