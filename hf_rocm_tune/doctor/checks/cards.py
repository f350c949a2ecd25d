"""Which cards these are, which of them HIP is to see, and what is known of platforms that nobody here has tried."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.checks.torch_build import in_wheels
from hf_rocm_tune.doctor.evidence import NO_VARIABLES, Evidence, arch_of
from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.machine.cards import Card
from hf_rocm_tune.machine.kfd import GpuNode
from hf_rocm_tune.machine.survey import Gpu
from hf_rocm_tune.machine.visible import FILTERS, OURS, choose, is_integrated

_GIB = 1 << 30


def _cards(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.machine.amd:
        if gpu.integrated is not True:
            yield _card(gpu)
    models = {gpu.address: gpu.identity.card.name for gpu in evidence.cards if gpu.identity.card}
    if len(set(models.values())) > 1:
        listed = ", ".join(f"{name} at {address}" for address, name in models.items())
        yield from_row("cards", "cards_unequal", listed=listed)


def _card(gpu: Gpu) -> Finding:
    card = gpu.identity.card
    arch = arch_of(gpu) or "architecture unknown"
    vram = gpu.node.vram_bytes if gpu.node else None
    if card is None:
        what = f"PCI device {gpu.vendor_id:04x}:{gpu.device_id:04x}, {arch}"
        return from_row(
            "cards",
            "card_unknown",
            subject=gpu.address,
            address=gpu.address,
            what=what,
            reason=gpu.identity.reason,
        )
    seen = [f"told by: {gpu.identity.reason}", *_figures(card)]
    memory = "its memory is not known" if vram is None else f"{vram / _GIB:.1f} GiB"
    values = {"name": card.name, "address": gpu.address, "arch": arch, "memory": memory}
    return from_row("cards", "card_known", subject=gpu.address, evidence=seen, **values)


def _figures(card: Card) -> list[str]:
    pcie = card.pcie
    known = {
        f"{card.bandwidth_gb_s} GB/s": card.bandwidth_gb_s,
        f"{card.power_w} W": card.power_w,
        f"PCIe {pcie[0]}.0 x{pcie[1]}" if pcie else "": pcie,
        f"{card.matrix} with bf16" if card.bf16 else f"{card.matrix}": card.matrix,
        "no FP8": card.fp8 is False,
    }
    told = ", ".join(text for text, there in known.items() if there)
    return [f"known of this model: {told} ({card.source})"] if told else []


def _integrated(evidence: Evidence) -> Iterator[Finding]:
    topology = evidence.machine.topology
    igpus = [node for node in topology.nodes if is_integrated(node)]
    cards = [node for node in topology.nodes if not is_integrated(node)]
    if not igpus or not cards:
        return
    choice = choose(topology.nodes, {}, complete=topology.complete, split=len(cards) > 1)
    line = f"{OURS}={choice.variables.get(OURS, '')}"
    igpu, card = ", ".join(map(_describe, igpus)), ", ".join(map(_describe, cards))
    filters = {name: evidence.variables[name] for name in FILTERS if name in evidence.variables}
    if evidence.environ is None:
        yield unknown("integrated", f"which of {igpu} and {card} are visible is not known: {NO_VARIABLES}")
    elif not choice.variables:
        yield unknown("integrated", choice.reason)
    elif not filters:
        yield from_row("integrated", "igpu_hidden", igpu=igpu, card=card, line=line)
    else:
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in filters.items())
        seen = evidence.visible
        if seen is None:
            yield unknown("integrated", f"{shown} is not a plain list of indices, so what it leaves is not known")
        elif any(node in seen for node in igpus):
            left = ", ".join(_describe(node) for node in igpus if node in seen)
            row = "igpu_visible" if any(node in seen for node in cards) else "igpu_instead"
            yield from_row("integrated", row, shown=shown, igpu=left, card=card, line=line)
        else:
            yield from_row("integrated", "igpu_filtered", igpu=igpu, line=shown)


def _describe(node: GpuNode) -> str:
    memory = "" if node.vram_bytes is None else f", {node.vram_bytes / _GIB:.1f} GiB"
    return f"GPU {node.index} ({node.arch}{memory}{', ' + node.pci_address if node.pci_address else ''})"


def _platform(evidence: Evidence) -> Iterator[Finding]:
    if evidence.machine.host.platform == "windows":
        yield from_row("platform", "windows")
    alone = [gpu for gpu in evidence.machine.amd if gpu.integrated]
    if evidence.cards or not alone:
        return
    for gpu in alone:
        arch = arch_of(gpu)
        row = "only_integrated" if in_wheels(gpu) else "no_card"
        yield from_row("platform", row, subject=gpu.address, address=gpu.address, arch=arch or "unknown")
        if arch == "gfx1151":
            yield from_row("platform", "strix_halo", subject=gpu.address)


CHECKS = (
    Check(name="cards", group="access", about="which model each card is", run=_cards),
    Check(name="integrated", group="access", about="an integrated GPU beside the card", run=_integrated),
    Check(name="platform", group="access", about="Windows and Strix Halo, not tested here", run=_platform),
)
