"""Finds out what software is installed, and what torch says of the devices.

torch is asked in a child process with a deadline: code for the wrong architecture, a broken wheel or a hanging driver
must not take the asking process along. What comes before its import (versions, package files) is read without it, so
it is known even where torch does not start. Nothing here imports torch.

Not covered: whether a kernel runs. A multi-architecture wheel without the kernels of this card lists its devices all
the same and fails at the first kernel; only a measured check shows that.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from hf_rocm_tune.machine.child import run
from hf_rocm_tune.machine.rocm_userspace import VERSION_FILES, read_rocm_version, rocm_wheels
from hf_rocm_tune.machine.software_record import Software, TorchDevice, as_devices, as_text, as_texts, as_versions
from hf_rocm_tune.machine.sysfs import Reading
from hf_rocm_tune.machine.torch_probe import ASKING_DEVICES, pci_address, probe

__all__ = [
    "DEADLINE_S",
    "PACKAGES",
    "VERSION_FILES",
    "Software",
    "TorchDevice",
    "pci_address",
    "read_rocm_version",
    "read_software",
]

PROBE = "hf_rocm_tune.machine.torch_probe"
#: The name that is imported, and the distributions that may bring it. ROCm wheels bring a triton of another name.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "peft": ("peft",),
    "trl": ("trl",),
    "datasets": ("datasets",),
    "bitsandbytes": ("bitsandbytes",),
    "huggingface_hub": ("huggingface_hub",),
    "triton": ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"),
    "flash_attn": ("flash-attn",),
    "safetensors": ("safetensors",),
}
#: A cold start of a ROCm build reads gigabytes of libraries.
DEADLINE_S = 60.0

_NOT_INSTALLED = "torch is not installed"

T = TypeVar("T")


def read_software(*, root: Path = Path("/"), deadline_s: float = DEADLINE_S, in_process: bool = False) -> Software:
    """Read all of it; never raises for what it finds.

    Args:
        root: what stands for ``/`` when looking for the system's ROCm.
        deadline_s: seconds that torch may take to answer.
        in_process: ask torch here and not in a child, with no deadline: for a process that trains with it anyway.
    """
    packages, problems = _packages()
    said, reason = (probe({}), "") if in_process else _ask_torch(deadline_s)
    on_file = _versions_on_file()
    versions = _part(said, reason, "versions", as_versions)
    known = versions if versions.value is not None or on_file.value is None else on_file
    found = known.value or {}
    return Software(
        python=platform.python_version(),
        torch_version=_reading(found.get("torch"), known.reason),
        hip_version=found.get("hip"),
        torch_rocm_version=found.get("rocm"),
        cuda_version=found.get("cuda"),
        arch_list=_part(said, reason, "archs", as_texts),
        devices=_part(said, reason, "devices", as_devices),
        allocator_settings=_part(said, reason, "allocator", as_text),
        packages=packages,
        package_problems=problems,
        bitsandbytes_libraries=_bitsandbytes_libraries(),
        rocm_version=read_rocm_version(root),
        rocm_wheels=rocm_wheels(),
    )


def _ask_torch(deadline_s: float) -> tuple[dict[str, Any], str]:
    """What the probe found, and the reason for what is missing in it."""
    if _directory("torch") is None:
        return {}, _NOT_INSTALLED
    outcome = run(PROBE, request={}, deadline_s=deadline_s)
    if outcome.result is not None:
        return outcome.result, ""
    # Of one that had to be killed it is the stacks that were printed last, and `how` says where it hung.
    printed = outcome.tail.splitlines()[-1:] if outcome.status != "timeout" and not outcome.error else []
    reason = _one_line(": ".join([f"the process that asked torch {outcome.how}", *printed]))
    if outcome.step != ASKING_DEVICES:
        return {}, reason
    # It went wrong at the devices: what torch says before them is asked for again, and without them.
    return run(PROBE, request={"devices": False}, deadline_s=deadline_s).result or {}, reason


def _packages() -> tuple[dict[str, str | None], dict[str, str]]:
    versions: dict[str, str | None] = {}
    problems: dict[str, str] = {}
    for package, distributions in PACKAGES.items():
        versions[package] = None
        for distribution in distributions:
            try:
                version = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            except (OSError, ValueError, KeyError) as error:
                problems[package] = f"metadata of {distribution}: {type(error).__name__}"
                continue
            if isinstance(version, str) and version.strip():
                versions[package] = version.strip()
                break
            problems[package] = f"metadata of {distribution} names no version"
    return versions, {package: reason for package, reason in problems.items() if versions[package] is None}


def _directory(package: str) -> Path | None:
    """Where an installed package lies, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a half-made module in sys.modules has no spec
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _versions_on_file() -> Reading[dict[str, str | None]]:
    """What ``torch/version.py`` says: all that is known of a torch that cannot be imported."""
    directory = _directory("torch")
    if directory is None:
        return Reading(value=None, reason=_NOT_INSTALLED)
    try:
        text = (directory / "version.py").read_text("utf-8", errors="replace")
    except OSError as error:
        return Reading(value=None, reason=f"torch/version.py: {error.strerror}")
    names = {"torch": "__version__", "hip": "hip", "rocm": "rocm", "cuda": "cuda"}
    found = {}
    for ours, theirs in names.items():
        match = re.search(rf"^{theirs}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        found[ours] = match.group(1) if match else None
    if found["torch"] is None:
        return Reading(value=None, reason="torch/version.py has another form than expected")
    return Reading(value=found)


def _bitsandbytes_libraries() -> Reading[tuple[str, ...]]:
    directory = _directory("bitsandbytes")
    if directory is None:
        return Reading(value=None, reason="bitsandbytes is not installed")
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return Reading(value=None, reason=f"bitsandbytes: {error.strerror}")
    return Reading(value=tuple(name for name in names if name.startswith("libbitsandbytes")))


def _part(said: Mapping[str, Any], reason: str, name: str, read: Callable[[Any], T]) -> Reading[T]:
    """One part of what the probe found, or why it is missing."""
    if name not in said:
        return Reading(value=None, reason=reason or f"torch was not asked for its {name}")
    part = said[name]
    if isinstance(part, dict) and part.keys() == {"problem"}:
        return Reading(value=None, reason=_one_line(f"torch: {part['problem']}"))
    try:
        return Reading(value=read(part))
    except (TypeError, ValueError) as error:
        return Reading(value=None, reason=_one_line(f"torch gave its {name} in a form that makes no sense: {error}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reading(value: T | None, reason: str) -> Reading[T]:
    return Reading(value=None, reason=reason or "not stated") if value is None else Reading(value=value)
