"""A merge that is killed, stopped or out of room leaves nothing that looks finished, and the next one cleans up."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_rocm_tune import cli
from hf_rocm_tune.publish.generate import Settings, loaded_model
from hf_rocm_tune.publish.merge import merge
from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e import probe
from tests.e2e.command import CommandServer, Result
from tests.publish.merge_cases import load_base, logits, lora, merged, reference

KILLS = 6
Merge = Callable[..., Result]


@pytest.fixture
def merging_of(server: CommandServer, case: dict[str, Path]) -> Merge:
    """Runs ``merge`` as a process of its own, which may get a signal after some seconds."""

    def run(out: Path, *, after: float | None = None, number: int = signal.SIGKILL, **env: str) -> Result:
        argv = (str(case["adapter"]), str(out), "--base", str(case["base"]))
        running = server.start(*argv, env={"VERB": "merge", **env})
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
    line = answer.stderr.splitlines()[-1]
    assert (
        "cannot be written: " in line and "File too large" in line and "nothing is left there: free some space" in line
    )
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_does_not_fit_into_memory_is_merged_from_disk(
    case: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    said: list[str] = []
    merge(str(case["adapter"]), tmp_path / "out", base_name=str(case["base"]), say=said.append)
    assert any("it stands on disk meanwhile" in line for line in said)
    assert_finished(tmp_path / "out", case["out"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- from a real 4-bit run to the merged model and to answers -----------------------------------------------


@pytest.fixture(scope="module")
def run(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished QLoRA run that went far from its start, its base named by a relative path; ``live``: its logits."""
    scratch = tmp_path_factory.mktemp("run")
    project = scratch / "project"
    base = tiny.build("llama3", project / "models")
    data = tiny.write_messages_jsonl(scratch / "data" / "train.jsonl", 16)
    done = server.run(
        *(
            "--model_name_or_path",
            str(base.relative_to(project)),
            "--dataset_name",
            str(data),
            "--output_dir",
            str(scratch / "out"),
        ),
        *("--load_in_4bit", "true", "--max_steps", "3", "--learning_rate", "0.03", "--max_length", "64"),
        *("--lora_dropout", "0", "--disable_tqdm", "true", "--per_device_train_batch_size", "2"),
        env={"DUMP_LOGITS": str(scratch / "live.pt")},
        cwd=project,
    )
    assert done.code == 0, done.stderr
    return {"base": base, "out": scratch / "out", "live": scratch / "live.pt", "data": data}


def test_a_4bit_run_is_merged_into_the_original_weights(
    run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["merge", str(run["out"]), str(tmp_path / "merged")]) == 0  # the run says which base
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'merged'}\n"
    assert "trained on 4-bit weights and is merged into the original ones" in printed.err
    assert "equal to its manifest" in printed.err
    alone, wanted = reference(run["base"], run["out"])
    found = logits(load_base(tmp_path / "merged"))
    assert float((found - wanted).abs().max()) < 1e-5 < 0.02 < float((wanted - alone).abs().max())
    sealed = manifest.inspect(tmp_path / "merged")
    assert sealed.manifest is not None and not sealed.problems
    assert sealed.manifest.run_id == json.loads((run["out"] / "run.json").read_text())["run_id"]
    assert sealed.manifest.extra["merged"]["trained_in_bits"] == 4


def test_loaded_in_4_bit_the_model_is_the_one_that_was_trained(run: dict[str, Path]) -> None:
    lines: list[str] = []
    with loaded_model(Settings(model=str(run["out"]), load_in_4bit=True), lines.append) as loaded:
        assert torch.equal(probe.logits(loaded.model), torch.load(run["live"]))
        assert loaded.covered.verified_bytes == loaded.covered.device_bytes > 0
    assert any("100 % of the bytes on the device verified" in line for line in lines)


def test_loaded_as_it_is_the_difference_is_said(run: dict[str, Path]) -> None:
    lines: list[str] = []
    with loaded_model(Settings(model=str(run["out"])), lines.append) as loaded:
        wanted = reference(run["base"], run["out"])[1]
        assert float((logits(loaded.model) - wanted).abs().max()) < 1e-5
    assert any("--load_in_4bit" in line for line in lines)


def test_a_run_whose_adapter_was_changed_is_not_used(
    run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run["out"], tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 64
    file.write_bytes(raw)
    for argv in (
        ["merge", str(tmp_path / "changed"), str(tmp_path / "merged")],
        ["generate", str(tmp_path / "changed"), "--prompt", "x"],
    ):
        assert cli.main(argv) == 2
        assert "adapter_model.safetensors is changed" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
