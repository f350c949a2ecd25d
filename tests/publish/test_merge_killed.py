"""A merge that is killed, stopped or out of room leaves nothing that looks finished, and the next one cleans up."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish import merge as merging
from tests.e2e.command import CommandServer, Result
from tests.publish.merge_cases import lora, merged

KILLS = 8
Merge = Callable[..., Result]


@pytest.fixture
def merging_of(commands: CommandServer, case: dict[str, Path]) -> Merge:
    """Runs ``merge`` as a process of its own, which may get a signal after some seconds."""

    def run(out: Path, *, after: float | None = None, number: int = signal.SIGKILL, **env: str) -> Result:
        argv = (str(case["adapter"]), str(out), "--base", str(case["base"]))
        running = commands.start(*argv, env={"VERB": "merge", **env})
        if after is not None:
            time.sleep(after)
            os.kill(running.pid, number)
        return running.wait()

    return run


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base in several files, its adapter, and the merge that they give undisturbed."""
    base, adapter, out, _ = merged(lora("llama3", shards=3), tmp_path_factory.mktemp("killed"), "undisturbed")
    return {"base": base, "adapter": adapter, "out": out}


def seen(parent: Path) -> list[str]:
    """What a user sees of a directory: names that do not say of themselves that they are in the making."""
    return sorted(path.name for path in parent.iterdir() if not path.name.startswith("_staging."))


def assert_finished(out: Path, undisturbed: Path) -> None:
    assert manifest.verify(out) == []
    found, wanted = manifest.read(out), manifest.read(undisturbed)
    assert isinstance(found, manifest.Manifest) and isinstance(wanted, manifest.Manifest)
    assert found.tensors == wanted.tensors


def test_kills_at_random_moments(merging_of: Merge, case: dict[str, Path], tmp_path: Path) -> None:
    begun = time.monotonic()
    whole = merging_of(tmp_path / "whole")
    seconds = time.monotonic() - begun
    assert whole.code == 0, whole.stderr
    chooser = random.Random(7)
    killed = 0
    for number in range(4 * KILLS):
        out = tmp_path / f"out-{number}"
        answer = merging_of(out, after=chooser.uniform(0, 0.9 * seconds))
        killed += answer.code == -9
        assert answer.code in (-9, 0), answer.stderr
        if out.exists():
            assert_finished(out, case["out"])  # it was done before the kill
        if killed == KILLS:
            break
    assert killed == KILLS
    assert all(name.startswith(("out-", "whole")) for name in seen(tmp_path))
    last = merging_of(tmp_path / "last")
    assert last.code == 0, last.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("_")]  # the killed ones' are cleaned up
    assert_finished(tmp_path / "last", case["out"])


def test_sigterm_ends_it_in_one_line_and_removes_what_was_begun(merging_of: Merge, tmp_path: Path) -> None:
    for tries in range(1, 20):  # until it is neither too early for our handler nor too late
        answer = merging_of(tmp_path / "out", after=0.1 * tries, number=signal.SIGTERM)
        if answer.code == 130:
            break
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert answer.code == 130, answer.stderr
    assert answer.stderr.splitlines()[-1] == "hf-rocm-tune: interrupted: stopped by SIGTERM"
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_one_line_and_leaves_nothing(merging_of: Merge, tmp_path: Path) -> None:
    """The operating system refuses a write in the middle of a tensor."""
    answer = merging_of(tmp_path / "out", FILE_LIMIT=str(64 << 10))
    assert answer.code == 2, answer.stderr
    assert "cannot be written: File too large; nothing is left there" in answer.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_returns_other_bytes_is_found_before_the_rename(
    case: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = merging.save_file

    def save_and_harm(tensors: dict[str, Tensor], file: Path, **more: Any) -> None:
        stock(tensors, file, **more)
        raw = bytearray(file.read_bytes())
        raw[-7] ^= 1
        file.write_bytes(raw)

    monkeypatch.setattr(merging, "save_file", save_and_harm)
    with pytest.raises(CorruptionError, match="differs from what was written"):
        merging.merge(str(case["adapter"]), tmp_path / "out", base_name=str(case["base"]), say=lambda _: None)
    assert list(tmp_path.iterdir()) == []
