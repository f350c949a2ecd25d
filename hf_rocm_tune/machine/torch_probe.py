"""What torch says of itself and its devices, asked in a process of its own: it may crash, hang or not be usable at all.

Run as a child by `software`, or by hand::

    echo '{}' | python -m hf_rocm_tune.machine.torch_probe
"""

from __future__ import annotations

import sys
from typing import Any

from hf_rocm_tune.machine.child_main import answer, step

IMPORTING = "importing torch"
ASKING_DEVICES = "asking torch for its devices"


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Ask torch.

    Args:
        request: ``{"devices": false}`` leaves out what starts the driver's runtime.

    Returns:
        ``versions``, ``archs``, ``allocator`` and ``devices``. What torch refused to say is ``{"problem": reason}``.
    """
    step(IMPORTING)
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
        "allocator": _allocator(),
    }
    if request.get("devices", True):
        step(ASKING_DEVICES)
        try:
            found["devices"] = _devices()
        except Exception as error:  # a runtime that does not start is what was asked for, whatever it raises
            found["devices"] = {"problem": f"{type(error).__name__}: {error}"}
    return found


def _allocator() -> Any:
    import torch

    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:
        return {"problem": "this torch does not tell its allocator's settings"}
    try:
        return read()
    except Exception as error:  # it parses the user's variable only now, and raises over a wrong one in many types
        return {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def _devices() -> list[dict[str, Any]]:
    import torch

    if torch.version.hip is None and torch.version.cuda is None:
        return []
    torch.cuda.init()  # not `is_available()`, which turns every error into False
    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    # "gfx90a:sramecc+:xnack-": what stands behind the colon are features, not the architecture.
    arch = properties.gcnArchName.partition(":")[0] if is_hip else f"sm_{properties.major}{properties.minor}"
    return {
        "index": index,
        "name": properties.name,
        "arch": arch,
        "total_bytes": properties.total_memory,
        "pci_address": pci_address(index),
    }


def pci_address(index: int) -> str | None:
    """``domain:bus:device.function`` of a device as the kernel writes it; None where torch is too old to tell."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    # GPUs are function 0 of their slot; the runtime does not tell the function.
    return None if None in (domain, bus, slot) else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


if __name__ == "__main__":
    sys.exit(answer(probe))
