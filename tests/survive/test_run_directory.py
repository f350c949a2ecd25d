"""Attacks on the choice of what a start does: nothing is lost, nothing foreign is touched, the newest good one wins."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.run_directory import (
    StartPlan,
    deciding_settings,
    prepare_output_dir,
    read_record,
    skip_step,
)

SETTINGS = {"learning_rate": 2e-4, "seed": 1, "model_name_or_path": "some/model", "logging_steps": 5}


def _start(out: Path, settings: dict[str, Any] | None = None, **options: Any) -> StartPlan:
    """One start of a run that is killed right after it: the lock goes with the process."""
    plan = prepare_output_dir(out, settings or SETTINGS, **options)
    plan.lock.release()
    return plan


def _begin(out: Path, *steps: int, settings: dict[str, Any] | None = None) -> StartPlan:
    """A run in ``out`` that has written these checkpoints."""
    plan = _start(out, settings)
    plan.commit()
    for step in steps:
        _checkpoint(out / f"checkpoint-{step}", plan.run_id, step)
    return plan


def _checkpoint(path: Path, run_id: str, step: int, *, attested: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(os.urandom(64))
    (path / "trainer_state.json").write_text("{}")
    if attested:
        manifest.write(path, run_id=run_id, step=step, status="checkpoint")
    return path


def _finish(out: Path, plan: StartPlan) -> None:
    (out / "adapter_model.safetensors").write_bytes(b"result")
    (out / "README.md").write_text("card")
    files = ["adapter_model.safetensors", "README.md"]
    manifest.write(out, run_id=plan.run_id, step=9, status="final", files=files)


def test_a_new_directory_is_fresh_and_the_same_command_resumes_the_newest(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    first = _begin(out, 9, 10, 2)
    assert first.action == "fresh" and first.checkpoint is None
    again = _start(out)
    assert (again.action, again.run_id) == ("resume", first.run_id)
    assert again.checkpoint == out / "checkpoint-10", "10 comes after 9"
    assert again.notes == ()


def test_nothing_changes_before_commit(tmp_path: Path) -> None:
    _begin(tmp_path, 3)
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("damaged")
    before = sorted(path.name for path in tmp_path.iterdir())
    _start(tmp_path)
    _start(tmp_path, {**SETTINGS, "seed": 2}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_damaged_checkpoints_are_named_set_aside_and_passed_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _begin(out, 1, 2, 3)
    (out / "checkpoint-2" / "adapter_model.safetensors").write_bytes(b"flipped")
    (out / "checkpoint-3" / manifest.MANIFEST_NAME).write_text('{"schema": 1')
    plan = _start(out)
    assert plan.action == "resume" and plan.checkpoint == out / "checkpoint-1"
    assert [note.split()[0] for note in plan.notes[:2]] == ["checkpoint-3", "checkpoint-2"]
    assert "integrity.json" in plan.notes[0] and "adapter_model.safetensors" in plan.notes[1]
    (out / "checkpoint-1" / "trainer_state.json").unlink()
    assert (last := _start(out)).action == "fresh" and "starting at step 0" in last.notes[-1]
    plan.commit()
    assert {"damaged-checkpoint-2", "damaged-checkpoint-3"} <= {path.name for path in out.iterdir()}
    assert not (out / "checkpoint-3").exists()


def test_a_finished_run_is_finished_until_its_result_is_damaged(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = _begin(out, 4)
    _finish(out, first)
    assert _start(out).action == "finished"
    (out / "README.md").write_text("my own words")
    assert _start(out).action == "finished"
    (out / "adapter_model.safetensors").write_bytes(b"resulT")
    plan = _start(out)
    assert plan.action == "resume" and plan.checkpoint == out / "checkpoint-4" and "trained again" in plan.notes[0]
    plan.commit()
    record = read_record(out)
    assert record is not None and not (out / manifest.MANIFEST_NAME).exists()


def test_another_run_is_refused_with_the_settings_that_differ(tmp_path: Path) -> None:
    _begin(tmp_path, 1)
    with pytest.raises(UsageError, match=r"in learning_rate 0\.0002 -> 0\.1, seed 1 -> None: .*delete that run$"):
        _start(tmp_path, {"learning_rate": 0.1, "model_name_or_path": "some/model"})
    assert (tmp_path / "checkpoint-1").is_dir()


def test_a_run_is_known_by_the_content_of_its_files_and_not_by_their_place(tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    for place in (data, tmp_path / "elsewhere"):
        (place / "sub").mkdir(parents=True)
        (place / "sub" / "train.jsonl").write_text("rows")
    (data / ".cache").write_text("x")
    _begin(out, 1, settings={**SETTINGS, "dataset_name": str(data)})
    assert _start(out, {**SETTINGS, "dataset_name": str(tmp_path / "elsewhere")}).action == "resume"
    (tmp_path / "elsewhere" / "sub" / "train.jsonl").write_text("Rows")
    with pytest.raises(UsageError, match=r"differs in the content of dataset_name: .*to go on from there.* restore it"):
        _start(out, {**SETTINGS, "dataset_name": str(tmp_path / "elsewhere")})


CONSTANT = {"lr_scheduler_type": "constant"}
WARMED = {"lr_scheduler_type": "constant_with_warmup"}
NOT = [{**WARMED, "warmup_steps": 0.1}, {"lr_scheduler_type": "linear"}, {**CONSTANT, "grad_compression": "powersgd"}]


def test_a_finished_run_is_extended_where_its_learning_rate_allows(tmp_path: Path) -> None:
    for number, schedule in enumerate((CONSTANT, {**WARMED, "warmup_steps": 5}, *NOT)):
        out, settings = tmp_path / str(number), {**SETTINGS, **schedule, "max_steps": 4, "num_train_epochs": 3.0}
        first, longer = _begin(out, 4, settings=settings), {**settings, "max_steps": 8}
        _finish(out, first)
        if schedule in NOT:
            with pytest.raises(UsageError, match=r"in max_steps 4 -> 8: .*--resume_from_checkpoint .*checkpoint-4"):
                _start(out, longer)
            continue
        for other in ({"max_steps": 2}, {"max_steps": -1}, {"seed": 2}):
            with pytest.raises(UsageError, match="another run"):
                _start(out, {**longer, **other})
        plan = _start(out, longer)
        assert (plan.action, plan.checkpoint, plan.run_id) == ("resume", out / "checkpoint-4", first.run_id)
        assert plan.notes == ("the run is extended: max_steps 4 -> 8",)
        plan.commit()
        assert _start(out, longer).notes == () and not (out / manifest.MANIFEST_NAME).exists()


def test_what_is_only_shown_or_kept_may_change_and_secrets_are_not_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    secret = {"hub_token": "hf_secret", "model_init_kwargs": {"token": "hf_secret", "x": 1}, "nan": float("nan")}
    _begin(out, 1, settings={**SETTINGS, **secret})
    assert "hf_secret" not in (out / "run.json").read_text()
    other = {"logging_steps": 1, "report_to": "wandb", "output_dir": "x", "save_steps": 7, "verify": "off"}
    assert _start(out, {**SETTINGS, **secret, **other, "push_to_hub": True}).action == "resume"
    assert deciding_settings({"a": (1, 2), "b": {1: {2}}}) == {"a": [1, 2], "b": {"1": [2]}}
    assert deciding_settings({"a": 1}) != deciding_settings({"a": "1"})
    assert deciding_settings({"packing": True, "dataset_num_proc": 2}) == {"packing": True, "dataset_num_proc": 2}
    assert deciding_settings({"packing": False, "dataset_num_proc": 2}) == {"packing": False}


def test_a_record_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", '{"schema": 1}', "\0", '{"schema": 1, "run_id": []}', "[" * 9999):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UsageError, match=r"run\.json cannot be read .* move that file elsewhere"):
            _start(tmp_path, overwrite=True)
        assert (tmp_path / "run.json").read_text() == content


def test_what_a_run_reads_is_not_where_it_writes(tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    _begin(out, 1)
    (data / "train").mkdir(parents=True)
    (out / "rows.jsonl").write_text("{}")
    for reads in (
        {"model_name_or_path": str(out)},
        {"model_name_or_path": str(out / "checkpoint-1")},
        {"adapter_name_or_path": str(out / "checkpoint-1")},
        {"dataset_name": str(out / "rows.jsonl")},
        {"datasets": [{"path": "json", "data_files": {"train": [str(data), str(out / "rows.jsonl")]}}]},
        {"datasets": [{"path": str(out)}]},
    ):
        with pytest.raises(UsageError, match=f"lies in --output_dir {out}, where a run replaces"):
            _start(out, {**SETTINGS, **reads}, overwrite=True)
    for reads in (
        {"dataset_name": str(data)},
        {"datasets": [{"path": str(tmp_path)}]},
    ):
        with pytest.raises(UsageError, match="would be read as data when it resumes"):
            _start(data / "train" / "out", {**SETTINGS, **reads}, overwrite=True)
    assert not (data / "train" / "out").exists()


def test_overwriting_never_deletes_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _begin(out, 1)
    with pytest.raises(UsageError, match="would delete --resume_from_checkpoint"):
        _start(out, resume=str(out / "checkpoint-1"), overwrite=True)
    with pytest.raises(UsageError, match="would delete --resume_from_checkpoint true"):
        _start(out, resume=True, overwrite=True)
    assert _start(out, {**SETTINGS, "prompt": "x" * 9000, "dir": "\0"}, overwrite=True).action == "fresh"


def test_a_restart_by_the_launcher_does_not_overwrite_its_own_progress(tmp_path: Path) -> None:
    _begin(tmp_path, 3)
    assert _start(tmp_path, overwrite=True, restarted=True).checkpoint == tmp_path / "checkpoint-3"


def test_named_checkpoints(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    _begin(other, 1, 2)
    plan = _start(out, resume=str(other / "checkpoint-1"))
    assert plan.action == "resume" and plan.checkpoint == other / "checkpoint-1" and plan.notes == ()
    for wrong in ("", "/nowhere", "/checkpoint-1/adapter_model.safetensors"):
        with pytest.raises(UsageError, match="there is no checkpoint"):
            _start(out, resume=str(other) + wrong)
    with pytest.raises(UsageError, match=r"did you mean .*checkpoint-2\?"):
        _start(out, resume=str(other))
    with pytest.raises(UsageError, match="holds no intact checkpoint of this run"):
        _start(out, resume=True)
    (other / "checkpoint-1" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors is truncated"):
        _start(out, resume=str(other / "checkpoint-1"))


def test_a_checkpoint_without_a_manifest_counts_only_when_named(tmp_path: Path) -> None:
    plain = _checkpoint(tmp_path / "trl" / "checkpoint-8", "", 8, attested=False)
    with pytest.raises(UsageError, match=r"no run of hf-rocm-tune has written .*\(checkpoint-8\)"):
        _start(tmp_path / "trl")
    with pytest.raises(UsageError, match="is not empty"):
        _start(tmp_path / "trl", resume=str(plain))
    plan = _start(tmp_path / "new", resume=str(plain))
    assert plan.action == "resume" and "not attested" in plan.notes[0]
    run = _begin(tmp_path / "out", 5)
    _checkpoint(tmp_path / "out" / "checkpoint-6", run.run_id, 6, attested=False)
    _checkpoint(tmp_path / "out" / "checkpoint-7", "someone-else", 7)
    plan = _start(tmp_path / "out")
    assert plan.checkpoint == tmp_path / "out" / "checkpoint-5"
    assert "belongs to another run" in plan.notes[0] and "not attested" in plan.notes[1]


def test_unusable_directories_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere/out"), tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot be written") as caught:
            _start(path)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


_HOLD = """
import os, sys, time
from hf_rocm_tune.survive.run_directory import prepare_output_dir
plan = prepare_output_dir(sys.argv[1], {"seed": 1})
worker = os.fork()
if worker:
    print(worker, flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_dead_although_a_forked_worker_lives(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    worker = first.stdout.readline()
    try:
        with pytest.raises(UsageError, match=f"in use by process {first.pid} on "):
            _start(tmp_path, {"seed": 1})
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert _start(tmp_path, {"seed": 1}).action == "fresh"
    finally:
        first.kill()
        os.kill(int(worker), signal.SIGKILL)
        first.communicate()


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "pipe", "text"])
def test_the_lock_is_never_somebody_elses_file(tmp_path: Path, kind: str) -> None:
    thesis, lock = tmp_path / "thesis.tex", tmp_path / "out" / "_run.lock"
    lock.parent.mkdir()
    thesis.write_text("three years of work")
    if kind in ("link", "dangling"):
        lock.symlink_to(thesis if kind == "link" else tmp_path / "nothing")
    elif kind == "hard link":
        lock.hardlink_to(thesis)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.write_text("three years of work")
    with pytest.raises(UsageError, match=r"_run\.lock"):
        _start(lock.parent)
    assert thesis.read_text() == "three years of work" and os.listdir(lock.parent) == ["_run.lock"]


def test_a_plan_can_be_sent_to_other_ranks(tmp_path: Path) -> None:
    plan = prepare_output_dir(tmp_path, SETTINGS)
    copy = pickle.loads(pickle.dumps(plan))
    copy.lock.release()
    assert (tmp_path / "_run.lock").exists(), "only the holder releases it"
    assert (copy.run_id, copy.action, copy.checkpoint) == (plan.run_id, plan.action, plan.checkpoint)
    plan.close()
    assert list(tmp_path.iterdir()) == []


# ---- started again by the supervisor: what was overwritten or named before stays as it is now ------------------


def test_a_directory_is_overwritten_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    earlier = _start(out)
    earlier.commit()
    _checkpoint(out / "checkpoint-8", earlier.run_id, 8)
    first = _start(out, overwrite=True)
    assert first.action == "fresh" and first.overwritten
    # it died before it began: what is there is still the earlier run, and the wish still stands
    assert _start(out, overwrite=True).action == "fresh"
    first.commit()
    assert not (out / "checkpoint-8").exists()
    _checkpoint(out / "checkpoint-2", first.run_id, 2)
    again = _start(out, overwrite=True, restart_of=first.run_id)
    assert (again.action, again.checkpoint, again.overwritten) == ("resume", out / "checkpoint-2", ())
    assert again.run_id == first.run_id


def test_a_checkpoint_that_is_named_is_where_it_began_and_not_where_it_goes_on(tmp_path: Path) -> None:
    out, other = tmp_path / "out", _checkpoint(tmp_path / "other" / "checkpoint-50", "other", 50)
    first = _start(out, resume=str(other))
    assert first.checkpoint == other
    first.commit()
    again = {"resume": str(other), "restart_of": first.run_id}
    assert _start(out, **again).checkpoint == other, "nothing newer is there yet"
    _checkpoint(out / "checkpoint-60", first.run_id, 60)
    assert _start(out, **again).checkpoint == out / "checkpoint-60"


def test_a_step_that_is_left_out_stays_so_in_this_run_and_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = _start(out)
    first.commit()
    for step in (7, 3, 7):
        skip_step(out, step)
    again = _start(out)
    again.commit()
    record = read_record(out)
    assert record is not None and record.skipped_steps == again.record.skipped_steps == (3, 7)
    assert record.run_id == first.run_id and record.settings == first.record.settings, "it is the same run"
    assert any("steps 3, 7" in note for note in again.notes)
    assert _start(out, overwrite=True).record.skipped_steps == (), "another run leaves nothing out"


@pytest.mark.parametrize("name", ["rows.jsonl", "adapter.safetensors"])
def test_a_large_file_that_changes_in_its_middle_is_another_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "read"
    folder.mkdir()
    with (folder / name).open("wb") as file:
        file.truncate(100 << 20)
    settings = {"dataset_name": str(folder)} if name.endswith("jsonl") else {"adapter_name_or_path": str(folder)}
    before = deciding_settings(settings)
    assert deciding_settings(settings) == before
    with (folder / name).open("r+b") as file:
        file.seek(50 << 20)
        file.write(b"x")
    assert deciding_settings(settings) != before
