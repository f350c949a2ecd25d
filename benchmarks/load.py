"""A checkpoint with the shape of Llama-3.1-8B, scaled: loaded by stock ``from_pretrained`` and by ours.

    python benchmarks/load.py [--gb 16] [--repeats 3] [--digest kernel] [--load_in_4bit] [--dir DIR] [--json FILE]

Sides: stock; ``ours``, as our commands load; on a card also ``script``: stock's loading with every copy verified at
torch's dispatcher. The time ends with the first ``forward``, because on a CPU stock loading returns views of the mapped
file. Each load is a process of its own, so that peak memory is that of one load; the sides alternate, and all files are
read before each load, so they come from the page cache. The card is started before: it has copied and digested.

``digest on card``: seconds in which the device digests what was loaded, once more and alone. The simulated card does
that in plain torch on the processor, as a card without Triton; with ``--digest kernel`` in one kernel, as a card with
it. ``time to stock without it`` leaves it out. Not covered: reading from a disk or a network.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import common
import psutil
import torch
from safetensors.torch import save_file
from script_step import digest_in_a_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.placement import coverage
from hf_rocm_tune.transfer import Mover, QueuedDigests, TransferSettings, digest, gb_per_s
from hf_rocm_tune.transfer.raw_bytes import storage_bytes
from hf_rocm_tune.transfer.report import coverage_of

SHARDS = 4
_GROUPS, _LAYERS, _VOCABULARY, _GB = 8, 32, 128256, 16.06  # of Llama-3.1-8B: groups of four query heads, in bfloat16


def run(wanted: Namespace) -> common.Figures:
    gb = wanted.gb or (_room(wanted.device) if wanted.device.type == "cuda" else 1.2)
    config = _config(gb / _GB)
    shapes = _shapes(config)
    nbytes = 2 * sum(size.numel() for size in shapes.values())
    free = min(shutil.disk_usage(wanted.dir or tempfile.gettempdir()).free, psutil.virtual_memory().available)
    if 1.05 * nbytes > free:
        raise UsageError(f"--gb {gb:g}: memory or disk has {free / 1e9:.1f} GB free; give a smaller one, or --dir")
    print(f"{nbytes / 1e9:.2f} GB: hidden {config.hidden_size}, {config.num_hidden_layers} layers, {SHARDS} shards")
    sides = ("stock", "ours", "script") if wanted.device.type == "cuda" else ("stock", "ours")
    samples: dict[str, list[common.Figures]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", dir=wanted.dir) as folder:
        files = _write(config, shapes, Path(folder))
        for repeat in range(wanted.repeats):
            for side in sides if repeat % 2 == 0 else sides[::-1]:
                for file in files:
                    with file.open("rb") as stream, open(os.devnull, "wb") as nowhere:
                        shutil.copyfileobj(stream, nowhere, 8 << 20)
                request = {"model": folder, "side": side, "device": str(wanted.device), "nf4": wanted.load_in_4bit}
                request["digest"] = wanted.digest
                command = [sys.executable, __file__, "--one", json.dumps(request)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    raise UsageError(f"loading ({side}) ended with {done.returncode}; what it printed is above")
                samples[side].append(json.loads(done.stdout.splitlines()[-1]))
    rows = [_row(side, samples, nbytes) for side in sides]
    common.print_table(
        ("side", "s to first forward", "s load", "CPU s", "digest on card", "GB/s", "time to stock", "without it",
         "host MB", "device MB"),
        (
            (row["side"], *(common.show(row[name]) for name in ("seconds_to_forward", "seconds_load", "cpu_seconds",
             "seconds_digest", "gb_per_s", "seconds_to_stock", "seconds_without_digest_to_stock")),
             f"{row['host_added'] / 1e6:.0f}", f"{row['device_peak'] / 1e6:.0f}")
            for row in rows
        ),
    )  # fmt: skip
    same = len({one["logits"] for taken in samples.values() for one in taken}) == 1
    print(f"the first forward {'gave' if same else 'did NOT give'} the same bits on both sides and in every repeat")
    return {"benchmark": "load", "bytes": nbytes, "same_logits": same, "rows": rows}


def _room(device: torch.device) -> float:
    """GB that fit on the card, into the page cache, and into a host's memory beside it."""
    memory = psutil.virtual_memory().available
    return min(_GB, memory / 4e9, 0.85 * torch.cuda.mem_get_info(device)[0] / 1e9)


def _config(scale: float) -> LlamaConfig:
    """Llama-3.1-8B narrowed by whole groups of heads; below one group with fewer layers."""
    groups = max(1, round(_GROUPS * math.sqrt(scale)))
    return LlamaConfig(
        hidden_size=512 * groups, intermediate_size=1792 * groups, num_attention_heads=4 * groups,
        num_hidden_layers=max(1, min(_LAYERS, round(_LAYERS * scale * _GROUPS**2))), num_key_value_heads=groups,
        head_dim=128, vocab_size=max(64, round(_VOCABULARY * math.sqrt(scale) / 64) * 64),
        max_position_embeddings=8192, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def _shapes(config: LlamaConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}


def _write(config: LlamaConfig, shapes: dict[str, torch.Size], folder: Path) -> list[Path]:
    total, passed = sum(size.numel() for size in shapes.values()), 0
    shards: list[dict[str, torch.Size]] = [{} for _ in range(SHARDS)]
    for name, size in shapes.items():
        shards[passed * SHARDS // total][name] = size
        passed += size.numel()
    files, file_of = [], {}
    for number, shard in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        weights = {
            name: torch.ones(size).bfloat16() if len(size) == 1 else torch.randn(size).mul_(0.02).bfloat16()
            for name, size in shard.items()
        }
        save_file(weights, file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, file.name))
        files.append(file)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.save_pretrained(folder)
    return files


def _row(side: str, samples: dict[str, list[common.Figures]], nbytes: int) -> common.Figures:
    taken = samples[side]
    seconds, stock = ([one["seconds_to_forward"] for one in samples[name]] for name in (side, "stock"))
    without = [one - row["seconds_digest"] for one, row in zip(seconds, taken, strict=True)]
    return {
        "side": side,
        "seconds_load": common.spread([one["seconds_load"] for one in taken]),
        "seconds_to_forward": common.spread(seconds),
        "gb_per_s": common.spread([gb_per_s(nbytes, one) for one in seconds]),
        "seconds_to_stock": common.ratios(seconds, stock),
        "seconds_digest": common.spread([one["seconds_digest"] for one in taken]),
        "seconds_without_digest_to_stock": common.ratios(without, stock),
        "cpu_seconds": common.spread([one["cpu_seconds"] for one in taken]),
        "host_added": max(one["host_added"] for one in taken),
        "device_peak": max(one["device_peak"] for one in taken),
        "verified_share": taken[0]["verified_share"],
        "crossed": taken[0]["crossed"],
    }


def _one(spec: common.Figures) -> None:
    """One load in this process: everything is imported and the device started before the clock."""
    device = torch.device(spec["device"])
    tokens = torch.arange(8, device=device)[None]
    LlamaForCausalLM(_config(1 / 2048))  # imports what is imported late
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    quantization, mover = nf4 if spec["nf4"] else None, None
    if spec["side"] == "ours":
        importlib.import_module("trl.trainer.reward_trainer")  # a command has it before it loads a model
    if spec["side"] != "stock":
        if spec["digest"] == "kernel":
            digest_in_a_kernel()
        mover = Mover(device, settings=TransferSettings(verify="full"))
        if device.type == "cuda":
            mover.move(torch.ones(1000), name="first")
    before = _peak()
    with torch.no_grad():
        begun, used = time.perf_counter(), time.process_time()
        if spec["side"] == "ours" and mover is not None:
            source = ModelSource(name=spec["model"], init={"dtype": "bfloat16"}, quantization=quantization)
            model, _ = load_model(source, mover)
        else:
            more: Any = {"quantization_config": quantization} if quantization else {}
            more |= {"dtype": torch.bfloat16, "device_map": {"": device}}
            model = AutoModelForCausalLM.from_pretrained(spec["model"], **more)
        loaded = time.perf_counter()
        logits = model(tokens).logits.cpu()
        ended, used = time.perf_counter(), time.process_time() - used
    host_added, digested = _peak() - before, 0.0
    if mover is not None and device.type == "cuda":
        torch.cuda.synchronize()
        digested = time.perf_counter()
        QueuedDigests([storage_bytes(tensor) for tensor in model.state_dict().values()]).result()
        digested = time.perf_counter() - digested
    covered = None if mover is None or spec["side"] == "script" else coverage(model, mover)
    crossed = None if mover is None else coverage_of(mover.report.to_dict())
    result = {
        "seconds_load": loaded - begun,
        "seconds_to_forward": ended - begun,
        "cpu_seconds": used,
        "seconds_digest": digested,
        "host_added": host_added,
        "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "logits": digest(logits).hex(),
        "verified_share": None if covered is None else covered.verified_bytes / covered.device_bytes,
        "crossed": crossed,
    }
    print(json.dumps(result))


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(json.loads(sys.argv[2]))
        sys.exit()
    common.main(
        run,
        __doc__,
        {
            "gb": {"type": float, "help": "of the checkpoint (default: what fits on the card; 1.2 on the CPU)"},
            "repeats": {"type": int, "default": 3, "help": "loads of each side (default: 3)"},
            "digest": {"choices": ("torch", "kernel"), "default": "torch", "help": "on the card (default: torch)"},
            "load_in_4bit": {"action": "store_true", "help": "NF4 on both sides"},
            "dir": {"type": Path, "help": "where the checkpoint is built (default: the temporary directory)"},
        },
    )
