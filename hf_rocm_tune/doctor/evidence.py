"""What a check is, and what it is given: the machine, the software and the variables, read here or from a recording."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.doctor.findings import Finding, knowledge_data
from hf_rocm_tune.machine.kfd import GpuNode
from hf_rocm_tune.machine.software import DEADLINE_S, Software, TorchDevice, read_software
from hf_rocm_tune.machine.survey import Gpu, JoinedDevice, Machine, join, record
from hf_rocm_tune.machine.variables import MARK_SET, MachineFacts
from hf_rocm_tune.machine.visible import choose, users_environ, visible_nodes

NO_VARIABLES = "the recording holds no variables"
NO_SOFTWARE = "the recording holds no software"
#: The driver of a device that a virtual machine has: this system cannot use it.
GIVEN_AWAY = "vfio-pci"
#: Groups in the order in which they run and are shown. What explains most comes first: variables and the wheel before
#: copies to one card, those before its memory, that before copies between cards, and arithmetic after all copies.
GROUPS: Mapping[str, str] = {
    "access": "Cards and access to them",
    "variables": "Environment variables",
    "software": "Software",
    "kernel": "Kernel and firmware settings",
    "links": "PCI Express",
    "host": "Memory and temperature",
    "transfers": "Measured: transfers",
    "memory": "Measured: the card's memory",
    "pairs": "Measured: between cards",
    "compute": "Measured: arithmetic",
    "after": "After measuring",
}


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

    def facts(self, findings: frozenset[str] = frozenset()) -> MachineFacts:
        """The same in the form that the policy of variables wants.

        Args:
            findings: names that rows of the policy hang on, for example ``peer_copy_failed``.
        """
        reasons: dict[str, str] = {}
        software, visible = self.software, self.visible
        torch_version = software.torch_version.value if software else None
        if torch_version is None:
            why = software.torch_version.reason if software else NO_SOFTWARE
            reasons |= {"torch_version": why, "hip_version": why}
        unread = software.package_problems.get("flash_attn") if software else NO_SOFTWARE
        if unread:
            reasons["flash_attn_version"] = unread
        if self.environ is None:
            reasons["archs"] = NO_VARIABLES
        elif visible is None:
            unfiltered = "the filter of visible GPUs is not a plain list of indices"
            reasons["archs"] = "; ".join(self.machine.topology.reasons) or unfiltered
        return MachineFacts(
            torch_version=torch_version,
            hip_version=software.hip_version if software else None,
            archs=None if visible is None else tuple(node.arch for node in visible),
            flash_attn_version=software.packages.get("flash_attn") if software else None,
            findings=findings,
            reasons=reasons,
        )


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables as the user has them: without what this package, or a parent process of it, has set."""
    ours = {name for name in environ.get(MARK_SET, "").split(",") if name}
    return {name: value for name, value in users_environ(environ).items() if name not in ours and name != MARK_SET}


def read_here(*, deadline_s: float = DEADLINE_S) -> tuple[Evidence, dict[str, Any]]:
    """What this machine is, and the recording of what was read of it.

    Args:
        deadline_s: seconds that torch has to answer.
    """
    machine, recording = record()
    software = read_software(deadline_s=deadline_s)
    return Evidence(machine=machine, software=software, environ=own_environ(os.environ)), recording


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: for ``--only`` and ``--skip``.
        group: a key of ``GROUPS``.
        about: what it finds out, one line.
        run: gives findings, ``ok`` with its evidence included, and none where there is nothing to look at.
        measured: it runs something; not possible on a recording.
        full: it takes long, and only ``--full`` runs it.
        needs_gpu: it measures on an accelerator that torch sees.
        needs_cards: with fewer discrete cards it does not exist.
        seconds: how long it takes as a rule.
    """

    name: str
    group: str
    about: str
    run: Callable[[Evidence], Iterable[Finding]]
    measured: bool = False
    full: bool = False
    needs_gpu: bool = False
    needs_cards: int = 0
    seconds: float = 0.0


def arch_of(gpu: Gpu) -> str | None:
    """The architecture that the kernel states, or its model's where the compute driver does not list the GPU."""
    return gpu.arch or (gpu.identity.card.arch if gpu.identity.card else None)


def version_numbers(version: str) -> tuple[int, ...] | None:
    """``2.13.0+rocm7.2`` as (2, 13, 0, 0), padded so that equal versions compare equal; None where it is no version."""
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)*)", version)
    return None if match is None else tuple([*map(int, match[1].split(".")[:4]), 0, 0, 0][:4])


def within(version: str, low: str | None, high: str | None) -> bool:
    """Whether ``low <= version < high``; an open end is None, and what is no version is in no range."""
    value, first, end = (version_numbers(one) if one else None for one in (version, low, high))
    return value is not None and (first is None or value >= first) and (end is None or value < end)


def minor(version: str) -> str:
    """``7.2.26015`` as ``7.2``."""
    value = version_numbers(version)
    return version if value is None else f"{value[0]}.{value[1]}"


def torch_rocm(software: Software) -> str | None:
    """The version of ROCm inside torch; None where it is no ROCm build.

    From ROCm 10 on, HIP's version is another number (10.0 comes with HIP 7.15), so it is only the last resort.
    """
    if not software.hip_version:
        return None
    named = re.search(r"\+rocm([0-9]+(?:\.[0-9]+)*)", software.torch_version.value or "")
    return software.torch_rocm_version or (named[1] if named else software.hip_version)


def in_wheels(gpu: Gpu) -> bool:
    """Whether torch is known to hold code for a GPU of its kind; of a card, that is for the check of its build."""
    return gpu.integrated is not True or arch_of(gpu) in knowledge_data("versions.toml")["integrated"]["in_wheels"]
