"""Every wait, ``record_stream``, slot and pinned buffer of the device backend is needed, and it has them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import simcard

WORKLOADS = Path(__file__).with_name("mutants_on_card.py")
SAMPLE = {
    "full": (
        "weights allocated without record",
        "one buffer for all digests",
        "digest before its copy",
        "read back without a wait",
    ),
    "off": ("handed out without a wait", "slot without ticket", "source of a fetch not kept"),
}


def found(verify: str, *mutants: str, **environ: str) -> dict[str, str | None]:
    """What went wrong with each mutant, and with ``None``: with the engine as it is."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        try:
            environment |= simcard.environment()
        except simcard.NoCompiler as missing:
            pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, str(WORKLOADS), verify, *mutants],
        env=environment | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("verify", list(SAMPLE))
def test_the_engine_is_right_and_some_mutants_are_seen(verify: str) -> None:
    judged = found(verify, *SAMPLE[verify])
    assert judged.pop("None") is None
    assert [name for name, problem in judged.items() if problem is None] == []
    assert list(judged) == list(SAMPLE[verify])


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("verify", list(SAMPLE))
def test_every_mutant_is_seen(verify: str, seed: int) -> None:
    judged = found(verify, SIMCARD_SEED=str(seed))
    assert judged.pop("None") is None
    assert [name for name, problem in judged.items() if problem is None] == []
    assert len(judged) == {"full": 20, "off": 13}[verify]
