"""Whether the installed torch is one that this project works with, and the command that installs one on this machine.

A package's requirement cannot say this: pip and uv meet a bound on torch by replacing a ROCm build with PyPI's, which
is for CUDA. Read without importing torch.
"""

from __future__ import annotations

import sys

from packaging.version import InvalidVersion, Version

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.gpus import read_topology
from hf_rocm_tune.machine.process import is_integrated
from hf_rocm_tune.machine.variables import read_torch_file
from hf_rocm_tune.upstream import TESTED

INDEX = "https://download.pytorch.org/whl/"
ROCM = "rocm7.2"
"""The ROCm that PyTorch's stable wheels are built with."""


def check_torch() -> None:
    """Refuse a torch that is absent or too old, in one line.

    Raises:
        UsageError: with the command that installs a torch for this machine.
    """
    stated, reason = read_torch_file()
    version = stated.get("__version__")
    if version is None:
        if reason == "torch is not installed":
            raise UsageError(f"{reason}: {install_command(None)}")
        return  # a torch of another make; its import says what is wrong
    if not is_supported(version):
        oldest = _series(TESTED["torch"][0])
        build = "cpu"
        if stated.get("hip"):
            build = "hip"
        elif stated.get("cuda"):
            build = "cuda"
        raise UsageError(f"torch {version} is too old, {oldest} or newer is needed: {install_command(build)}")


def is_supported(version: str) -> bool:
    """Whether a version is not older than the oldest that runs were tried with; a pre-release counts as its release.

    True for what is no version: a build of the user's own may have any name.
    """
    try:
        return Version(Version(version).base_version) >= Version(TESTED["torch"][0])
    except InvalidVersion:
        return True


def install_command(build: str | None) -> str:
    """The command for this machine: by its AMD card, else by the build of the torch that is there.

    Args:
        build: ``hip``, ``cuda`` or ``cpu`` as torch states it; None where there is no torch.
    """
    has_amd_card = any(not is_integrated(node) for node in read_topology().nodes)
    index = ""
    if has_amd_card or build == "hip":
        index = f" --index-url {INDEX}{ROCM}"
    elif build != "cuda" and sys.platform == "linux":  # only there is the plain wheel another build than the CPU's
        index = f" --index-url {INDEX}cpu"
    return f'pip install "torch>={_series(TESTED["torch"][0])}"{index}'


def _series(version: str) -> str:
    """``2.10`` of ``2.10.0``."""
    return ".".join(version.split(".")[:2])
