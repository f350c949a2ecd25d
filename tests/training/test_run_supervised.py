"""A restart by the supervisor is no new wish of the user: what was overwritten or named before stays as it is now."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.training import supervised
from hf_rocm_tune.training.run import Plan, prepare_output_dir, read_record, skip_step

SETTINGS = {"learning_rate": 2e-4, "seed": 1}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The supervisor's directory."""
    (tmp_path / "supervisor").mkdir()
    monkeypatch.setenv(supervised.VARIABLE, str(tmp_path / "supervisor"))
    return tmp_path / "supervisor"


def start(out: Path, **options: Any) -> Plan:
    plan = prepare_output_dir(out, SETTINGS, **options)
    plan.lock.release()
    return plan


def began(told: Path, plan: Plan) -> None:
    """The run began, and its supervisor starts it once more."""
    plan.commit()
    supervised.tell_begun(run_id=plan.run_id, output_dir=plan.directory, resumed_from=None)
    (told / supervised.BEGUN_FILE).replace(told / supervised.EARLIER_FILE)


def checkpoint(path: Path, run_id: str, step: int) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(os.urandom(64))
    (path / "trainer_state.json").write_text("{}")
    manifest.write(path, run_id=run_id, step=step, status="checkpoint")
    return path


def test_a_directory_is_overwritten_once(tmp_path: Path, told: Path) -> None:
    out = tmp_path / "out"
    earlier = start(out)
    earlier.commit()
    checkpoint(out / "checkpoint-8", earlier.run_id, 8)
    first = start(out, overwrite=True)
    assert first.action == "fresh" and first.overwritten
    # it died before it began: what is there is still the earlier run, and the wish still stands
    assert start(out, overwrite=True).action == "fresh"
    began(told, first)
    assert not (out / "checkpoint-8").exists()
    checkpoint(out / "checkpoint-2", first.run_id, 2)
    again = start(out, overwrite=True)
    assert (again.action, again.checkpoint, again.overwritten) == ("resume", out / "checkpoint-2", ())
    assert again.run_id == first.run_id


def test_a_checkpoint_that_is_named_is_where_it_began_and_not_where_it_goes_on(tmp_path: Path, told: Path) -> None:
    out, other = tmp_path / "out", checkpoint(tmp_path / "other" / "checkpoint-50", "other", 50)
    first = start(out, resume=str(other))
    assert first.checkpoint == other
    began(told, first)
    assert start(out, resume=str(other)).checkpoint == other, "nothing newer is there yet"
    checkpoint(out / "checkpoint-60", first.run_id, 60)
    assert start(out, resume=str(other)).checkpoint == out / "checkpoint-60"


def test_without_a_supervisor_what_is_named_counts(tmp_path: Path) -> None:
    out, other = tmp_path / "out", checkpoint(tmp_path / "other" / "checkpoint-50", "other", 50)
    first = start(out, resume=str(other))
    first.commit()
    checkpoint(out / "checkpoint-60", first.run_id, 60)
    assert start(out, resume=str(other)).checkpoint == other


def test_a_step_that_is_left_out_stays_so_in_this_run_and_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"no run\.json"):
        skip_step(tmp_path, 3)
    first = start(out)
    first.commit()
    for step in (7, 3, 7):
        skip_step(out, step)
    again = start(out)
    again.commit()
    record = read_record(out)
    assert record is not None and record.skipped_steps == again.record.skipped_steps == (3, 7)
    assert record.run_id == first.run_id and record.fingerprint == first.record.fingerprint, "it is the same run"
    assert any("steps 3, 7" in note for note in again.notes)
    assert start(out, overwrite=True).record.skipped_steps == (), "another run leaves nothing out"


@pytest.mark.parametrize("steps", ["3", ["x"], 3, None])
def test_nonsense_in_the_steps_to_leave_out_is_refused(tmp_path: Path, steps: Any) -> None:
    start(tmp_path / "out").commit()
    file = tmp_path / "out" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"skipped_steps": steps}))
    if steps == "3":
        assert start(tmp_path / "out").record.skipped_steps == (3,)
        return
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        start(tmp_path / "out")
