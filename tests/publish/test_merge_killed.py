"""A merge that is killed, stopped or out of room leaves nothing that looks finished, and the next one cleans up."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish import merge as merging
from hf_rocm_tune.publish.merge_command import MergeSettings
from tests.publish.merge_cases import load_base, logits, lora, merged, reference

KILLS = 8
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.publish.merge_killer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()

    def request(**wanted: Any) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(
            json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in wanted.items()}) + "\n"
        )
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    yield request
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


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


def test_kills_at_random_moments(ask: Ask, case: dict[str, Path], tmp_path: Path) -> None:
    whole = ask(**{**case, "out": tmp_path / "whole"})
    assert whole["code"] == 0, whole["stderr"]
    chooser = random.Random(7)
    killed = 0
    for number in range(KILLS):
        out = tmp_path / f"out-{number}"
        after = chooser.uniform(0, 1.05 * whole["seconds"])
        answer = ask(**{**case, "out": out}, kill_after=after)
        killed += answer["code"] == -9
        assert answer["code"] in (-9, 0), answer["stderr"]
        if out.exists():
            assert_finished(out, case["out"])  # it was done before the kill
    assert killed > KILLS // 2
    assert all(name.startswith(("out-", "whole")) for name in seen(tmp_path))
    last = ask(**{**case, "out": tmp_path / "last"})
    assert last["code"] == 0, last["stderr"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("_")]  # the killed ones' are cleaned up
    assert_finished(tmp_path / "last", case["out"])


def test_sigterm_ends_it_in_one_line_and_removes_what_was_begun(
    ask: Ask, case: dict[str, Path], tmp_path: Path
) -> None:
    for tries in range(1, 20):  # until it is neither too early for our handler nor too late
        answer = ask(**{**case, "out": tmp_path / "out"}, kill_after=0.1 * tries, term=True)
        if answer["code"] == 0:
            shutil.rmtree(tmp_path / "out")
        if answer["code"] == 130:
            break
    assert answer["code"] == 130, answer["stderr"]
    assert answer["stderr"].splitlines()[-1] == "hf-rocm-tune: interrupted: stopped by SIGTERM"
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_one_line_and_leaves_nothing(ask: Ask, case: dict[str, Path], tmp_path: Path) -> None:
    """Every file is limited to 64 KiB by the operating system, which refuses a write in the middle of a tensor."""
    answer = ask(**{**case, "out": tmp_path / "out"}, file_limit=64 << 10)
    assert answer["code"] == 2, answer["stderr"]
    assert "cannot be written: File too large; nothing is left there" in answer["stderr"].splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_returns_other_bytes_is_found_before_the_rename(
    case: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = merging.ShardWriter.finish

    def finish_and_harm(writer: merging.ShardWriter) -> None:
        stock(writer)
        file = writer._directory / writer.files[-1]
        raw = bytearray(file.read_bytes())
        raw[-7] ^= 1
        file.write_bytes(raw)

    monkeypatch.setattr(merging.ShardWriter, "finish", finish_and_harm)
    settings = MergeSettings(adapter=str(case["adapter"]), base=str(case["base"]), out=tmp_path / "out")
    with pytest.raises(CorruptionError, match="differs from what was written"):
        merging.merge(settings, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_may_be_there_already(case: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    merging.merge(
        MergeSettings(adapter=str(case["adapter"]), base=str(case["base"]), out=tmp_path / "out"), lambda _: None
    )
    assert seen(tmp_path) == ["out"]
    wanted = reference(case["base"], case["adapter"])[1]
    assert float((logits(load_base(tmp_path / "out")) - wanted).abs().max()) < 1e-5
