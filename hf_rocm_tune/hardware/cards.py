"""What is known of each card, as a table. A figure without a source is None, not a guess.

Every figure is a row of the project's facts page (FACTS.md), which names its own source. A card is told by its
architecture, its memory and its name; never by a count of compute units, because the runtime reports work-group
processors (42 on a 7900 XT) where the data sheet says compute units (84).
"""

from __future__ import annotations

from dataclasses import dataclass

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
        vram_gib: memory in GiB.
        bandwidth_gb_s: memory bandwidth in 10^9 bytes a second, by data sheet.
        power_w: board power in watts.
        pcie: generation and width of the card's own connector.
        matrix: instruction family of the matrix units.
        bf16: matrix instructions take bf16.
        fp8: matrix instructions take FP8.
        wave: native wavefront size in lanes.
        integrated: shares the CPU's memory.
        source: where the figures come from.
    """

    name: str
    key: str
    arch: str | None = None
    vram_gib: int | None = None
    bandwidth_gb_s: int | None = None
    power_w: int | None = None
    pcie: tuple[int, int] | None = None
    matrix: str | None = None
    bf16: bool | None = None
    fp8: bool | None = None
    wave: int | None = None
    integrated: bool = False
    source: str


_NO_FIGURES = "none of its figures has been checked for this project"

CARDS: tuple[Card, ...] = (
    Card(
        name="Radeon RX 7900 XT",
        key="7900 xt",
        arch="gfx1100",
        vram_gib=20,
        bandwidth_gb_s=800,
        power_w=315,
        pcie=(4, 16),
        matrix="WMMA",
        bf16=True,
        fp8=False,
        wave=32,
        source="ROCm gpu-arch-specs; guru3d; hf.co/hardware/rx-7900-xt; hardwaredb; aiter kernels_common.py (no FP8)",
    ),
    Card(
        name="Radeon RX 7900 XTX",
        key="7900 xtx",
        arch="gfx1100",
        vram_gib=24,
        bandwidth_gb_s=960,
        power_w=355,
        pcie=(4, 16),
        matrix="WMMA",
        bf16=True,
        fp8=False,
        wave=32,
        source="ROCm gpu-arch-specs; guru3d; hardwaredb; ROCm/ROCm#2253; aiter kernels_common.py (no FP8)",
    ),
    Card(
        name="Radeon PRO W7900",
        key="w7900",
        arch="gfx1100",
        matrix="WMMA",
        bf16=True,
        fp8=False,
        wave=32,
        source="aiter README (W7900/gfx1100); aiter kernels_common.py (no FP8)",
    ),
    Card(name="Radeon RX 7900 GRE", key="7900 gre", source=_NO_FIGURES),
    Card(name="Radeon RX 7800 XT", key="7800 xt", source=_NO_FIGURES),
    Card(name="Radeon RX 9070 XT", key="9070 xt", vram_gib=16, source="hf.co/hardware"),
    Card(name="Radeon RX 9070", key="9070", vram_gib=16, source="hf.co/hardware"),
    Card(name="Radeon AI PRO R9700", key="r9700", vram_gib=32, source="hf.co/hardware; ROCm issues"),
    Card(
        name="Strix Halo integrated GPU",
        key="strix halo",
        arch="gfx1151",
        integrated=True,
        source="unsloth install.sh; TheRock SUPPORTED_GPUS.md (gfx1151); integrated: general knowledge",
    ),
    Card(
        name="Instinct MI300X",
        key="mi300x",
        arch="gfx942",
        bandwidth_gb_s=5300,
        matrix="MFMA",
        wave=64,
        source="AMD; pytorch hip.rst (TF32 on gfx942 = MI300); general knowledge, lower confidence",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A card, or None, and what decided."""

    card: Card | None
    reason: str


def identify(*, arch: str | None, vram_bytes: int | None, name: str = "") -> Identity:
    """The row of the table that a device is, by name first, else by architecture and memory.

    Args:
        arch: ``gfx1100`` and the like; feature suffixes (``:sramecc+``) are ignored.
        vram_bytes: total memory in bytes.
        name: any name that the kernel or the runtime gives; may be empty or a code name.

    Returns:
        A card only where exactly one row fits and nothing that was read contradicts it.
    """
    plain = (arch or "").split(":")[0]
    words = " ".join(name.lower().split())
    # The longest key wins: "7900 xt" is also a part of "7900 xtx".
    named = max((card for card in CARDS if card.key in words), key=lambda card: len(card.key), default=None)
    if named is not None:
        wrong = _contradiction(named, plain, vram_bytes)
        if wrong:
            return Identity(card=None, reason=f"the name says {named.name}, but {wrong}")
        return Identity(card=named, reason=f"named {name!r}")
    if not plain or vram_bytes is None:
        return Identity(card=None, reason="architecture or memory could not be read, and the name says nothing")
    fits = [
        card
        for card in CARDS
        if card.arch == plain and card.vram_gib is not None and _same_vram(card.vram_gib, vram_bytes)
    ]
    gib = vram_bytes / GIB
    if len(fits) == 1:
        return Identity(card=fits[0], reason=f"{plain} with {gib:.1f} GiB")
    return Identity(card=None, reason=f"no row of the card table is {plain} with {gib:.1f} GiB")


def _same_vram(vram_gib: int, vram_bytes: int) -> bool:
    return abs(vram_bytes / GIB - vram_gib) <= VRAM_TOLERANCE_GIB


def _contradiction(card: Card, arch: str, vram_bytes: int | None) -> str:
    if arch and card.arch and arch != card.arch:
        return f"its architecture is {arch}, not {card.arch}"
    if vram_bytes is not None and card.vram_gib is not None and not _same_vram(card.vram_gib, vram_bytes):
        return f"its memory is {vram_bytes / GIB:.1f} GiB, not {card.vram_gib}"
    return ""
