"""The drill: it finds every fault, and it would say so if the engine did not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune import cli
from hf_rocm_tune.doctor import drill
from hf_rocm_tune.doctor.drill import CELLS, DTYPES, SIZES, Drill, Samples, Tally, inject, send_clean
from hf_rocm_tune.transfer import STAGES, Digest, HostBackend, Mover
from hf_rocm_tune.transfer.faults import KINDS
from hf_rocm_tune.transfer.to_device import Transfer

CPU = torch.device("cpu")


def nothing(*_: object) -> None:
    """No progress is shown."""


def small(faults: int = 3 * len(CELLS), seed: int = 0) -> dict[tuple[str, bool], Tally]:
    return inject(CPU, faults=faults, seed=seed, on_fault=nothing)


def failures(faults: dict[tuple[str, bool], Tally] | None = None, clean: Tally | None = None) -> list[str]:
    counted = {"faults": faults or {}, "clean": clean or Counter[str]()}
    return Drill(device="cpu", seed=0, example="", seconds=0, **counted).failures()  # type: ignore[arg-type]


def test_every_fault_of_the_catalogue_is_found_and_nothing_else() -> None:
    found = small()
    assert failures(found) == []
    assert {kind for kind, _ in found} == set(KINDS)
    assert sum(tally["injected"] for tally in found.values()) == 3 * len(CELLS)
    for (kind, persist), tally in found.items():
        assert tally["detected"] == tally["injected"] == 3 * (1 if kind == "after" else len(STAGES))
        assert tally["missed"] == tally["false alarms"] == 0
        if kind != "after":
            assert tally["recovered"] + tally["stopped"] == tally["injected"]
            assert persist or tally["stopped"] == 0


def test_samples_are_of_every_dtype_and_size_from_one_byte() -> None:
    samples = Samples(0)
    made = [samples.tensor() for _ in range(4 * len(DTYPES) * len(SIZES))]
    assert {tensor.dtype for tensor in made} == set(DTYPES)
    assert set(SIZES) <= {tensor.nbytes for tensor in made}
    assert {tensor.is_contiguous() for tensor in made} == {True, False}


def test_an_engine_that_accepts_everything_fails_the_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "matches", lambda self, found: True)
    found = small()
    on_the_way = [tally for (kind, _), tally in found.items() if kind != "after"]
    assert failures(found)
    assert all(tally["missed"] == tally["injected"] and tally["detected"] == 0 for tally in on_the_way)


def test_an_engine_that_sees_sums_only_is_caught_by_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    def sums_only(self: Transfer, found: Digest) -> bool:
        return found.s1 == self.expected.s1

    monkeypatch.setattr(Transfer, "matches", sums_only)
    found = small()
    missed = {kind for (kind, _), tally in found.items() if tally["missed"]}
    assert "swap" in missed and not missed & {"zero", "zero_range", "flip"}


class WrongDigest(HostBackend):
    """Its seventh digest is wrong though the bytes are right."""

    digests = 0

    def digest(self, target: Tensor, word_offset: int = 0) -> Any:
        self.digests += 1
        pending = super().digest(target, word_offset)
        return super().digest(target, word_offset + 1) if self.digests == 7 else pending


class Corrupting(HostBackend):
    """Its seventh copy loses a byte."""

    copies = 0

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        super()._copy_now(target, source)
        self.copies += 1
        if self.copies == 7:
            target[-1] ^= 0xFF


class HarmsLater(HostBackend):
    """Harms what it hands out, just after the verdict."""

    def hand_out(self, buffer: Tensor, ticket: Any) -> None:
        super().hand_out(buffer, ticket)
        buffer[:1] ^= 1


@pytest.mark.parametrize(
    ("backend", "counts"), [(WrongDigest, (1, 0, 0)), (Corrupting, (0, 1, 0)), (HarmsLater, (0, 0, 20))]
)
def test_clean_transfers_tell_false_alarms_from_a_bad_machine(
    backend: type[HostBackend], counts: tuple[int, int, int]
) -> None:
    mover = Mover(CPU, backend=backend())
    found, _ = send_clean(CPU, transfers=20, seed=0, on_transfer=nothing, mover=mover)
    assert (found["false alarms"], found["corrupted"]) == counts[:2]
    assert (found["missed"] >= counts[2]) if counts[2] else not found["missed"]
    assert failures(clean=found)


def test_wrong_input_is_one_line_and_nothing_is_drilled(capsys: pytest.CaptureFixture[str]) -> None:
    none = [] if torch.cuda.is_available() else [("--device cuda", "torch sees no accelerator")]
    for argv, named in [("--faults 0", "--faults is 0"), ("--json .", "--json ."), *none]:
        assert cli.main(["doctor", "--drill", *argv.split()]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and named in printed.err


def test_the_command_shows_a_table_and_writes_only_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["doctor", "--drill", "--device", "cpu", "--faults", "60", "--clean", "20"]
    assert cli.main(few) == 0
    printed = capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    assert printed.err == ""
    rows = {tuple(line.split()[:2]) for line in printed.out.splitlines() if line}
    assert {(kind, "once") for kind in KINDS} <= rows
    assert cli.main([*few, "--json", "found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failures"] == []
    assert found["faults_total"]["injected"] == found["faults_total"]["detected"] == 60
    assert found["clean"]["transfers"] == 20


def test_a_failed_drill_says_so_in_one_line_and_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Transfer, "matches", lambda self, found: True)
    assert cli.main(["doctor", "--drill", "--device", "cpu", "--faults", "60", "--clean", "20"]) == 3
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "faults missed" in printed.err
    assert "verdict      " in printed.out and "faults missed" in printed.out


@pytest.mark.gpu
def test_the_drill_passes_on_the_device() -> None:
    assert drill.run("cuda", faults=2 * len(CELLS), clean=200).failures() == []


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ten_thousand_faults_and_a_million_clean_transfers(device: str, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "hf_rocm_tune",
        *["doctor", "--drill", "--full", "--json", "found.json", "--device"],
        device,
    ]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["faults_total"]["detected"] == found["faults_total"]["injected"] == 10_000
    assert found["clean"]["transfers"] == 1_000_000
