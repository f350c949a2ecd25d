"""The device that a measuring child is to use, found by its PCI address where that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.machine.torch_probe import pci_address

if TYPE_CHECKING:
    import torch


def device_of(wanted: Mapping[str, Any]) -> torch.device:
    """Wake a device and make it the current one.

    Args:
        wanted: ``device`` is ``cpu`` or ``cuda:N``; ``address``, where it is there, is its PCI address, which counts
            more than N: filters of visible devices may differ between two processes.

    Raises:
        RuntimeError: there is no such device here, or it does not start.
    """
    import torch

    device = torch.device(wanted["device"])
    if device.type == "cpu":
        return device
    torch.cuda.init()
    address = wanted.get("address")
    if address is not None:
        found = [index for index in range(torch.cuda.device_count()) if pci_address(index) == address]
        if found:
            device = torch.device("cuda", found[0])
        elif device.index is None or pci_address(device.index) is not None:
            raise RuntimeError(f"torch sees no device at {address} in this process")
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    return device
