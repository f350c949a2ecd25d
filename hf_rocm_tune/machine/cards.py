"""What is known of each card. A figure without a source is None, not a guess.

The table is ``cards.toml`` beside this file, where every row names its sources. A card is told by its PCI device and
revision, by its name, or by architecture and memory; never by a count of compute units, because the runtime reports
work-group processors (42 on a 7900 XT) where the data sheet says compute units (84).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
# What the driver keeps for itself differs; no two cards of one architecture in the table are closer than 4 GiB.
VRAM_TOLERANCE_GIB = 1.5


@dataclass(frozen=True, kw_only=True)
class Card:
    """One model of card. None means: not known here.

    Attributes:
        name: as it is sold.
        key: the part of the name that tells it from its siblings, in lower case.
        arch: LLVM's name of the architecture.
        pci: ``device`` or ``device:revision`` of AMD's PCI vendor id, in lower-case hexadecimal digits.
        vram_gib: memory in GiB of one device as the runtime lists it.
        bandwidth_gb_s: memory bandwidth in 10^9 bytes a second, by data sheet.
        bf16_tflops: the lowest of the rates that were measured for large bf16 products, 10^12 operations a second.
        power_w: board power in watts.
        pcie: generation and width of the card's own connector.
        matrix: instruction family of the matrix units.
        bf16: matrix instructions take bf16.
        fp8: matrix instructions take FP8.
        integrated: shares the CPU's memory.
        source: where the figures come from.
    """

    name: str
    key: str
    arch: str | None = None
    pci: tuple[str, ...] = ()
    vram_gib: int | None = None
    bandwidth_gb_s: int | None = None
    bf16_tflops: int | None = None
    power_w: int | None = None
    pcie: tuple[int, int] | None = None
    matrix: str | None = None
    bf16: bool | None = None
    fp8: bool | None = None
    integrated: bool = False
    source: str


def _card(row: dict[str, Any]) -> Card:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Card(**values)


CARDS: tuple[Card, ...] = tuple(
    map(_card, tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["card"])
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A card, or None, and what decided."""

    card: Card | None
    reason: str


def identify(
    *,
    arch: str | None,
    vram_bytes: int | None,
    name: str = "",
    device_id: int | None = None,
    revision: int | None = None,
) -> Identity:
    """The row of the table that a device is: by PCI id first, then by name, else by architecture and memory.

    Args:
        arch: ``gfx1100`` and the like; feature suffixes (``:sramecc+``) are ignored.
        vram_bytes: total memory in bytes.
        name: any name that the kernel or the runtime gives; may be empty or a code name.
        device_id: PCI device id under AMD's vendor id (0x1002).
        revision: PCI revision id.

    Returns:
        A card only where exactly one row fits and nothing that was read contradicts it.
    """
    plain = (arch or "").split(":")[0]
    told, why = _by_pci(device_id, revision)
    if told is None:
        told, why = _by_name(name)
    if told is not None:
        wrong = _contradiction(told, plain, vram_bytes)
        if wrong:
            return Identity(card=None, reason=f"{why} says {told.name}, but {wrong}")
        return Identity(card=told, reason=why)
    return _by_memory(plain, vram_bytes)


def _by_pci(device_id: int | None, revision: int | None) -> tuple[Card | None, str]:
    if device_id is None:
        return None, ""
    ids = {f"{device_id:04x}"} | (set() if revision is None else {f"{device_id:04x}:{revision:02x}"})
    found = next((card for card in CARDS if ids & set(card.pci)), None)
    shown = "" if revision is None else f" revision {revision:02x}"
    return found, f"PCI device 1002:{device_id:04x}{shown}"


def _by_name(name: str) -> tuple[Card | None, str]:
    words = " ".join(name.lower().split())
    # The longest key wins: "7900 xt" is also a part of "7900 xtx".
    found = max((card for card in CARDS if card.key in words), key=lambda card: len(card.key), default=None)
    return found, f"the name {name!r}"


def _by_memory(arch: str, vram_bytes: int | None) -> Identity:
    if not arch:
        return Identity(card=None, reason="the architecture could not be read, and neither PCI id nor name is known")
    own = [card for card in CARDS if card.arch == arch]
    if len(own) == 1 and own[0].integrated:
        # An integrated GPU has as much memory as its owner gave it.
        return Identity(card=own[0], reason=f"{arch}, which is in this chip only")
    if vram_bytes is None:
        return Identity(card=None, reason=f"{arch}, but the memory could not be read, and no PCI id or name is known")
    fits = [card for card in own if card.vram_gib is not None and _same_vram(card.vram_gib, vram_bytes)]
    gib = vram_bytes / GIB
    if len(fits) == 1:
        return Identity(card=fits[0], reason=f"{arch} with {gib:.1f} GiB")
    shown = " or ".join(card.name for card in fits) or "no row of the card table"
    return Identity(card=None, reason=f"{arch} with {gib:.1f} GiB: {shown}")


def _same_vram(vram_gib: int, vram_bytes: int) -> bool:
    return abs(vram_bytes / GIB - vram_gib) <= VRAM_TOLERANCE_GIB


def _contradiction(card: Card, arch: str, vram_bytes: int | None) -> str:
    if arch and card.arch and arch != card.arch:
        return f"its architecture is {arch}, not {card.arch}"
    if vram_bytes is not None and card.vram_gib is not None and not _same_vram(card.vram_gib, vram_bytes):
        return f"its memory is {vram_bytes / GIB:.1f} GiB, not {card.vram_gib}"
    return ""
