"""The record of what software is installed and of what torch says of its devices, and its form as JSON.

:mod:`hf_rocm_tune.machine.software` fills it. Whatever could not be found out is a ``Reading`` without a value and
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from hf_rocm_tune.machine.sysfs import Reading

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """One device as torch sees it.

    Attributes:
        index: of ``cuda:index``, after all filters.
        name: as the runtime gives it.
        arch: ``gfx1100`` (``gcnArchName`` without features, after any override variable), or ``sm_90``.
        total_bytes: memory of the device.
        pci_address: ``domain:bus:device.function`` in lower case, as the kernel writes it; None where torch is too old.
    """

    index: int
    name: str
    arch: str
    total_bytes: int
    pci_address: str | None

    def __post_init__(self) -> None:
        for field in ("index", "total_bytes"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 0:
                raise ValueError(f"a device's {field} is {getattr(self, field)!r}")
        for field in ("name", "arch"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"a device's {field} is {getattr(self, field)!r}")
        if not isinstance(self.pci_address, str | None):
            raise ValueError(f"a device's pci_address is {self.pci_address!r}")


@dataclass(frozen=True, kw_only=True)
class Software:
    """What is installed.

    Attributes:
        python: version of the interpreter.
        torch_version: with its local part (``2.13.0+rocm7.2``).
        hip_version: ``torch.version.hip``; None where torch is no ROCm build or its version could not be read. This,
            not ROCm's version, is what bitsandbytes chooses its library by (its cextension.py), and from ROCm 10 on it
            is another number: ROCm 10.1 comes with HIP 7.16 (pytorch#194256), 10.0 with 7.15 (reported).
        torch_rocm_version: ``torch.version.rocm``, which builds before it was added do not have; None like the above.
        cuda_version: ``torch.version.cuda``; None like the above.
        arch_list: what torch's kernels are built for; empty for a CPU build.
        devices: in torch's order; empty where torch found none.
        allocator_settings: the string in force for the caching allocator; "" where none is set.
        packages: version of every name of ``PACKAGES``; None where it is not installed.
        package_problems: package to the reason why its version could not be read although it is there.
        bitsandbytes_libraries: names of its native library files.
        rocm_version: of the system's ROCm, see ``rocm_userspace``.
        rocm_wheels: distributions that carry ROCm itself, see ``rocm_userspace``.
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
        """What torch was built for: ``rocm``, ``cuda`` or ``cpu``; None where its version could not be read."""
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
            ValueError: it has another form; says which entry and what is wrong with it.
        """
        if not isinstance(packed, Mapping):
            raise ValueError(f"software is {type(packed).__name__}, not an object")
        if packed.keys() != _UNPACK.keys():
            odd = sorted(packed.keys() ^ _UNPACK.keys())
            raise ValueError(f"software has these entries too many or too few: {', '.join(map(str, odd))}")
        values = {}
        for name, unpack in _UNPACK.items():
            try:
                values[name] = unpack(packed[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"software: {name}: {error}") from error
        return cls(**values)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is not text")
    return value


def as_texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.60} is not a list")
    return tuple(map(as_text, value))


def as_optional(value: Any) -> str | None:
    return None if value is None else as_text(value)


def as_mapping(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.60} is not an object")
    return {as_text(name): as_text(entry) for name, entry in value.items()}


def as_versions(value: Any) -> dict[str, str | None]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.60} is not an object")
    return {as_text(name): as_optional(entry) for name, entry in value.items()}


def as_devices(value: Any) -> tuple[TorchDevice, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.60} is not a list")
    return tuple(TorchDevice(**entry) for entry in value)


def _pack(value: Any) -> Any:
    if isinstance(value, Reading):
        return {"reason": value.reason} if value.value is None else {"value": _pack(value.value)}
    if isinstance(value, tuple):
        return [_pack(entry) for entry in value]
    if isinstance(value, TorchDevice):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def _unpacked(read: Callable[[Any], T]) -> Callable[[Any], Reading[T]]:
    def unpack(packed: Any) -> Reading[T]:
        if isinstance(packed, dict) and packed.keys() == {"value"}:
            return Reading(value=read(packed["value"]))
        if isinstance(packed, dict) and packed.keys() == {"reason"} and as_text(packed["reason"]).strip():
            return Reading(value=None, reason=packed["reason"])
        raise ValueError(f"{packed!r:.60} is neither a value nor a reason")

    return unpack


_UNPACK: Mapping[str, Callable[[Any], Any]] = {
    "python": as_text,
    "torch_version": _unpacked(as_text),
    "hip_version": as_optional,
    "torch_rocm_version": as_optional,
    "cuda_version": as_optional,
    "arch_list": _unpacked(as_texts),
    "devices": _unpacked(as_devices),
    "allocator_settings": _unpacked(as_text),
    "packages": as_versions,
    "package_problems": as_mapping,
    "bitsandbytes_libraries": _unpacked(as_texts),
    "rocm_version": _unpacked(as_text),
    "rocm_wheels": as_mapping,
}
