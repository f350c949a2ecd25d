"""``bench load``: a checkpoint in an 8B shape, loaded by stock ``from_pretrained`` and by ours, up to the end of the
first ``forward``.

Up to the ``forward``, because on a CPU stock loading returns views of the mapped file and the reading comes later. Each
load is a process of its own (the end of this file), so that one's peak memory is not the other's; the sides alternate.
The files are read once before each load, so they come from the page cache.

Not covered: reading from a disk or a network; several processes that load at once.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
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
    device_shortage,
)
from hf_rocm_tune.machine import child
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.placement import coverage
from hf_rocm_tune.transfer import Mover, TransferSettings, digest, gb_per_s

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SIDES = ("stock", "ours")
#: Without an accelerator a gigabyte is enough to see the rates, and done in a few minutes on two cores.
_CPU_DEFAULT_BYTES = 1.2e9
_DEADLINE_SECONDS = 1800
_KILLED = -9


def run(wanted: Namespace) -> None:
    """Builds the checkpoint, measures, prints, writes, and removes the checkpoint.

    Raises:
        UsageError, CorruptionError, OutOfMemoryError: there is no room, or a child ended so.
    """
    if wanted.scale is not None:
        shape_for(wanted.scale)
    device = report.choose_device(wanted.device)
    directory = wanted.directory or Path(tempfile.gettempdir())
    scale, why = _choose_scale(wanted, device, directory)
    shape = shape_for(scale)
    _check_room(shape, directory)
    machine = report.describe(device)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", dir=directory) as folder:
        report.progress(f"building {_describe(shape)} in {directory} ({why})")
        files = write(shape, Path(folder))
        samples = _measure(wanted, device, Path(folder), files)
    rows = _rows(samples, shape)
    about = {**asdict(shape), "parameters": shape.parameters, "bytes": shape.nbytes, "shards": SHARDS}
    notes = [f"checkpoint: {_describe(shape)}, {why}", *_notes(wanted, samples)]
    settings = {"device": str(device), "scale": scale, "shape": about}
    report.publish(wanted, machine, settings, rows, _table(rows), notes)


Samples = dict[str, list[Figures]]
"""What the children measured, by side."""


def _measure(wanted: Namespace, device: torch.device, folder: Path, files: list[Path]) -> Samples:
    request = {
        "model": str(folder),
        "device": str(device),
        "verify": wanted.verify,
        "load_in_4bit": wanted.load_in_4bit,
    }
    samples: Samples = {side: [] for side in SIDES}
    for repeat in range(wanted.repeats):
        for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
            warm(files)
            report.progress(f"{side}, {repeat + 1} of {wanted.repeats}")
            samples[side].append(_load({**request, "side": side}))
    return samples


def _load(request: Mapping[str, Any]) -> Figures:
    """Run one load in a process of its own; a `TuneError` of the child's is raised again."""
    done = child.run(__spec__.name, request=request, deadline_s=_DEADLINE_SECONDS)
    return done.result if done.result is not None else _raise(str(request["side"]), done)


def _raise(side: str, done: child.Outcome) -> Figures:
    kinds = {kind.exit_code: kind for kind in (SeamError, UsageError, CorruptionError, StallError, OutOfMemoryError)}
    if done.status == "timeout":
        raise StallError(f"a load ({side}) {done.how} and was stopped")
    if done.code == _KILLED:
        raise OutOfMemoryError(f"loading ({side}) was killed, most likely for memory: give a smaller --scale")
    kind = kinds.get(done.code or 0)
    if kind is not None and done.error.startswith(tuple(f"{one.__name__}: " for one in kinds.values())):
        raise kind(f"loading ({side}): {done.error.partition(': ')[2]}")
    raise RuntimeError(f"loading ({side}) {done.how}:\n{done.tail}")


def _choose_scale(wanted: Namespace, device: torch.device, directory: Path) -> tuple[float, str]:
    if wanted.scale is not None:
        return wanted.scale, "scale as given"
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(directory).free
    # A quarter of the memory: the file in the page cache, the model in memory, and room for everybody else.
    budget = min(memory / 4, disk / 2)
    limits = f"{memory / 1e9:.0f} GB of memory and {disk / 1e9:.0f} GB of disk are free"
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        budget, limits = min(budget, 0.85 * room), f"{limits}, {room / 1e9:.0f} GB on the device"
    else:
        budget, limits = min(budget, _CPU_DEFAULT_BYTES), f"{limits}, at most 1.2 GB without an accelerator"
    return largest_scale(budget), f"chosen because {limits}"


def _check_room(shape: Shape, directory: Path) -> None:
    disk, memory = shutil.disk_usage(directory).free, psutil.virtual_memory().available
    if shape.nbytes * 1.05 > disk:
        raise UsageError(
            f"the checkpoint needs {shape.nbytes / 1e9:.1f} GB, {directory} has {disk / 1e9:.1f} GB free: "
            "give a smaller --scale, or --dir on another disk"
        )
    if shape.nbytes > memory:
        raise UsageError(
            f"the checkpoint has {shape.nbytes / 1e9:.1f} GB, {memory / 1e9:.1f} GB of memory are free: "
            "give a smaller --scale"
        )


def _rows(samples: Samples, shape: Shape) -> list[Figures]:
    stock = [one["seconds_to_forward"] for one in samples["stock"]]
    rows = []
    for side, taken in samples.items():
        seconds = [one["seconds_to_forward"] for one in taken]
        rows.append(
            {
                "side": side,
                "bytes": shape.nbytes,
                "seconds_load": Spread.of([one["seconds_load"] for one in taken]),
                "seconds_to_forward": Spread.of(seconds),
                "gb_per_s": Spread.of([gb_per_s(shape.nbytes, one) for one in seconds]),
                "seconds_to_stock": ratios(seconds, stock),
                "host_added": max(one["host_added"] for one in taken),
                "device_peak": max((one["device_peak"] for one in taken if one["device_peak"]), default=None),
                "verified_share": taken[0]["verified_share"],
                "logits": sorted({one["logits"] for one in taken}),
            }
        )
    return rows


def _notes(wanted: Namespace, samples: Samples) -> list[str]:
    logits = {one["logits"] for taken in samples.values() for one in taken}
    same = "the first forward gave the same bits on both sides and in every repeat"
    other = (
        "the first forward did NOT give the same bits everywhere (on a CPU with AVX512-BF16, stock 4-bit layers repack "
        "their weights in it, which ours forbids)"
        if wanted.load_in_4bit
        else "the first forward did NOT give the same bits everywhere"
    )
    return [
        "GB/s: bytes of the checkpoint over the seconds to the end of the first forward; host MB: peak of resident "
        "memory, mapped files included, less what the process had before",
        same if len(logits) == 1 else other,
    ]


def _describe(shape: Shape) -> str:
    return (
        f"a Llama of {shape.parameters / 1e9:.3f} B parameters ({shape.nbytes / 1e9:.2f} GB in bfloat16, hidden "
        f"{shape.hidden}, {shape.layers} layers, {SHARDS} shards)"
    )


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
#
# Shape of Llama-3.1-8B (its config.json): hidden 4096, intermediate 14336, 32 layers, 32 heads of 128 with 8 for keys
# and values, vocabulary 128256, untied, bfloat16: 8.03 billion parameters, 16.06 GB, four shards. A smaller scale keeps
# the layers and the proportions and narrows the widths, in steps of whole groups of four heads; below the narrowest it
# takes fewer layers. The values repeat, so a file system that compresses would read them faster than trained ones.

SHARDS = 4
SMALLEST_SCALE = 1 / 4096
_FULL_GROUPS = 8
"""Groups of the full size: each has four query heads and one of keys and values."""
_LAYERS = 32
_HEAD = 128
_NARROWEST = 1 / (4 * _FULL_GROUPS**2)
"""Scale of one group with heads of half the width. 4-bit kernels want widths in multiples of 64: none are narrower."""
_VOCABULARY = 128256
_POOL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths of the checkpoint."""

    groups: int  # groups of four query heads and one key and value head
    head: int  # width of a head
    vocabulary: int  # tokens
    layers: int  # decoder layers

    @property
    def hidden(self) -> int:
        return 4 * self.groups * self.head

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.hidden * 2 + 2 * self.hidden * self.groups * self.head
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def intermediate(self) -> int:
        return self.hidden * 7 // 2

    @property
    def nbytes(self) -> int:
        return 2 * self.parameters

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=4 * self.groups,
            num_key_value_heads=self.groups,
            head_dim=self.head,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )


def shape_for(scale: float) -> Shape:
    """The shape with about `scale` times the parameters of the full size.

    Raises:
        UsageError: the scale is not between 1/4096 and 1.
    """
    if not SMALLEST_SCALE <= scale <= 1:
        raise UsageError(f"--scale is {scale:g}; give a number from {SMALLEST_SCALE:g} to 1 (the 8B model itself)")
    width = math.sqrt(scale)
    vocabulary = max(64, round(_VOCABULARY * width / 64) * 64)
    groups = _FULL_GROUPS * width
    if groups >= 0.75:  # nearer to one whole group than to one with heads of half the width
        return Shape(groups=max(1, round(groups)), head=_HEAD, vocabulary=vocabulary, layers=_LAYERS)
    layers = min(_LAYERS, max(1, round(_LAYERS * scale / _NARROWEST)))
    return Shape(groups=1, head=_HEAD // 2, vocabulary=vocabulary, layers=layers)


def largest_scale(budget: float) -> float:
    """The largest scale whose weights have at most `budget` bytes, among those with whole groups of heads."""
    scales = [(groups / _FULL_GROUPS) ** 2 for groups in range(_FULL_GROUPS, 0, -1)]
    return next((scale for scale in scales if shape_for(scale).nbytes <= budget), SMALLEST_SCALE)


def write(shape: Shape, folder: Path) -> list[Path]:
    """Write the checkpoint, a shard at a time, and see it on the disk.

    Returns:
        The weight files.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(shape.config()).state_dict().items()}
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    files, where = [], {}
    for number, names in enumerate(_split(shapes), start=1):
        file = folder / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {name: _weight(name, shapes[name], pool) for name in names}
        save_file(tensors, file, metadata={"format": "pt"})
        where.update(dict.fromkeys(names, file.name))
        files.append(file)
    index = {"metadata": {"total_size": shape.nbytes, "total_parameters": shape.parameters}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    shape.config().save_pretrained(folder)
    return files


def _split(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    """The names in their order, cut into shards of about the same size, none of them empty."""
    total, passed = sum(size.numel() for size in shapes.values()), 0
    shards: list[list[str]] = [[] for _ in range(SHARDS)]
    for name, size in shapes.items():
        shards[min(passed * SHARDS // total, SHARDS - 1)].append(name)
        passed += size.numel()
    yield from shards


def _weight(name: str, size: torch.Size, pool: Tensor) -> Tensor:
    """Ones for a norm, else values of the pool from a place that is another for each name."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    weight = torch.empty(size.numel(), dtype=torch.bfloat16)
    start = sum(map(ord, name)) * 7919 % _POOL
    turned = pool.roll(-start)
    for position in range(0, weight.numel(), _POOL):
        piece = weight[position : position + _POOL]
        piece[:] = turned[: piece.numel()]
    return weight.view(size)


_READ_BYTES = 8 << 20


def warm(files: Iterable[Path]) -> None:
    """Reads the files, so that they are in the page cache."""
    buffer = bytearray(_READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


# ---- one load: everything is imported and the device is awake before the clock starts --------------------------------

_TOKENS = 8
_BEFORE_THE_CLOCK = (LlamaForCausalLM, trl_utils.create_model_from_path)
"""What the two sides import only when they load, and neither shall pay for."""


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Load, run one ``forward`` of 8 tokens, and say how long it took and what it needed.

    ``side`` "stock" is ``from_pretrained``, "ours" the same through the mover. Memory is in bytes, and
    ``verified_share`` None for stock.
    """
    device = torch.device(spec["device"])
    tokens = torch.arange(_TOKENS, device=device)[None]  # the device is awake now
    _synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = _peak_memory()
    with torch.no_grad():
        started = time.perf_counter()
        model, share = _ours(spec, device) if spec["side"] == "ours" else _stock(spec, device)
        _synchronise(device)
        loaded = time.perf_counter()
        logits = model(tokens).logits
        _synchronise(device)
        ended = time.perf_counter()
    return {
        "seconds_load": loaded - started,
        "seconds_to_forward": ended - started,
        "host_added": _peak_memory() - before,
        "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "logits": digest(logits).hex(),
        "verified_share": share(),
    }


Loaded = tuple["PreTrainedModel", Callable[[], float | None]]


def _stock(spec: Mapping[str, Any], device: torch.device) -> Loaded:
    quantization = {"quantization_config": _nf4()} if spec["load_in_4bit"] else {}
    place: Any = {"": device}
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16, device_map=place, **quantization)
    return model, lambda: None


def _ours(spec: Mapping[str, Any], device: torch.device) -> Loaded:
    quantization = _nf4() if spec["load_in_4bit"] else None
    source = ModelSource(name=spec["model"], init={"dtype": "bfloat16"}, quantization=quantization)
    mover = Mover(device, settings=TransferSettings(verify=spec["verify"]))
    model, _ = load_model(source, mover)

    def share() -> float:
        found = coverage(model, mover)
        return found.verified_bytes / found.device_bytes

    return model, share


def _nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory() -> int:
    """Peak of this process's resident memory so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _measure_in_child(spec: Mapping[str, Any]) -> dict[str, Any]:
    transformers_logging.disable_progress_bar()
    try:
        return measure(spec)
    except RuntimeError as error:
        if (said := device_shortage(error)) is None:
            raise
        raise OutOfMemoryError(f"{said}; give a smaller --scale") from error


if __name__ == "__main__":
    sys.exit(child.answer(_measure_in_child))
