"""``bench load``: a checkpoint with the shape of an 8B model, loaded by stock ``from_pretrained`` and by ours.

The time ends with the first ``forward``, because on a CPU stock loading returns views of the mapped file, which is read
only then. Each load is a process of its own, so that peak memory is that of one load; the sides alternate. All files
are read before each load, so they come from the page cache.

Not covered: reading from a disk or a network; several processes that load at once.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging
from trl.trainer import utils as trl_utils

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import Figures, Spread, ratios, table
from hf_rocm_tune.errors import (
    CorruptionError,
    OutOfMemoryError,
    SeamError,
    StallError,
    UsageError,
    shortage_advice,
)
from hf_rocm_tune.machine import child
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.placement import coverage
from hf_rocm_tune.transfer import Mover, TransferSettings, digest, gb_per_s
from hf_rocm_tune.transfer.damage import wait_for

if TYPE_CHECKING:
    from torch import Tensor

SIDES = ("stock", "ours")
#: Without an accelerator: enough to see the rates, and done in a few minutes on two cores.
_CPU_DEFAULT_BYTES = 1.2e9
_DEADLINE_SECONDS = 1800
_KILLED = -9


def run(wanted: Namespace) -> None:
    """Builds the checkpoint, measures, prints, writes, and removes the checkpoint.

    Raises:
        UsageError, CorruptionError, OutOfMemoryError, StallError: there is no room, or a load ended with one.
    """
    device = report.choose_device(wanted.device)
    directory = wanted.directory or Path(tempfile.gettempdir())
    scale, why = (wanted.scale, "scale as given") if wanted.scale is not None else _choose_scale(device, directory)
    config = config_for(scale)
    nbytes = checkpoint_bytes(config)
    _check_room(nbytes, directory)
    machine = report.describe(device)
    described = (
        f"a Llama of {nbytes / 2e9:.3f} B parameters ({nbytes / 1e9:.2f} GB in bfloat16, hidden {config.hidden_size}, "
        f"{config.num_hidden_layers} layers, {SHARDS} shards)"
    )
    samples: dict[str, list[Figures]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", dir=directory) as folder:
        report.progress(f"building {described} in {directory} ({why})")
        files = write(config, Path(folder))
        request = {"model": folder, "device": str(device), "verify": wanted.verify, "load_in_4bit": wanted.load_in_4bit}
        for repeat in range(wanted.repeats):
            for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                _read_into_page_cache(files)
                report.progress(f"{side}, {repeat + 1} of {wanted.repeats}")
                samples[side].append(_load({**request, "side": side}))
    rows = [_row(side, samples, nbytes) for side in SIDES]
    shape = {"hidden": config.hidden_size, "layers": config.num_hidden_layers, "vocabulary": config.vocab_size}
    settings = {
        "device": str(device),
        "scale": scale,
        "shape": {**shape, "parameters": nbytes // 2, "bytes": nbytes, "shards": SHARDS},
    }
    notes = [f"checkpoint: {described}, {why}", *_notes(wanted, rows)]
    report.publish(wanted, machine, settings, rows, _table(rows), notes)


def _load(request: Mapping[str, Any]) -> Figures:
    """Run one load in a process of its own; its `TuneError` is raised again."""
    done, side = child.run(__spec__.name, request=request, deadline_s=_DEADLINE_SECONDS), request["side"]
    if done.result is not None:
        return done.result
    if done.status == "timeout":
        raise StallError(f"a load ({side}) {done.how} and was stopped")
    if done.code == _KILLED:
        raise OutOfMemoryError(f"loading ({side}) was killed, most likely for memory: give a smaller --scale")
    name, _, message = done.error.partition(": ")
    for kind in (SeamError, UsageError, CorruptionError, StallError, OutOfMemoryError):
        if kind.__name__ == name:
            raise kind(f"loading ({side}): {message}")
    raise RuntimeError(f"loading ({side}) {done.how}:\n{done.tail}")


def _choose_scale(device: torch.device, directory: Path) -> tuple[float, str]:
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(directory).free
    # A quarter of the memory: the files in the page cache, the model in memory, and room for other programs.
    budget = min(memory / 4, disk / 2)
    limits = f"{memory / 1e9:.0f} GB of memory and {disk / 1e9:.0f} GB of disk are free"
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        budget, limits = min(budget, 0.85 * room), f"{limits}, {room / 1e9:.0f} GB on the device"
    else:
        budget, limits = min(budget, _CPU_DEFAULT_BYTES), f"{limits}, at most 1.2 GB without an accelerator"
    return largest_scale(budget), f"chosen because {limits}"


def _check_room(nbytes: int, directory: Path) -> None:
    disk, memory = shutil.disk_usage(directory).free, psutil.virtual_memory().available
    if nbytes * 1.05 > disk:
        raise UsageError(
            f"the checkpoint needs {nbytes / 1e9:.1f} GB, {directory} has {disk / 1e9:.1f} GB free: "
            "give a smaller --scale, or --dir on another disk"
        )
    if nbytes > memory:
        raise UsageError(
            f"the checkpoint has {nbytes / 1e9:.1f} GB, {memory / 1e9:.1f} GB of memory are free: give a smaller "
            "--scale"
        )


def _row(side: str, samples: Mapping[str, list[Figures]], nbytes: int) -> Figures:
    taken = samples[side]
    seconds, stock = ([one["seconds_to_forward"] for one in samples[name]] for name in (side, "stock"))
    return {
        "side": side,
        "bytes": nbytes,
        "seconds_load": Spread.of([one["seconds_load"] for one in taken]),
        "seconds_to_forward": Spread.of(seconds),
        "gb_per_s": Spread.of([gb_per_s(nbytes, one) for one in seconds]),
        "seconds_to_stock": ratios(seconds, stock),
        "host_added": max(one["host_added"] for one in taken),
        "device_peak": max((one["device_peak"] for one in taken if one["device_peak"]), default=None),
        "verified_share": taken[0]["verified_share"],
        "logits": sorted({one["logits"] for one in taken}),
    }


def _notes(wanted: Namespace, rows: list[Figures]) -> list[str]:
    same = len({digest for row in rows for digest in row["logits"]}) == 1
    note = f"the first forward {'gave' if same else 'did NOT give'} the same bits on both sides and in every repeat"
    if wanted.load_in_4bit and not same:
        note += " (on a CPU with AVX512-BF16, stock 4-bit layers repack their weights in it, which ours prevents)"
    return [
        "GB/s: bytes of the checkpoint over the seconds to the end of the first forward; host MB: growth of peak "
        "resident memory, mapped files included",
        note,
    ]


def _table(rows: list[Figures]) -> str:
    columns = {
        "side": lambda row: row["side"],
        "s to first forward": lambda row: row["seconds_to_forward"].show(2),
        "s load": lambda row: row["seconds_load"].show(2),
        "GB/s": lambda row: row["gb_per_s"].show(2),
        "time to stock": lambda row: "reference" if row["side"] == "stock" else row["seconds_to_stock"].show(2),
        "host MB": lambda row: f"{row['host_added'] / 1e6:.0f}",
        "device MB": lambda row: "-" if row["device_peak"] is None else f"{row['device_peak'] / 1e6:.0f}",
    }
    return table(columns, rows)


# ---- the checkpoint ---------------------------------------------------------------------------------------------

SHARDS = 4
SMALLEST_SCALE = 1 / 2048
_GROUPS, _LAYERS, _VOCABULARY = 8, 32, 128256
"""Of Llama-3.1-8B (its config.json): groups of four query heads and one of keys and values, layers, tokens."""
_VALUES = 1 << 22
"""Different values in a weight; they repeat, so a file system that compresses reads them faster than trained ones."""


def config_for(scale: float) -> LlamaConfig:
    """The configuration of Llama-3.1-8B with about ``scale`` times its parameters.

    A smaller scale narrows the widths by whole groups of heads, and below one group takes fewer layers.

    Raises:
        UsageError: the scale is not between 1/2048 and 1.
    """
    if not SMALLEST_SCALE <= scale <= 1:
        raise UsageError(f"--scale is {scale:g}; give a number from {SMALLEST_SCALE:g} to 1 (the 8B model itself)")
    groups = max(1, round(_GROUPS * math.sqrt(scale)))
    return LlamaConfig(
        hidden_size=512 * groups,
        intermediate_size=1792 * groups,
        num_hidden_layers=max(1, min(_LAYERS, round(_LAYERS * scale * _GROUPS**2))),
        num_attention_heads=4 * groups,
        num_key_value_heads=groups,
        head_dim=128,
        vocab_size=max(64, round(_VOCABULARY * math.sqrt(scale) / 64) * 64),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def _shapes(config: LlamaConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}


def checkpoint_bytes(config: LlamaConfig) -> int:
    """Bytes of the weights in bfloat16."""
    return 2 * sum(size.numel() for size in _shapes(config).values())


def largest_scale(budget: float) -> float:
    """The largest scale whose weights have at most `budget` bytes, among those with whole groups of heads."""
    scales = ((groups / _GROUPS) ** 2 for groups in range(_GROUPS, 0, -1))
    return next((scale for scale in scales if checkpoint_bytes(config_for(scale)) <= budget), SMALLEST_SCALE)


def write(config: LlamaConfig, folder: Path) -> list[Path]:
    """Write the checkpoint in shards of about the same size.

    Returns:
        The weight files.
    """
    shapes = _shapes(config)
    total, passed = sum(size.numel() for size in shapes.values()), 0
    shards: list[dict[str, torch.Size]] = [{} for _ in range(SHARDS)]
    for name, size in shapes.items():
        shards[passed * SHARDS // total][name] = size
        passed += size.numel()
    pool = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    files, file_of = [], {}
    for number, shard in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file({name: _weight(name, shape, pool) for name, shape in shard.items()}, file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, file.name))
        files.append(file)
    index = {"metadata": {"total_size": 2 * total, "total_parameters": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.save_pretrained(folder)
    return files


def _weight(name: str, shape: torch.Size, pool: Tensor) -> Tensor:
    """Ones for a norm, else values of the pool from a position that depends on the name."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    start = sum(map(ord, name)) * 7919 % _VALUES
    return pool.roll(-start).repeat(-(-shape.numel() // _VALUES))[: shape.numel()].view(shape)


def _read_into_page_cache(files: Iterable[Path]) -> None:
    for file in files:
        with file.open("rb") as stream, open(os.devnull, "wb") as nowhere:
            shutil.copyfileobj(stream, nowhere, 8 << 20)


# ---- one load: everything is imported and the device is started before the clock ------------------------------------

_IMPORTED_WHILE_LOADING = (LlamaForCausalLM, trl_utils.create_model_from_path)
"""What the two sides import only when they load; imported here, it does not count."""


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Load, run one ``forward`` of 8 tokens, and return times and peaks.

    ``side`` "stock" is ``from_pretrained``, "ours" the same through the mover. Memory is in bytes, and
    ``verified_share`` None for stock.
    """
    device = torch.device(spec["device"])
    tokens = torch.arange(8, device=device)[None]
    wait_for(tokens)  # the device is started now
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantization = nf4 if spec["load_in_4bit"] else None
    mover = None
    before = _peak_memory()
    with torch.no_grad():
        started = time.perf_counter()
        if spec["side"] == "ours":
            mover = Mover(device, settings=TransferSettings(verify=spec["verify"]))
            source = ModelSource(name=spec["model"], init={"dtype": "bfloat16"}, quantization=quantization)
            model, _ = load_model(source, mover)
        else:
            options: Any = {"quantization_config": quantization} if quantization else {}
            options |= {"dtype": torch.bfloat16, "device_map": {"": device}}
            model = AutoModelForCausalLM.from_pretrained(spec["model"], **options)
        wait_for(tokens)
        loaded = time.perf_counter()
        logits = model(tokens).logits
        wait_for(logits)
        ended = time.perf_counter()
    covered = coverage(model, mover) if mover is not None else None
    return {
        "seconds_load": loaded - started,
        "seconds_to_forward": ended - started,
        "host_added": _peak_memory() - before,
        "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "logits": digest(logits).hex(),
        "verified_share": covered.verified_bytes / covered.device_bytes if covered is not None else None,
    }


def _peak_memory() -> int:
    """Peak of this process's resident memory so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _measure_in_child(spec: Mapping[str, Any]) -> dict[str, Any]:
    transformers_logging.disable_progress_bar()
    with shortage_advice("give a smaller --scale"):
        return measure(spec)


if __name__ == "__main__":
    sys.exit(child.answer(_measure_in_child))
