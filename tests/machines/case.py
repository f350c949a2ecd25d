"""A machine, what is installed on it and set, and what the doctor is to find there.

The expectations are written from the reports and documents that the sources name, not from the doctor's code: where the
two differ, one of them is wrong. Installations have the form that ``Software.from_dict`` reads; versions, architecture
lists and names of libraries are those of the wheels that are named with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.machine.trees import Built

# The pytorch.org wheel for ROCm 7.2 (uv#18730).
ROCM72 = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1150 gfx1151 gfx1200 gfx1201"
# bitsandbytes 0.50.2.
BNB = tuple(f"libbitsandbytes_rocm{version}.so" for version in ("64", "70", "71", "714", "715", "72"))
PACKAGES = {
    "torch": "2.13.0+rocm7.2",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "datasets": "5.2.0",
    "bitsandbytes": "0.50.2",
    "huggingface_hub": "2.4.0",
    "triton": "3.7.1",
    "flash_attn": None,
    "safetensors": "0.8.0",
}
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


def stack(
    *,
    torch: str = "2.13.0+rocm7.2",
    hip: str | None = "7.2.26015",
    rocm: str | None = None,
    cuda: str | None = None,
    archs: str = ROCM72,
    devices: Sequence[Mapping[str, Any]] | str = (device(),),
    packages: Mapping[str, str | None] | None = None,
    libraries: tuple[str, ...] = BNB,
    system_rocm: str = "7.2.4",
    wheels: Mapping[str, str] | None = None,
    allocator: str = "",
) -> dict[str, Any]:
    """One installation; by default a good one for one RX 7900 XT. ``devices`` as a text is why there are none."""
    return {
        "python": "3.12.3",
        "torch_version": {"value": torch},
        "hip_version": hip,
        "torch_rocm_version": rocm,
        "cuda_version": cuda,
        "arch_list": {"value": archs.split()},
        "devices": {"reason": devices} if isinstance(devices, str) else {"value": [dict(one) for one in devices]},
        "allocator_settings": {"value": allocator},
        "packages": {**PACKAGES, "torch": torch, **(packages or {})},
        "package_problems": {},
        "bitsandbytes_libraries": {"value": list(libraries)},
        "rocm_version": {"value": system_rocm},
        "rocm_wheels": dict(wheels or {}),
    }


def cpu_stack(torch: str = "2.13.0+cpu") -> dict[str, Any]:
    """A torch that computes on processors only."""
    return stack(torch=torch, hip=None, archs="", devices=())


def no_torch() -> dict[str, Any]:
    """Everything but torch."""
    reason = {"reason": "torch is not installed"}
    bare = {"torch_version": reason, "arch_list": reason, "devices": reason, "allocator_settings": reason}
    return stack(hip=None, packages={"torch": None}) | bare


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


STATUSES = ("fail", "warn", "info")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One machine and its diagnosis.

    Attributes:
        recording: what ``doctor --from`` reads; its ``source`` says what the machine follows.
        fail, warn, note: names of rows with that status (``note`` is ``info``), each as often as it is found; as
            ``name subject`` where it matters what it is about. All of them, no more and no fewer.
        fine: some rows of status ``ok`` that must be there.
        unknown: names of the checks that must say that they do not know; all of them.
        says: texts that must stand in the findings: a cure, a line to paste, a figure.
        never: texts that must stand nowhere in the output.
    """

    recording: dict[str, Any]
    fail: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    note: tuple[str, ...] = ()
    fine: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """Exit code: 2 with a failure, 1 with a warning, else 0."""
        return 2 if self.fail else 1 if self.warn else 0

    @property
    def expected(self) -> dict[str, list[str]]:
        """Status to rows, sorted; those of status ``ok`` are not among them."""
        return {status: sorted(rows) for status, rows in zip(STATUSES, (self.fail, self.warn, self.note), strict=True)}

    @property
    def cards(self) -> int:
        """How many discrete cards the recording was built with, by the addresses of their own switches."""
        ids = [text for path, text in self.recording.get("files", {}).items() if path.endswith("/device")]
        return sum(text.strip() == "0x1479" for text in ids)


def case(
    built: Built,
    *,
    software: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **expected: Sequence[str],
) -> Case:
    """A machine with a good installation for one 7900 XT, unless ``software`` is another."""
    sections = {"software": dict(stack() if software is None else software), "environ": dict(environ or {})}
    wanted = {name: tuple(rows) for name, rows in expected.items()}
    return Case(recording=built.having(**sections).recording(), **wanted)
