"""However the work is shared out, the training is the same: losses, gradient norms and adapter over 50 steps.

All of it is `long`: the normal suite has DDP (`test_two_processes`), FSDP2 (`test_fsdp`), splits (`test_split`). What
differs between ways is the order of float sums, how far a batch is padded, and the dtype in which adapters of a 4-bit
model are averaged.

``KEEP_TRAJECTORIES=FILE`` keeps what was seen, a JSON object a line; see ``benchmarks/results``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import CommandServer
from tests.e2e.trajectories import CASES, ONE, WAYS, Case, Trajectory, rows, train

TOLERANCES = {
    "lora": {"loss": 1e-5, "grad_norm": 1e-4, "adapter": 1e-3},
    "qlora": {"loss": 3e-4, "grad_norm": 6e-2, "adapter": 5e-2},
}
"""See `Trajectory.away_from`. TRL trains the adapters of 4-bit models in bfloat16, which has 8 bits: an average of two
gradients is rounded otherwise than a gradient of two rows, and a norm of such is known to 0.4 % only.
"""


class Trained:
    """Trains each way once."""

    def __init__(self, server: CommandServer, model_of: Callable[[str], Path], root: Path) -> None:
        self._server, self._model_of, self._root = server, model_of, root
        self._data = rows(root / "data")
        self._reference: dict[Case, Trajectory] = {}

    def reference(self, case: Case) -> Trajectory:
        """One process with twice the batch."""
        if case not in self._reference:
            self._reference[case] = self._train(case, "one")
        return self._reference[case]

    def way(self, case: Case, name: str) -> Trajectory:
        """Another way."""
        return self._train(case, name)

    def _train(self, case: Case, name: str) -> Trajectory:
        output = self._root / f"{case} {name}".replace(" ", "-").replace(",", "")
        way = ONE if name == "one" else WAYS[name]
        return train(self._server, self._model_of, case, way, data=self._data, output=output)


@pytest.fixture(scope="module")
def trained(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Trained:
    """The runs of this module."""
    return Trained(server, model_of, scratch / "trajectories")


CELLS = [pytest.param(case, name, id=f"{case}, {name}".replace(" ", "-")) for case in CASES for name in WAYS]


@pytest.mark.long
@pytest.mark.parametrize(("case", "name"), CELLS)
def test_the_way_does_not_change_the_training(trained: Trained, case: Case, name: str) -> None:
    reference = trained.reference(case)
    assert reference.losses[0] - reference.losses[-1] > 0.1  # a frozen trajectory would agree as well
    away = trained.way(case, name).away_from(reference)
    if file := os.environ.get("KEEP_TRAJECTORIES"):
        with open(file, "a", encoding="utf-8") as kept:
            kept.write(json.dumps({"case": str(case), "way": name, "steps": len(reference.losses), **away}) + "\n")
    assert all(away[what] <= limit for what, limit in TOLERANCES[case.method].items()), away
