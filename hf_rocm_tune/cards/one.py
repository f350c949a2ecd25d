"""One process with one card."""

from __future__ import annotations

from hf_rocm_tune.cards.way import Way


class One(Way):
    """Nothing is exchanged."""
