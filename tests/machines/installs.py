"""Installations in the form that ``Software.from_dict`` reads: what stands beside the machines of this directory.

Versions, architecture lists and names of libraries are those of the facts page (sections 1b and 1e); the forms are
torch's.
"""

from __future__ import annotations

from typing import Any

from tests.doctor.stacks import BNB, ROCM72, cpu_stack, no_torch, stack

__all__ = [
    "BNB",
    "BNB_WINDOWS",
    "NO_SYSTEM_ROCM",
    "ROCM72",
    "cpu_stack",
    "cuda_stack",
    "device",
    "multi_arch_stack",
    "no_torch",
    "pair",
    "rocm_stack",
    "stack",
]

BNB_WINDOWS = tuple(name.replace(".so", ".dll") for name in BNB)
NO_SYSTEM_ROCM = {"rocm_version": {"reason": "/opt/rocm/.info/version: No such file or directory"}}


def device(
    address: str | None = "0000:03:00.0",
    *,
    index: int = 0,
    name: str = "AMD Radeon RX 7900 XT",
    arch: str = "gfx1100",
    gib: float = 19.98,
) -> dict[str, Any]:
    """A device as torch lists it; the address is that of the first card that ``Built.card`` makes."""
    total = int(gib * (1 << 30))
    return {"index": index, "name": name, "arch": arch, "total_bytes": total, "pci_address": address}


def pair(second: str = "0000:06:00.0", **of_second: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two devices, as ``Built.card().card()`` places them."""
    return device(), device(second, index=1, **of_second)


def rocm_stack(torch: str, hip: str, **other: Any) -> dict[str, Any]:
    """A ROCm build, with the same ROCm on the system."""
    version = torch.partition("+rocm")[2]
    return stack(torch=torch, hip=hip, **{"system_rocm": version, **other})


def multi_arch_stack(*wheels: str, **other: Any) -> dict[str, Any]:
    """ROCm 10.0 from AMD's multi-architecture index: kernels come in wheels of their own (TheRock RELEASES.md)."""
    carried = dict.fromkeys(("rocm-sdk-core", "rocm-sdk-libraries", *wheels), "10.0.0")
    built = rocm_stack("2.13.0+rocm10.0.0", "7.15.26333", wheels=carried, **other)
    return built | NO_SYSTEM_ROCM


def cuda_stack(*devices: dict[str, Any]) -> dict[str, Any]:
    """What plain ``pip install torch`` brings on Linux."""
    built = stack(torch="2.13.0+cu130", hip=None, cuda="13.0", archs="sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 sm_89")
    return built | {"devices": {"value": list(devices)}} | NO_SYSTEM_ROCM
