"""What a program writes to its weights on purpose becomes the new state; a flipped bit is found before the update."""

from __future__ import annotations

import json
from pathlib import Path

from tests.loops.conftest import RunFile


def test_writes_are_no_faults_and_flipped_bits_are(run_file: RunFile, card: dict[str, str]) -> None:
    done = run_file(Path(__file__).with_name("card_writes.py"), env=card)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["writes"].values()) == {"fine"}, found["writes"]
    assert all(said.startswith("MemoryFaultError") for said in found["flips"].values()), found["flips"]
    assert found["batch"].startswith("MemoryFaultError: batch tensors"), found["batch"]
    assert found["file"].startswith("CorruptionError: model.safetensors does not hold"), found["file"]
    assert found["initialised"] == "fine"
    assert found["flipped at the start"].startswith("MemoryFaultError: frozen weights"), found["flipped at the start"]
    assert found["replaced error"].startswith("CorruptionError"), found["replaced error"]
    assert found["state"].startswith("CorruptionError") and "weight in model.safetensors" in found["state"]
    assert found["digests"] == found["number"] == found["engines"] == "fine"
    assert found["at once"] == found["at once, with faults"] == "fine"
