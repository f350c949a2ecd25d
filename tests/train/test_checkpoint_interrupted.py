"""Saves that are cut short: full disks, other failures and kills never cost the checkpoint before."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import clean_leftovers
from hf_rocm_tune.survive.checkpoint import StagedSave
from tests.train.trainers import Make, VerifiedPlain, names, two_ranks


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_every_writer_s_way_of_reporting_a_full_disk_is_understood(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("no permission to mount a small disk (user namespaces are off)")
    child = os.fork()
    if child == 0:
        _fill_a_small_disk(tmp_path / "disk", tmp_path / "said")
    assert os.waitpid(child, 0)[1] == 0, (tmp_path / "said").read_text()


def _fill_a_small_disk(disk: Path, said: Path) -> None:
    """In a namespace of this process alone: never returns."""
    big = torch.zeros(2_000_000)
    writers: tuple[Callable[[Path], Any], ...] = (
        lambda path: torch.save(big, path),
        lambda path: save_file({"a": big}, path),
        lambda path: path.write_bytes(bytes(8 << 20)),
    )
    code, ids = 1, {"uid": os.getuid(), "gid": os.getgid()}
    try:
        ctypes.CDLL(None).unshare(0x10000000 | 0x00020000)  # CLONE_NEWUSER, CLONE_NEWNS
        Path("/proc/self/setgroups").write_text("deny")
        for kind, outside in ids.items():
            Path(f"/proc/self/{kind}_map").write_text(f"0 {outside} 1")
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "small", disk], check=True)
        for write in writers:
            stage = StagedSave(root=disk, need_bytes=8_000_000)
            stage.attempt(write, disk / "file")
            assert stage.is_full(), repr(stage.failure)
            (disk / "file").unlink(missing_ok=True)
            stage.drop(first=True)
            other = StagedSave(root=disk, need_bytes=2_000_000, failure=RuntimeError("other"))
            assert not other.is_full(), "the space was not given back"
        code = 0
    except BaseException:
        said.write_text(traceback.format_exc())
    finally:
        os._exit(code)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_kills_during_training_always_leave_a_checkpoint_to_resume_from(saver: Make, tmp_path: Path) -> None:
    out, newest = tmp_path / "out", 0
    for die_at in (60, 4, 21, 33, 38):  # the first one past the first checkpoint; one save makes about 35 calls
        child = os.fork()
        if child == 0:
            _train_until_killed(saver, out, newest, die_at)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        clean_leftovers(out)
        left = names(out)
        assert all(manifest.verify(out / name) == [] for name in left), left
        assert not (out / manifest.MANIFEST_NAME).exists()
        reached = max(int(name.removeprefix("checkpoint-")) for name in left)
        assert reached >= newest, "an interrupted save lost the checkpoint before it"
        newest = reached
    assert newest > 1


def _train_until_killed(saver: Make, out: Path, newest: int, die_at: int) -> None:
    """Train with one checkpoint kept, and die at the n-th flush or rename of the saves: never returns."""
    try:
        calls = [0]
        for name in ("fsync", "rename", "replace"):
            setattr(os, name, _counting(getattr(os, name), calls, die_at))
        trainer = saver(save_steps=1, max_steps=40, save_total_limit=1)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{newest}") if newest else None)
    finally:
        os._exit(1)


def _counting(call: Callable[..., Any], calls: list[int], die_at: int) -> Callable[..., Any]:
    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)

    return counted


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_two_ranks_save_together_and_survive_a_full_disk_on_either(model_path: Path, tmp_path: Path) -> None:
    said = two_ranks(lambda rank: _save_with_full_disks(rank, model_path, tmp_path), tmp_path)
    assert said[0].count("was not saved") == 2 and said[1].count("was not saved") == 0
    out = tmp_path / "out"
    assert names(out) == ["checkpoint-1", "checkpoint-4"]
    for path in (out, out / "checkpoint-1", out / "checkpoint-4"):
        found = manifest.inspect(path)
        assert found.problems == [] and found.manifest is not None and found.manifest.run_id == "run-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in (out / "checkpoint-4").iterdir()}
    assert "staging" not in (out / "checkpoint-4" / "trainer_state.json").read_text()


def _save_with_full_disks(rank: int, model_path: Path, tmp_path: Path) -> None:
    """One rank of a CPU job whose disk is full on rank 0 at step 2 and on rank 1 at step 3."""
    rows = [{"input_ids": [5, 6, 7, 8 + n], "labels": [5, 6, 7, 8 + n]} for n in range(16)]
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, save_steps=1, eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=1, load_best_model_at_end=True, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    assert args.world_size == 2
    model = AutoModelForCausalLM.from_pretrained(model_path)
    trainer = VerifiedPlain(model=model, args=args, train_dataset=rows, eval_dataset=rows, run_id="run-2")
    _full_disk(setattr, "model", lambda: rank == 0 and trainer.state.global_step == 2)
    _full_disk(setattr, "rng_state_1.pth", lambda: rank == 1 and trainer.state.global_step == 3)
    trainer.train()
    trainer.save_model()


def _full_disk(patch: Callable[..., None], file: str, when: Callable[[], bool]) -> None:
    """From now on the disk is full for ``file`` whenever that holds."""
    honest_save, honest_model = torch.save, Trainer._save

    def save(state: Any, target: Any, **keywords: Any) -> None:
        if Path(str(target)).name == file and when():
            raise OSError(errno.ENOSPC, "No space left on device")
        honest_save(state, target, **keywords)

    @functools.wraps(honest_model)
    def save_model(self: Any, *arguments: Any, **keywords: Any) -> None:
        if file == "model" and when():
            raise OSError(errno.ENOSPC, "No space left on device")
        honest_model(self, *arguments, **keywords)

    patch(torch, "save", save)
    patch(Trainer, "_save", save_model)
