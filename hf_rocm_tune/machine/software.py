"""The installed software: torch and its devices, related packages, and what Triton needs to compile.

Torch is queried in a child process, because it may crash or hang; by hand: ``echo '{}' | python -m
hf_rocm_tune.machine.software``. A ROCm build of torch brings its own user space (inside the wheel, or as the
``rocm-sdk-*`` wheels of TheRock). Not covered: whether a kernel runs; only a measured check shows that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from hf_rocm_tune.machine import torchvision
from hf_rocm_tune.machine.caches import unwritable
from hf_rocm_tune.machine.child import Task, answer, pci_address, run_together, step
from hf_rocm_tune.machine.variables import package_directory, read_torch_file

PACKAGES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes")},
    **{name: (name,) for name in ("huggingface_hub", "safetensors")},
    "triton": ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"),
}
"""Import name, and the distributions that may provide it (ROCm wheels provide triton under another name)."""
DEADLINE_S = 60.0
"""A cold start of a ROCm build reads gigabytes of libraries."""
_COMPILER_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """One device as torch sees it."""

    index: int  # of cuda:index, after all filters
    name: str
    arch: str  # gfx1100 (gcnArchName without features, after any override variable), or sm_90
    total_bytes: int
    pci_address: str | None  # domain:bus:device.function as the kernel writes it; None where torch is too old


@dataclass(frozen=True, kw_only=True)
class Software:
    """The installed software. None: unknown or not there, with the reason in ``problems`` by the field's name.

    bitsandbytes chooses its library by ``hip_version``, ``torch.version.hip``. From ROCm 10 on that is another number
    than ROCm's: 10.1 comes with HIP 7.16 (pytorch#194256).
    """

    torch_version: str | None = None  # with its local part: 2.13.0+rocm7.2
    hip_version: str | None = None  # None where torch is no ROCm build
    cuda_version: str | None = None
    arch_list: tuple[str, ...] | None = None  # of torch's kernels; empty for a CPU build
    devices: tuple[TorchDevice, ...] | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)  # version of every name of PACKAGES
    bitsandbytes_libraries: tuple[str, ...] = ()  # names of its native library files
    rocm_wheels: Mapping[str, str] = field(default_factory=dict)  # versions of distributions that carry ROCm itself
    torchvision: str | None = None  # its version; None where it is not installed
    torchvision_problem: str = ""  # why it cannot be imported beside this torch; not asked in a run
    missing_for_triton: str = ""  # what its driver cannot be compiled without, on ROCm, and the package that has it
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def build(self) -> str | None:
        """torch's build: ``rocm``, ``cuda`` or ``cpu``; None if its version could not be read."""
        if self.torch_version is None:
            return None
        if self.hip_version:
            return "rocm"
        if self.cuda_version:
            return "cuda"
        return "cpu"


def read_software(*, deadline_s: float = DEADLINE_S, in_process: bool = False) -> Software:
    """Read everything; an unreadable item does not raise."""
    if in_process:
        answer, reason = _probe({"in_process": True}), ""
    else:
        answer, reason = _ask_torch(deadline_s)
    stated: Mapping[str, str | None] = answer.get("versions") or read_torch_file()[0]  # of one that cannot be imported
    torch_version = stated.get("__version__")
    arch_list = answer.get("arch_list")
    devices = answer.get("devices")
    problems = {}
    if arch_list is None:
        problems["arch_list"] = answer.get("problem") or reason
    else:
        arch_list = tuple(arch_list)
    if devices is None:
        problems["devices"] = answer.get("problem") or reason
    else:
        devices = tuple(TorchDevice(**device) for device in devices)
    if torch_version is None:
        problems["torch_version"] = answer.get("problem") or reason or "torch states no version"
    native = []
    directory = package_directory("bitsandbytes")
    if directory:
        native = [file.name for file in directory.glob("libbitsandbytes*")]
    return Software(
        torch_version=torch_version,
        hip_version=stated.get("hip"),
        cuda_version=stated.get("cuda"),
        arch_list=arch_list,
        devices=devices,
        packages=_read_packages(),
        bitsandbytes_libraries=tuple(sorted(native)),
        rocm_wheels=_read_wheels(),
        torchvision=_version_of("torchvision"),
        torchvision_problem=answer.get("torchvision", ""),
        missing_for_triton=missing_for_triton() if stated.get("hip") else "",
        problems=problems,
    )


def _ask_torch(deadline_s: float) -> tuple[dict[str, Any], str]:
    if package_directory("torch") is None:
        return {}, "torch is not installed"
    (outcome,) = run_together([Task(module=__name__)], deadline_s=deadline_s)
    printed = [] if outcome.error else outcome.tail.splitlines()[-1:]
    reason = ": ".join([f"the process that queried torch {outcome.how}", *printed])
    return outcome.result or {}, " ".join(reason.split())


def _read_packages() -> dict[str, str | None]:
    """The version of each package; broken metadata counts as none."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package, distributions in PACKAGES.items():
        for distribution in distributions:
            with suppress(Exception):
                versions[package] = versions[package] or metadata.version(distribution)
    return versions


def _version_of(distribution: str) -> str | None:
    with suppress(Exception):  # broken metadata
        return metadata.version(distribution)
    return None


def _read_wheels() -> dict[str, str]:
    """Distributions that carry ROCm itself, or kernels for one architecture (TheRock, docs/packaging)."""
    versions = {}
    for distribution in metadata.distributions():
        with suppress(Exception):  # broken metadata
            plain = re.sub(r"[-_.]+", "-", distribution.name).lower()
            if re.fullmatch("rocm|rocm-sdk(-.*)?|amd-torch-device-.*", plain):
                versions[plain] = str(distribution.version)
    return dict(sorted(versions.items()))


def missing_for_triton() -> str:
    """What Triton lacks to compile its driver at first use, by its own compiler and headers; empty if nothing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler: install gcc"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own has no headers
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    command = [compiler, "-x", "c", "-fsyntax-only", f"-I{headers}", "-"]
    program = "#include <Python.h>\n"
    try:
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=_COMPILER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the C compiler {compiler} cannot be run: {error}"
    if not done.returncode:
        why = unwritable("triton")
        if why:
            return f"the cache of what it compiles, {why}"
        return ""
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"{headers} has no Python.h: install python3-dev (python3-devel)"
    message = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
    return f"{compiler} does not compile a file that includes Python.h ({message[-200:]}): install gcc and libc6-dev"


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    """Query torch in this process."""
    step("importing torch")
    import torch

    build = torch.version
    versions = {"__version__": str(torch.__version__), "hip": build.hip, "cuda": build.cuda}
    answer: dict[str, Any] = {"versions": versions, "arch_list": torch.cuda.get_arch_list()}
    step("asking torch for its devices")
    try:
        count = 0
        if build.hip or build.cuda or torch.cuda.is_available():
            torch.cuda.init()  # `is_available()` would turn every error into False
            count = torch.cuda.device_count()
        answer["devices"] = [_device(index) for index in range(count)]
    except Exception as error:  # a runtime that does not start is a result, too
        answer["problem"] = " ".join(f"torch: {type(error).__name__}: {error}".split())
    if not request.get("in_process"):
        step("importing torchvision")
        answer["torchvision"] = torchvision.problem()
    return answer


def _device(index: int) -> dict[str, Any]:
    import torch

    given = torch.cuda.get_device_properties(index)
    # "gfx90a:sramecc+:xnack-": what stands behind the colon are features, not the architecture.
    arch = given.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{given.major}{given.minor}"
    own = {"name": given.name, "arch": arch, "total_bytes": given.total_memory, "pci_address": pci_address(index)}
    return {"index": index, **own}


if __name__ == "__main__":
    answer(_probe)
