"""What is known of a measured check before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured check.

    Attributes:
        name: of the check.
        group: a key of ``doctor.check.GROUPS``.
        about: one line for ``doctor --list``.
        module: in this package; several checks may share one.
        seconds: what it takes on a card, as an estimate.
        deadline_s: seconds after which a child is killed; generous, since a healthy one never waits for it.
        faults: kinds that it can be given as ``request["fault"]["kind"]``, beside those of every child.
        options: goes into the request.
        full: only run with ``--full``.
        every_card: one child for each card (``request["device"]``), or one run for all (``request["devices"]``).
        own_child: measured by ``python -m hf_rocm_tune.doctor.measured``; False for what the preflight measures.
        needs_cards: with fewer discrete cards it does not exist.
    """

    name: str
    group: str
    about: str
    module: str
    seconds: float
    deadline_s: float
    faults: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    full: bool = False
    every_card: bool = True
    own_child: bool = True
    needs_cards: int = 0
