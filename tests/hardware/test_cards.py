"""A card is told by architecture, memory and name, and is not guessed."""

from __future__ import annotations

import pytest

from hf_rocm_tune.hardware.cards import CARDS, GIB, identify


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_every_row_has_a_source_and_finds_itself_by_name(card) -> None:  # type: ignore[no-untyped-def]
    assert card.source
    vram = None if card.vram_gib is None else card.vram_gib * GIB
    assert identify(arch=card.arch, vram_bytes=vram, name=f"AMD {card.name} ").card is card


@pytest.mark.parametrize(
    ("gib", "name"),
    [(20.0, "7900 xt"), (19.98, "7900 xt"), (24.0, "7900 xtx"), (16.0, None), (48.0, None), (0.5, None)],
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
