"""What a program writes to its weights on purpose becomes the new state; a flipped bit is found before the update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loops.conftest import SCRIPT, RunFile

FACES = {"accelerator": ("accelerator",), "script": ("plain",)}


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
    assert found["no digest"].startswith("CorruptionError: digests that cuda:0 sent"), found["no digest"]
    assert found["digests"] == found["number"] == found["engines"] == "fine"
    assert found["at once"] == found["at once, with faults"] == "fine"


@pytest.mark.parametrize("face", ["accelerator", pytest.param("script", marks=pytest.mark.long)])
def test_each_harm_of_copies_is_made_right_behind_each_face(run_file: RunFile, card: dict[str, str], face: str) -> None:
    file = Path(__file__).with_name("card_faces.py")
    done = run_file(
        *(SCRIPT if face == "script" else ()),
        file,
        *FACES[face],
        env={**card, "SIMCARD_POISON": "1", "SIMCARD_SEED": "3"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8 and all(same and harmed for same, harmed in found.values()), found


@pytest.mark.parametrize("place", ["frozen", pytest.param("optimizer", marks=pytest.mark.long)])
@pytest.mark.parametrize("face", ["script", pytest.param("accelerator", marks=pytest.mark.long)])
def test_a_flipped_bit_ends_the_program_behind_each_face(
    run_file: RunFile, card: dict[str, str], face: str, place: str
) -> None:
    file = Path(__file__).with_name("card_faces.py")
    done = run_file(*(SCRIPT if face == "script" else ()), file, *FACES[face], place, env=card)
    what = "frozen weights" if place == "frozen" else "optimizer state"
    assert done.returncode == (3 if face == "script" else 1), done.stderr[-2000:]
    assert what in done.stderr and "changed in memory" in done.stderr, done.stderr[-2000:]
