"""All machines of this directory, by name."""

from __future__ import annotations

from tests.machines.cards import CARDS
from tests.machines.case import Case
from tests.machines.platforms import PLATFORMS
from tests.machines.software import SOFTWARE
from tests.machines.variables import VARIABLES

MACHINES: dict[str, Case] = {**CARDS, **SOFTWARE, **VARIABLES, **PLATFORMS}
assert len(MACHINES) == len(CARDS) + len(SOFTWARE) + len(VARIABLES) + len(PLATFORMS), "a name is given twice"
