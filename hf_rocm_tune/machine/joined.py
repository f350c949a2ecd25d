"""Which card of the machine is which device of torch.

Torch counts the devices that its filters leave; the kernel knows the cards, whatever the variables say. The two are
joined by PCI address, and where torch gives none, by their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_rocm_tune.machine.machine import Gpu, Machine
from hf_rocm_tune.machine.software_record import TorchDevice
from hf_rocm_tune.machine.visible import visible_nodes


@dataclass(frozen=True, kw_only=True)
class JoinedDevice:
    """A device of torch and the card that it is.

    Attributes:
        device: as torch sees it.
        gpu: as the kernel sees it; None where it could not be told.
        reason: how it was told, or why it could not be.
    """

    device: TorchDevice
    gpu: Gpu | None
    reason: str

    @property
    def spoofed(self) -> bool:
        """Torch takes the card for another architecture than the kernel states: an override variable is at work."""
        return self.gpu is not None and self.gpu.arch is not None and self.gpu.arch != self.device.arch


def join(machine: Machine, devices: Sequence[TorchDevice], environ: Mapping[str, str]) -> tuple[JoinedDevice, ...]:
    """Tell which card each device of torch is, in torch's order.

    Args:
        machine: as surveyed.
        devices: as torch lists them; empty where it sees none.
        environ: the variables under which torch listed them, for their order.
    """
    return tuple(_join_one(machine, device, devices, environ) for device in devices)


def _join_one(
    machine: Machine, device: TorchDevice, devices: Sequence[TorchDevice], environ: Mapping[str, str]
) -> JoinedDevice:
    if device.pci_address is not None:
        gpu = next((gpu for gpu in machine.gpus if gpu.address == device.pci_address.lower()), None)
        found = f"PCI address {device.pci_address}"
        return JoinedDevice(
            device=device, gpu=gpu, reason=found if gpu else f"{found} is not among the kernel's devices"
        )
    if not machine.topology.complete:
        return _untold(device, "torch gives no PCI address, and the kernel's list could not be read whole")
    nodes = visible_nodes(machine.topology.nodes, environ)
    if nodes is None or len(nodes) != len(devices) or device.index >= len(nodes):
        return _untold(device, "torch gives no PCI address, and its devices are not as many as the kernel's")
    address = nodes[device.index].pci_address
    gpu = next((gpu for gpu in machine.gpus if gpu.address == address), None)
    if gpu is None:
        return _untold(device, "torch gives no PCI address, and neither does the kernel")
    return JoinedDevice(
        device=device, gpu=gpu, reason="its place in the kernel's order, because torch gives no address"
    )


def _untold(device: TorchDevice, reason: str) -> JoinedDevice:
    return JoinedDevice(device=device, gpu=None, reason=reason)
