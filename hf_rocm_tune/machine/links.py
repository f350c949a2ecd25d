"""Addresses of the sources that rows name. A source without a certain address has none."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REPOSITORIES = {
    "ROCm/ROCm": "ROCm/legacy-rocm-build",  # renamed; the numbers stayed
    "pytorch": "pytorch/pytorch",
    "rccl": "ROCm/rccl",
    "rocm-systems": "ROCm/rocm-systems",
    "TheRock": "ROCm/TheRock",
    "unsloth": "unslothai/unsloth",
}
_ISSUE = re.compile(r"(?P<where>[A-Za-z0-9./-]+)#(?P<number>[0-9]+)")
_SYSTEMS = "https://github.com/ROCm/rocm-systems/blob/develop/projects"
_TORCH = "https://github.com/pytorch/pytorch/blob/main"
_PAGES = {
    "HIP environment variables page": ("https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"),
    "RCCL environment variables page": (
        "https://rocm.docs.amd.com/projects/rccl/en/latest/api-reference/env-variables.html"
    ),
    "MIOpen kernel cache page": "https://rocm.docs.amd.com/projects/MIOpen/en/latest/cache.html",
    "pytorch hip.rst": "https://docs.pytorch.org/docs/stable/notes/hip.html",
    "clr flags.hpp": f"{_SYSTEMS}/clr/rocclr/utils/flags.hpp",
    "clr rocdevice.cpp": f"{_SYSTEMS}/clr/rocclr/device/rocm/rocdevice.cpp",
    "clr rocsettings.cpp": f"{_SYSTEMS}/clr/rocclr/device/rocm/rocsettings.cpp",
    "libhsakmt topology.c": f"{_SYSTEMS}/rocr-runtime/libhsakmt/src/topology.c",
    "rccl init.cc": f"{_SYSTEMS}/rccl/src/init.cc",
    "rccl param.h": f"{_SYSTEMS}/rccl/src/include/param.h",
    "rocr flag.h": f"{_SYSTEMS}/rocr-runtime/runtime/hsa-runtime/core/util/flag.h",
    "torch AllocatorConfig.h": f"{_TORCH}/c10/core/AllocatorConfig.h",
    "torch CUDAAllocatorConfig.h": f"{_TORCH}/c10/cuda/CUDAAllocatorConfig.h",
    "torch/cuda/tunable.py": f"{_TORCH}/torch/cuda/tunable.py",
    "unsloth install.sh": "https://github.com/unslothai/unsloth/blob/main/install.sh",
    "flash-attention README": "https://github.com/Dao-AILab/flash-attention",
}


def links_of(source: str) -> tuple[str, ...]:
    """The addresses for a row's ``source``: issues by their repository's short name, documents by their title.

    Args:
        source: names with semicolons between them.
    """
    found = (_link(name.strip()) for name in source.split(";"))
    return tuple(dict.fromkeys(link for link in found if link))


def issue_link(name: str, repositories: Mapping[str, str]) -> str:
    """The address of an issue such as ``rccl#1129``; empty for any other name.

    Args:
        name: a source.
        repositories: what stands before the ``#``, and the repository that it means.
    """
    issue = _ISSUE.fullmatch(name)
    if issue is None or issue["where"] not in repositories:
        return ""
    # GitHub leads from an issue's address to a pull request of that number.
    return f"https://github.com/{repositories[issue['where']]}/issues/{issue['number']}"


def _link(name: str) -> str:
    return issue_link(name, _REPOSITORIES) or _PAGES.get(name, "")
