"""What checks are given: the machine, the software and the variables, read here and now or taken from a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_rocm_tune.machine.kfd import GpuNode
from hf_rocm_tune.machine.software import Software, TorchDevice
from hf_rocm_tune.machine.survey import Gpu, JoinedDevice, Machine, join
from hf_rocm_tune.machine.variables import MachineFacts
from hf_rocm_tune.machine.visible import choose, visible_nodes

NO_VARIABLES = "the recording holds no variables"
#: The driver of a device that a virtual machine has: this system cannot use it.
GIVEN_AWAY = "vfio-pci"


def arch_of(gpu: Gpu) -> str | None:
    """The architecture that the kernel states, or its model's where the compute driver does not list the GPU."""
    return gpu.arch or (gpu.identity.card.arch if gpu.identity.card else None)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that read checks look at. Measured checks look at the machine itself and need it only to choose devices.

    Attributes:
        machine: what the kernel tells.
        software: what is installed; None in a recording that holds no software.
        environ: the user's variables, without what this package has set itself; None in a recording that holds none.
        recorded: it comes from a file, so nothing can be measured.
    """

    machine: Machine
    software: Software | None
    environ: Mapping[str, str] | None
    recorded: bool = False

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The discrete AMD cards that are this system's, in PCI order."""
        return tuple(gpu for gpu in self.machine.cards if gpu.driver.value != GIVEN_AWAY)

    @property
    def candidates(self) -> tuple[Gpu, ...]:
        """What could be trained on: the discrete AMD cards, and integrated GPUs only where there is no card."""
        discrete = tuple(gpu for gpu in self.machine.amd if gpu.integrated is not True)
        return tuple(gpu for gpu in discrete if gpu.driver.value != GIVEN_AWAY) or discrete or self.machine.amd

    @property
    def variables(self) -> Mapping[str, str]:
        """Those variables that are known to be set."""
        return self.environ or {}

    @property
    def devices(self) -> tuple[TorchDevice, ...]:
        """What torch sees; nothing where that is not known."""
        return (self.software.devices.value or ()) if self.software else ()

    @property
    def card_count(self) -> int:
        """How many discrete cards there are, of any vendor: what the kernel lists, or torch where it sees more."""
        return max(len(self.cards), len(self.seen_cards))

    @property
    def seen_cards(self) -> tuple[TorchDevice, ...]:
        """Those of torch's devices that are no integrated GPUs."""
        return tuple(one.device for one in self.joined if one.gpu is None or one.gpu.integrated is not True)

    @property
    def joined(self) -> tuple[JoinedDevice, ...]:
        """What torch sees, with the card of the kernel that each device is."""
        topology = self.machine.topology
        # Torch was asked by a process of this package, which shows it all discrete cards where the user filters none.
        shown = choose(topology.nodes, self.variables, complete=topology.complete, split=True).variables
        return join(self.machine, self.devices, {**self.variables, **shown})

    @property
    def visible(self) -> tuple[GpuNode, ...] | None:
        """The compute nodes that the user's filters leave; None where that is not known."""
        topology = self.machine.topology
        known = topology.complete and self.environ is not None
        return visible_nodes(topology.nodes, self.variables) if known else None

    @property
    def unseen(self) -> str:
        """Why it is not known which nodes are visible."""
        if self.environ is None:
            return NO_VARIABLES
        return "; ".join(self.machine.topology.reasons) or "the filter of visible GPUs is not a plain list of indices"

    def facts(self, findings: frozenset[str] = frozenset()) -> MachineFacts:
        """The same in the form that the policy of variables wants.

        Args:
            findings: names that rows of the policy hang on, for example ``peer_copy_failed``.
        """
        reasons: dict[str, str] = {}
        software = self.software
        torch_version = software.torch_version.value if software else None
        if torch_version is None:
            why = software.torch_version.reason if software else "the recording holds no software"
            reasons |= {"torch_version": why, "hip_version": why}
        unread = software.package_problems.get("flash_attn") if software else "the recording holds no software"
        if unread:
            reasons["flash_attn_version"] = unread
        visible = self.visible
        if visible is None:
            reasons["archs"] = self.unseen
        return MachineFacts(
            torch_version=torch_version,
            hip_version=software.hip_version if software else None,
            archs=None if visible is None else tuple(node.arch for node in visible),
            flash_attn_version=software.packages.get("flash_attn") if software else None,
            findings=findings,
            reasons=reasons,
        )
