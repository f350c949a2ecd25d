"""The table of cards, and which of them a device is.

``pci`` is the device, or device and revision, under AMD's vendor id (amdgpu.ids of libdrm, pci.ids). A figure without a
source is left out, never guessed. Sources: ROCm documentation, GPU architecture specifications (architecture, memory of
one device as the runtime lists it; MI250X: half of the board), for the rest of a row its comment.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
# The driver's reserve differs; cards of one architecture in the table differ by 4 GiB or more.
_TOLERANCE_GIB = 1.5


@dataclass(frozen=True)
class Card:
    """One model of card. None means unknown."""

    name: str  # as it is sold
    key: str  # its distinguishing part, in lower case
    arch: str
    pci: tuple[str, ...]  # device or device:revision, lower-case hexadecimal
    vram_gib: int | None = None
    bandwidth_gb_s: int | None = None  # of the memory, 10^9 bytes a second, by data sheet
    bf16_tflops: int | None = None  # the lowest measured rate of large bf16 products, 10^12 operations a second
    integrated: bool = False  # shares the CPU's memory


CARDS = (
    # 77 TFLOPS were measured through ZLUDA, which is not ROCm: a figure for the planner, not a bound of the doctor.
    # guru3d; torch-performance-test-data#58, #103, #152
    Card("Radeon RX 7900 XT", "7900 xt", "gfx1100", ("744c:cc",), 20, 800, 77),
    Card("Radeon RX 7900 XTX", "7900 xtx", "gfx1100", ("744c:c8",), 24, 960, 88),
    Card("Radeon RX 7900 GRE", "7900 gre", "gfx1100", ("744c:ce",), 16, 576),  # notebookcheck 739341
    Card("Radeon PRO W7900", "w7900", "gfx1100", ("7448", "744a"), 48, 864),  # itcreations.com
    Card("Radeon PRO W7800", "w7800", "gfx1100", ("745e",), 32),
    Card("Radeon PRO W7800 48GB", "w7800 48gb", "gfx1100", ("7449",), 48),
    Card("Radeon RX 7800 XT", "7800 xt", "gfx1101", ("747e:c8",), 16, 624),  # hardwaredb.net
    Card("Radeon RX 9070 XT", "9070 xt", "gfx1201", ("7550:c0",), 16, 640),  # multiplayer.it
    Card("Radeon RX 9070", "9070", "gfx1201", ("7550:c3",), 16, 640),  # multiplayer.it
    Card("Radeon RX 9070 GRE", "9070 gre", "gfx1201", ("7550:c2",)),  # sources differ on its memory
    Card("Radeon AI PRO R9700", "r9700", "gfx1201", ("7551:c0",), 32),  # hf.co/hardware
    Card("Strix Halo integrated GPU", "strix halo", "gfx1151", ("1586",), integrated=True),
    Card("Raphael integrated GPU", "raphael", "gfx1036", ("164e",), integrated=True),  # TheRock#5543
    Card("Instinct MI210", "mi210", "gfx90a", ("740f:02",), 64),
    Card("Instinct MI250X", "mi250x", "gfx90a", ("7408:00",), 64, 1600),  # ROCm docs mi250.md
    Card("Instinct MI300X", "mi300x", "gfx942", ("74a1:00",), 192, 5300),  # docs.vultr.com
    Card("Instinct MI325X", "mi325x", "gfx942", ("74a5:00",), 256, 6000),  # docs.vultr.com
    Card("Instinct MI355X", "mi355x", "gfx950", ("75a3:00",), 288, 8000),  # boston-uk-l
)  # fmt: skip


def identify(*, arch: str | None, vram_bytes: int | None, pci: tuple[int, int | None] | None = None) -> Card | None:
    """The row of a device: by PCI id, else by architecture and memory where exactly one row fits."""
    if pci is not None:
        device, revision = pci
        ids = {f"{device:04x}"}
        if revision is not None:
            ids.add(f"{device:04x}:{revision:02x}")
        for card in CARDS:
            if not ids.isdisjoint(card.pci):
                return card
    plain_arch = (arch or "").split(":")[0]
    fits = [card for card in CARDS if card.arch == plain_arch and _has_memory(card, vram_bytes)]
    return fits[0] if len(fits) == 1 else None


def _has_memory(card: Card, vram_bytes: int | None) -> bool:
    if card.integrated:  # its memory is a BIOS setting
        return True
    known = None not in (card.vram_gib, vram_bytes)
    return known and abs((vram_bytes or 0) / GIB - (card.vram_gib or 0)) <= _TOLERANCE_GIB
