"""Memory and time of a merge: ours, tensor by tensor, and PEFT's ``merge_and_unload`` with ``save_pretrained``.

Builds a Llama of random bfloat16 weights in several files and a LoRA adapter of all its linear layers (or a Qwen3
mixture of experts with adapters of the experts' fused parameters), then merges it in a fresh process for each way, turn
by turn. A thread of that process reads ``/proc/self/status`` every two milliseconds: ``anonymous`` is memory of the
process's own, ``mapped`` are pages of files. Both are peaks above what the process had after its imports. Prints a
table and, as the last line, one JSON object.

    python benchmarks/merge_memory.py [--kind dense|moe] [--megabytes 600] [--files 4] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

HIDDEN, VOCABULARY, RANK = 1024, 16384, 16
WAYS = ("ours", "peft")


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("dense", "moe"), default="dense")
    parser.add_argument("--megabytes", type=int, default=600, help="of the base's weights, about")
    parser.add_argument("--files", type=int, default=4, help="weight files of the base, about")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.child:
        print(json.dumps(_measured(*wanted.child)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        sizes = _build(Path(scratch), wanted.kind, wanted.megabytes, wanted.files)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(wanted.repeats):
            for way in WAYS:
                rows[way].append(_child(way, Path(scratch)))
    result = {
        "machine": _machine(),
        "kind": wanted.kind,
        **sizes,
        "figures": {way: {name: _spread([row[name] for row in rows[way]]) for name in rows[way][0]} for way in WAYS},
    }
    _print_table(result)
    text = json.dumps(result)
    print(text)
    if wanted.json:
        wanted.json.write_text(text + "\n", encoding="utf-8")


def _build(scratch: Path, kind: str, megabytes: int, files: int) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    common = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_attention_heads": 16, "num_key_value_heads": 16}
    each = (16 if kind == "dense" else 4 + 48) * HIDDEN**2 * 2 / 1e6
    layers = max(1, round((megabytes - 2 * VOCABULARY * HIDDEN * 2 / 1e6) / each))
    if kind == "dense":
        config: Any = LlamaConfig(**common, intermediate_size=4 * HIDDEN, num_hidden_layers=layers)
        targets: dict[str, Any] = {"target_modules": "all-linear"}
    else:
        experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
        config = Qwen3MoeConfig(**common, **experts, intermediate_size=HIDDEN, head_dim=64, num_hidden_layers=layers)
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        targets = {"target_modules": ["q_proj"], "target_parameters": parameters}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(scratch / "base", max_shard_size=size // files)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, **targets))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.01)
    adapted.peft_config["default"].base_model_name_or_path = str(scratch / "base")
    adapted.save_pretrained(scratch / "adapter")
    shards = [file.stat().st_size for file in (scratch / "base").glob("*.safetensors")]
    largest = max(parameter.numel() * 2 for name, parameter in model.named_parameters() if "lora" not in name)
    return {
        "base_megabytes": round(sum(shards) / 1e6, 1),
        "files": len(shards),
        "largest_file_megabytes": round(max(shards) / 1e6, 1),
        "largest_parameter_megabytes": round(largest / 1e6, 1),
        "adapter_megabytes": round((scratch / "adapter" / "adapter_model.safetensors").stat().st_size / 1e6, 1),
    }


def _child(way: str, scratch: Path) -> dict[str, float]:
    out = scratch / f"out-{way}"
    shutil.rmtree(out, ignore_errors=True)
    paths = [str(scratch / "base"), str(scratch / "adapter"), str(out)]
    command = [sys.executable, __file__, "--child", way, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _measured(way: str, base: str, adapter: str, out: str) -> dict[str, float]:
    """In a process of its own."""
    work = _ours if way == "ours" else _stock
    work("", "", "")  # the imports
    watch = _Watch()
    begun = time.perf_counter()
    with watch:
        work(base, adapter, out)
    return {"seconds": round(time.perf_counter() - begun, 2), **watch.peaks}


def _ours(base: str, adapter: str, out: str) -> None:
    from hf_rocm_tune.publish.merge import merge

    if out:
        merge(adapter, Path(out), base_name=base, say=lambda line: None)


def _stock(base: str, adapter: str, out: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if out:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


class _Watch:
    """Peaks of this process's memory above where it was, in megabytes of 10^6 bytes."""

    def __init__(self) -> None:
        self._before = _resident()
        self._peaks = dict(self._before)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    @property
    def peaks(self) -> dict[str, float]:
        return {f"{name}_megabytes": round(self._peaks[name] - self._before[name], 1) for name in self._before}

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self._peaks = {name: max(value, self._peaks[name]) for name, value in _resident().items()}

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _resident() -> dict[str, float]:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {name: int(rows[field].split()[0]) for name, field in (("anonymous", "RssAnon"), ("mapped", "RssFile"))}
    return {name: value * 1024 / 1e6 for name, value in kilobytes.items()}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _machine() -> dict[str, Any]:
    import peft
    import transformers

    return {
        "device": "cpu",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['kind']}: base {result['base_megabytes']} MB in {result['files']} files, the largest "
        f"{result['largest_file_megabytes']} MB, its largest parameter {result['largest_parameter_megabytes']} MB; "
        f"adapter {result['adapter_megabytes']} MB"
    )
    print(f"{'':8}{'':24}{'median':>10}{'min':>10}{'max':>10}")
    for way, figures in result["figures"].items():
        for name, row in figures.items():
            print(f"{way:8}{name:24}" + "".join(f"{row[key]:>10.1f}" for key in ("median", "min", "max")))


if __name__ == "__main__":
    main()
