"""A machine, what is installed on it and set, and what the doctor is to find there.

The expectations are written from the reports and documents that the sources name, not from the doctor's code: where the
two differ, one of them is wrong. Versions, architecture lists and names of libraries are those of the wheels that are
named with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_rocm_tune.doctor.findings import Evidence
from hf_rocm_tune.machine.software import Software, TorchDevice
from tests.machine.trees import Built

# The pytorch.org wheel for ROCm 7.2 (uv#18730).
ROCM72 = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1150 gfx1151 gfx1200 gfx1201"
# bitsandbytes 0.50.2.
BNB = tuple(f"libbitsandbytes_rocm{version}.so" for version in ("64", "70", "71", "714", "715", "72"))
_VERSIONS = """
    torch=2.13.0+rocm7.2 transformers=5.23.0 accelerate=1.15.0 peft=0.21.2 trl=1.16.0 datasets=5.2.0
    bitsandbytes=0.50.2 huggingface_hub=2.4.0 triton=3.7.1 safetensors=0.8.0
"""
PACKAGES = dict(pair.split("=") for pair in _VERSIONS.split())
BNB_WINDOWS = tuple(name.replace(".so", ".dll") for name in BNB)


def device(
    address: str | None = "0000:03:00.0",
    *,
    index: int = 0,
    name: str = "AMD Radeon RX 7900 XT",
    arch: str = "gfx1100",
    gib: float = 19.98,
) -> TorchDevice:
    """A device as torch lists it; the address is that of the first card that ``Built.card`` makes."""
    return TorchDevice(index=index, name=name, arch=arch, total_bytes=int(gib * (1 << 30)), pci_address=address)


def stack(
    torch: str = "2.13.0+rocm7.2",
    hip: str | None = "7.2.26015",
    *,
    archs: str = ROCM72,
    devices: Sequence[TorchDevice] | str = (device(),),
    packages: Mapping[str, str | None] | None = None,
    libraries: tuple[str, ...] = BNB,
    wheels: Mapping[str, str] | None = None,
    **more: Any,
) -> Software:
    """One installation; by default a good one for one RX 7900 XT. ``devices`` as a text is why there are none."""
    known = (
        {"devices": None, "problems": {"devices": devices}} if isinstance(devices, str) else {"devices": tuple(devices)}
    )
    values: dict[str, Any] = {"torch_version": torch, "hip_version": hip, "arch_list": tuple(archs.split()), **known}
    values |= {"packages": {**PACKAGES, "torch": torch, **(packages or {})}, "rocm_wheels": dict(wheels or {})}
    return Software(bitsandbytes_libraries=libraries, **(values | more))


def cpu_stack() -> Software:
    """A torch that computes on processors only."""
    return stack("2.13.0+cpu", None, archs="", devices=())


def broken(reason: str, **other: Any) -> Software:
    """A torch that does not tell anything."""
    asked = ("torch_version", "arch_list", "devices")
    return replace(stack(hip=None, **other), **dict.fromkeys(asked), problems=dict.fromkeys(asked, reason))


def pair(second: str = "0000:06:00.0", **of_second: Any) -> tuple[TorchDevice, TorchDevice]:
    """Two devices, as ``Built.card().card()`` places them."""
    return device(), device(second, index=1, **of_second)


def multi_arch_stack(
    *wheels: str, rocm: str = "10.0.0", torch: str = "2.13.0+rocm10.0.0", hip: str = "7.15.26333", **more: Any
) -> Software:
    """AMD's multi-architecture index: kernels come in wheels of their own (TheRock RELEASES.md)."""
    carried = dict.fromkeys(("rocm-sdk-core", "rocm-sdk-libraries", *wheels), rocm)
    return stack(torch, hip, wheels=carried, **more)


def device_wheels(arch: str, family: str) -> tuple[str, ...]:
    """All wheels with kernels for an architecture."""
    return (f"rocm-sdk-device-{arch}", f"amd-torch-device-{arch}", f"amd-torch-device-{family}")


def cuda_stack(*devices: TorchDevice) -> Software:
    """What plain ``pip install torch`` brings on Linux."""
    archs = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 sm_89"
    return stack("2.13.0+cu130", None, cuda_version="13.0", archs=archs, devices=devices)


STATUSES = ("fail", "warn", "info")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One machine, whose ``built.source`` says what it follows, and its diagnosis."""

    built: Built
    software: Software
    environ: dict[str, str]
    # All rows with that status, no more and no fewer, each as often as it is found; ``name subject`` where it matters.
    fail: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    note: tuple[str, ...] = ()
    fine: tuple[str, ...] = ()  # some rows of status ``ok`` that must be there
    unknown: tuple[str, ...] = ()  # all checks that must say that they do not know
    says: tuple[str, ...] = ()  # texts that must stand in the findings
    never: tuple[str, ...] = ()  # and those that must stand nowhere in the output

    @property
    def code(self) -> int:
        return 2 if self.fail else 1 if self.warn else 0

    @property
    def expected(self) -> dict[str, list[str]]:
        """Status to rows, sorted; those of status ``ok`` are not among them."""
        return {status: sorted(rows) for status, rows in zip(STATUSES, (self.fail, self.warn, self.note), strict=True)}

    @property
    def cards(self) -> int:
        """How many discrete cards the machine was built with, by the addresses of their own switches."""
        ids = [text for path, text in self.built.files.items() if path.endswith("/device")]
        return sum(text.strip() == "0x1479" for text in ids)

    def evidence(self, root: Path) -> Evidence:
        """The machine as the doctor reads it, written to a directory."""
        machine = self.built.survey(root)
        return Evidence(machine=machine, software=self.software, environ=self.environ, root=root)


def case(
    built: Built,
    *,
    software: Software | None = None,
    environ: Mapping[str, str] | None = None,
    **expected: Sequence[str],
) -> Case:
    """A machine with a good installation for one 7900 XT, unless ``software`` is another."""
    wanted: dict[str, Any] = {name: tuple(rows) for name, rows in expected.items()}
    return Case(built=built, software=stack() if software is None else software, environ=dict(environ or {}), **wanted)
