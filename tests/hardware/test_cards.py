"""A card is told by architecture, memory and name, and is not guessed."""

from __future__ import annotations

import re

import pytest

from hf_rocm_tune.machine.cards import CARDS, GIB, identify


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_every_row_has_a_source_and_finds_itself_by_name(card) -> None:  # type: ignore[no-untyped-def]
    assert card.source
    vram = None if card.vram_gib is None else card.vram_gib * GIB
    assert identify(arch=card.arch, vram_bytes=vram, name=f"AMD {card.name} ").card is card


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (20.0, "7900 xt"),
        (19.98, "7900 xt"),
        (24.0, "7900 xtx"),
        (16.0, "7900 gre"),
        (32.0, "w7800"),
        (48.0, None),  # W7900 or W7800 48GB
        (0.5, None),
    ],
)
def test_gfx1100_cards_are_told_apart_by_memory(gib: float, name: str | None) -> None:
    card = identify(arch="gfx1100:sramecc-:xnack-", vram_bytes=int(gib * GIB), name="ip discovery").card
    assert (card.key if card else None) == name


def test_a_name_that_the_memory_contradicts_is_no_identity() -> None:
    identity = identify(arch="gfx1100", vram_bytes=24 * GIB, name="AMD Radeon RX 7900 XT")
    assert identity.card is None
    assert "24.0 GiB" in identity.reason
    assert identify(arch="gfx1036", vram_bytes=None, name="AMD Radeon RX 7900 XT").card is None


def test_unknown_stays_unknown_with_a_reason() -> None:
    for arch, vram in ((None, 20 * GIB), ("gfx1100", None), ("gfx1234", 20 * GIB), ("", 0)):
        identity = identify(arch=arch, vram_bytes=vram)
        assert identity.card is None
        assert identity.reason


def test_the_figures_of_the_main_card() -> None:
    card = identify(arch="gfx1100", vram_bytes=20 * GIB).card
    assert card is not None
    assert (card.bandwidth_gb_s, card.power_w, card.pcie) == (800, 315, (4, 16))
    assert (card.bf16, card.fp8, card.wave, card.matrix) == (True, False, 32, "WMMA")


@pytest.mark.parametrize(
    ("device", "revision", "gib", "key"),
    [
        (0x744C, 0xCC, 20, "7900 xt"),
        (0x744C, 0xC8, 24, "7900 xtx"),
        (0x744C, 0xCE, 16, "7900 gre"),
        (0x7550, 0xC0, 16, "9070 xt"),
        (0x7550, 0xC3, 16, "9070"),
        (0x7448, 0x00, 48, "w7900"),
        (0x7449, 0x00, 48, "w7800 48gb"),
        (0x740F, 0x02, 64, "mi210"),
        (0x7408, 0x00, 64, "mi250x"),
        (0x164E, 0xC8, 1, "raphael"),
    ],
)
def test_one_chip_s_cards_are_told_apart_by_revision(device: int, revision: int, gib: int, key: str) -> None:
    card = identify(arch=None, vram_bytes=gib * GIB, device_id=device, revision=revision).card
    assert card is not None
    assert card.key == key


def test_a_pci_id_wins_over_a_name_and_memory_wins_over_neither() -> None:
    known = {"device_id": 0x744C, "revision": 0xCC}
    assert identify(arch="gfx1100", vram_bytes=20 * GIB, name="Radeon RX 7900 XTX", **known).reason.startswith("PCI")
    identity = identify(arch="gfx1100", vram_bytes=24 * GIB, **known)
    assert identity.card is None
    assert "24.0 GiB" in identity.reason
    unknown = identify(arch="gfx1100", vram_bytes=20 * GIB, device_id=0x744C, revision=0x01).card
    assert unknown is not None and unknown.key == "7900 xt"


def test_an_architecture_of_integrated_gpus_needs_no_memory() -> None:
    card = identify(arch="gfx1151", vram_bytes=None).card
    assert card is not None and card.integrated


def test_every_row_is_sound() -> None:
    ids = [one for card in CARDS for one in card.pci]
    assert len(ids) == len(set(ids))
    assert len({card.key for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert card.key in card.name.lower()
        assert all(re.fullmatch("[0-9a-f]{4}(:[0-9a-f]{2})?", one) for one in card.pci)
        assert card.wave in {32, 64, None}
        assert card.matrix in {"WMMA", "MFMA", None}
