"""The installed software: torch and its devices, related packages, and ROCm's user space.

Torch is queried in a child process, because it may crash or hang; by hand::

    echo '{}' | python -m hf_rocm_tune.machine.software

A ROCm build of torch brings its own user space (inside the wheel, or as the ``rocm-sdk-*`` wheels of TheRock), so the
system's one may have another version, or be missing, without harm; only builds and loads from ``/opt/rocm`` use it.

Sources: rocm-core writes ``/opt/rocm/.info/version`` (``7.2.4``, or ``6.4.0-47`` with a build number); the packages of
the TheRock stream ``/opt/rocm/core/.info/version`` (reported by owners of 7.14 and 10.0). Wheels: TheRock,
docs/packaging/python_packaging.md. ``hipconfig --version`` is not used: it is HIP's version.

Not covered: whether a kernel runs. A multi-architecture wheel without the kernels of this card lists its devices and
fails at the first kernel; only a measured check shows that.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_rocm_tune.machine.child import answer, pci_address, run, step
from hf_rocm_tune.machine.sysfs import LiveTree, Reading, read_text, unknown, unpack
from hf_rocm_tune.machine.variables import package_directory, read_torch_file

PACKAGES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes")},
    "huggingface_hub": ("huggingface_hub",),
    "triton": ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"),
    "flash_attn": ("flash-attn",),
    "safetensors": ("safetensors",),
}
"""Import name, and the distributions that may provide it (ROCm wheels provide triton under another name)."""
DEADLINE_S = 60.0
"""A cold start of a ROCm build reads gigabytes of libraries."""
VERSION_FILES = ("opt/rocm/.info/version", "opt/rocm/core/.info/version")

_ASKING_DEVICES = "asking torch for its devices"


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """One device as torch sees it.

    Attributes:
        index: of ``cuda:index``, after all filters.
        arch: ``gfx1100`` (``gcnArchName`` without features, after any override variable), or ``sm_90``.
        pci_address: ``domain:bus:device.function`` in lower case, as the kernel writes it; None where torch is too old.
    """

    index: int
    name: str
    arch: str
    total_bytes: int
    pci_address: str | None


@dataclass(frozen=True, kw_only=True)
class Software:
    """The installed software. An unknown item is a ``Reading`` without a value and with the reason.

    Attributes:
        torch_version: with its local part (``2.13.0+rocm7.2``).
        hip_version: ``torch.version.hip``; None where torch is no ROCm build or its version could not be read. This,
            not ROCm's version, is what bitsandbytes chooses its library by (its cextension.py); from ROCm 10 on it is
            another number: ROCm 10.1 comes with HIP 7.16 (pytorch#194256), 10.0 with 7.15 (reported).
        torch_rocm_version: ``torch.version.rocm``, which builds before it was added do not have; None like the above.
        cuda_version: ``torch.version.cuda``; None like the above.
        arch_list: architectures of torch's kernels; empty for a CPU build.
        devices: in torch's order.
        allocator_settings: the string in force for the caching allocator; "" if none is set.
        packages: version of every name of ``PACKAGES``; None where it is not installed.
        package_problems: package to the reason why its version could not be read.
        bitsandbytes_libraries: names of its native library files.
        rocm_version: of the system's ROCm.
        rocm_wheels: distributions that carry ROCm itself, with their versions.
    """

    python: str
    torch_version: Reading[str]
    hip_version: str | None
    torch_rocm_version: str | None
    cuda_version: str | None
    arch_list: Reading[tuple[str, ...]]
    devices: Reading[tuple[TorchDevice, ...]]
    allocator_settings: Reading[str]
    packages: Mapping[str, str | None]
    package_problems: Mapping[str, str]
    bitsandbytes_libraries: Reading[tuple[str, ...]]
    rocm_version: Reading[str]
    rocm_wheels: Mapping[str, str]

    @property
    def build(self) -> str | None:
        """torch's build: ``rocm``, ``cuda`` or ``cpu``; None if its version could not be read."""
        if self.torch_version.value is None:
            return None
        return "rocm" if self.hip_version else "cuda" if self.cuda_version else "cpu"

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a reading is ``{"value": ...}`` or ``{"reason": ...}``."""
        return {field.name: _pack(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, packed: Mapping[str, Any]) -> Software:
        """The record that ``to_dict`` gave.

        Raises:
            ValueError: it has another form; names the entry and the error.
        """
        found: Software = unpack(cls, packed, "software", extra=False)
        return found


def _pack(value: Any) -> Any:
    if isinstance(value, Reading):
        return {"reason": value.reason} if value.value is None else {"value": _pack(value.value)}
    if isinstance(value, tuple):
        return [_pack(entry) for entry in value]
    if isinstance(value, TorchDevice):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def read_software(*, root: Path = Path("/"), deadline_s: float = DEADLINE_S, in_process: bool = False) -> Software:
    """Read everything; an unreadable item does not raise.

    Args:
        root: replaces ``/`` in the search for the system's ROCm.
        deadline_s: for torch's answer.
        in_process: query torch in this process, without a deadline.
    """
    packages, problems = _read_packages()
    said, reason = (_probe({}), "") if in_process else _ask_torch(deadline_s)
    versions = _part(said, reason, "versions", Mapping[str, str | None])
    stated = read_torch_file()  # the only source for a torch that cannot be imported
    if versions.value is None and stated.value is not None:
        versions = Reading(value={"torch": stated.value["__version__"], **stated.value})
    found = versions.value or {}
    torch = found.get("torch")
    return Software(
        python=platform.python_version(),
        torch_version=Reading(value=torch) if torch is not None else unknown(versions.reason or "not stated"),
        hip_version=found.get("hip"),
        torch_rocm_version=found.get("rocm"),
        cuda_version=found.get("cuda"),
        arch_list=_part(said, reason, "archs", tuple[str, ...]),
        devices=_part(said, reason, "devices", tuple[TorchDevice, ...]),
        allocator_settings=_part(said, reason, "allocator", str),
        packages=packages,
        package_problems=problems,
        bitsandbytes_libraries=_read_bitsandbytes(),
        rocm_version=read_rocm_version(root),
        rocm_wheels=_read_wheels(),
    )


def _ask_torch(deadline_s: float) -> tuple[dict[str, Any], str]:
    if package_directory("torch") is None:
        return {}, "torch is not installed"
    outcome = run(__name__, request={}, deadline_s=deadline_s)
    if outcome.result is not None:
        return outcome.result, ""
    # A killed child printed its stacks last, and `how` names the step.
    printed = outcome.tail.splitlines()[-1:] if outcome.status != "timeout" and not outcome.error else []
    reason = _one_line(": ".join([f"the process that queried torch {outcome.how}", *printed]))
    if outcome.step != _ASKING_DEVICES:
        return {}, reason
    # It failed at the devices: query the rest again without them.
    return run(__name__, request={"devices": False}, deadline_s=deadline_s).result or {}, reason


def _part(said: Mapping[str, Any], reason: str, name: str, form: Any) -> Reading[Any]:
    if name not in said:
        return unknown(reason or f"torch was not queried for its {name}")
    part = said[name]
    if isinstance(part, dict) and part.keys() == {"problem"}:
        return unknown(_one_line(f"torch: {part['problem']}"))
    try:
        return Reading(value=unpack(form, part, name))
    except ValueError as error:
        return unknown(_one_line(f"torch's answer has an unknown form: {error}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _read_packages() -> tuple[dict[str, str | None], dict[str, str]]:
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    problems: dict[str, str] = {}
    for package, distributions in PACKAGES.items():
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


def _read_bitsandbytes() -> Reading[tuple[str, ...]]:
    directory = package_directory("bitsandbytes")
    if directory is None:
        return unknown("bitsandbytes is not installed")
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return unknown(f"bitsandbytes: {error.strerror}")
    return Reading(value=tuple(name for name in names if name.startswith("libbitsandbytes")))


def read_rocm_version(root: Path = Path("/")) -> Reading[str]:
    """Version of ROCm below `root`, without a build number: ``7.2.4``."""
    reasons = []
    for path in VERSION_FILES:
        text = read_text(LiveTree(root), path)
        if text.value is None:
            reasons.append(text.reason)
        elif re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6}){1,3}([-.+~]?[0-9A-Za-z.+~-]{0,60})?", text.value):
            return Reading(value=text.value.partition("-")[0])
        else:
            reasons.append(f"/{path}: not a version: {text.value[:40]!r}")
    return unknown("; ".join(reasons))


def _read_wheels() -> dict[str, str]:
    """Installed distributions that carry ROCm itself or kernels for one architecture, with their versions.

    ``rocm-sdk-device-gfx1100`` and ``amd-torch-device-gfx1100`` are required by a multi-architecture torch wheel. A
    distribution whose metadata cannot be read is left out.
    """
    found = {}
    for distribution in metadata.distributions():
        try:
            told = distribution.metadata  # each access parses the file
            name, version = told["Name"], told["Version"]
        except (OSError, ValueError, KeyError):
            continue
        plain = re.sub(r"[-_.]+", "-", name).lower() if isinstance(name, str) else ""
        if re.fullmatch("rocm|rocm-sdk(-.*)?|amd-torch-device-.*", plain) and isinstance(version, str):
            found[plain] = version
    return dict(sorted(found.items()))


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    """Query torch in this process: ``versions``, ``archs``, ``allocator`` and ``devices``.

    A failed item is ``{"problem": reason}``. ``{"devices": false}`` in the request leaves out the devices, which start
    the driver's runtime.
    """
    step("importing torch")
    import torch

    step("asking torch for its build")
    found: dict[str, Any] = {
        "versions": {
            "torch": str(torch.__version__),
            "hip": torch.version.hip,
            "rocm": getattr(torch.version, "rocm", None),
            "cuda": torch.version.cuda,
        },
        "archs": torch.cuda.get_arch_list(),
    }
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    try:
        found["allocator"] = read() if read else {"problem": "this torch does not report its allocator's settings"}
    except Exception as error:  # torch parses the user's variable only now and raises various types
        found["allocator"] = {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    if request.get("devices", True):
        step(_ASKING_DEVICES)
        try:
            found["devices"] = _ask_devices()
        except Exception as error:  # a runtime that does not start is a result, too
            found["devices"] = {"problem": f"{type(error).__name__}: {error}"}
    return found


def _ask_devices() -> list[dict[str, Any]]:
    import torch

    if torch.version.hip is None and torch.version.cuda is None and not torch.cuda.is_available():
        return []
    torch.cuda.init()  # `is_available()` would turn every error into False
    found = []
    for index in range(torch.cuda.device_count()):
        given = torch.cuda.get_device_properties(index)
        # "gfx90a:sramecc+:xnack-": what stands behind the colon are features, not the architecture.
        arch = (
            given.gcnArchName.partition(":")[0] if torch.version.hip is not None else f"sm_{given.major}{given.minor}"
        )
        own = {"name": given.name, "arch": arch, "total_bytes": given.total_memory, "pci_address": pci_address(index)}
        found.append({"index": index, **own})
    return found


if __name__ == "__main__":
    sys.exit(answer(_probe))
