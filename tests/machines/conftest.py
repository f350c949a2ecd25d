"""Every machine is diagnosed once, in all forms of output."""

from __future__ import annotations

import pytest

from tests.machines.replay import COLUMNS, MACHINES, Replay, replay


@pytest.fixture(scope="session")
def replays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Replay]:
    """Name of a machine to what the command says of it, on a terminal of 80 columns."""
    root = tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(COLUMNS))
        return {name: replay(case.evidence(root / name)) for name, case in MACHINES.items()}
