"""What a benchmark ran on. What cannot be read is None, never guessed."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "safetensors")
ON_HOST = "cpu (no accelerator: other host memory plays the device)"


def choose_device(name: str | None) -> torch.device:
    """The device to measure: the one that was asked for, else the first accelerator, else the CPU.

    Raises:
        UsageError: torch does not see the device that was asked for.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: there is no such device; give cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: give cpu, cuda or cuda:1 (HIP devices have that name too)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: torch sees {torch.cuda.device_count()} accelerators; see `hf-rocm-tune env`"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def describe(device: torch.device) -> dict[str, Any]:
    """Card, processor, memory, load and versions, as JSON values; memory in 10^9 bytes."""
    card: dict[str, Any] = {"device": ON_HOST, "device_memory_gb": None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = {"device": properties.name, "device_memory_gb": _gb(properties.total_memory)}
    return {
        **card,
        "accelerators": torch.cuda.device_count(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gb": _gb(psutil.virtual_memory().total),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "versions": {"hf-rocm-tune": __version__, "python": platform.python_version(), **_versions()},
    }


def summary(machine: dict[str, Any]) -> str:
    """One line about a machine that `describe` has described."""
    versions = machine["versions"]
    build = f"torch {versions['torch']}, transformers {versions['transformers']}, python {versions['python']}"
    host = f"{machine['processor'] or 'unknown processor'}, {machine['cores']} cores, {machine['memory_gb']} GB"
    return f"{machine['device']}; {host}, load {machine['load_average_at_start']}; {build}"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "hip": torch.version.hip, "cuda": torch.version.cuda}


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, None)


def _gb(nbytes: int) -> float:
    return round(nbytes / 1e9, 1)
