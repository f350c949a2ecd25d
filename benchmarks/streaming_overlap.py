"""Overlap of streamed weights with computing, on the simulated card, whose streams are given times per task.

    SIMCARD=1 PYTHONPATH=$PWD:$PWD/tests/simcard/boot .venv/bin/python benchmarks/streaming_overlap.py --json FILE

Three ratios of link to compute. Each is timed three times in turn: computing alone (copies take no time), the link
alone, and both; the best schedule takes as long as the longer of the two. Waits: layers for which the training thread
waited, of all that were used, forward and backward.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.streamed import Streamed
from hf_rocm_tune.models.streaming import streamer_of
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


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    simcard = importlib.import_module("simcard")  # there once torch is imported
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
    compute, per_us = timed(KERNEL_US, 0), (timed(0, 1000) - timed(0, 0)) / 1000
    table = []
    for ratio in RATIOS:
        copy_us = int(ratio * compute / per_us)
        rows_of: dict[str, list[float]] = {"compute": [], "link": [], "both": []}
        used = waited = 0
        for _ in range(REPEATS):
            rows_of["compute"].append(timed(KERNEL_US, 0))
            rows_of["link"].append(timed(0, copy_us))
            before = streamer.waits
            rows_of["both"].append(timed(KERNEL_US, copy_us))
            used, waited = used + 2 * LAYERS, waited + streamer.waits - before
        found = {name: statistics.median(each) for name, each in rows_of.items()}
        limit = max(found["compute"], found["link"])
        row = {"ratio": found["link"] / found["compute"], **found, "limit": limit, "of_limit": limit / found["both"]}
        row |= {f"{name}_busy": found[name] / found["both"] for name in ("compute", "link")}
        table.append(row | {"waits": waited, "uses": used})
    print(f"{'link:compute':>12} {'compute s':>9} {'link s':>7} {'both s':>7} {'of limit':>8} {'waits':>9}")
    for row in table:
        seconds = f"{row['compute']:>9.2f} {row['link']:>7.2f} {row['both']:>7.2f}"
        print(f"{row['ratio']:>12.2f} {seconds} {row['of_limit']:>8.0%} {row['waits']:>4}/{row['uses']}")
    found = {"benchmark": "streaming_overlap", "device": simcard.NAME, "layers": LAYERS, "torch": torch.__version__}
    text = json.dumps(found | {"repeats": REPEATS, "rows": table})
    print(text)
    if wanted.json is not None:
        wanted.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
