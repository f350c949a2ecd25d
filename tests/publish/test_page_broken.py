"""Reports of broken and half-written runs: what is missing or harmed is said, and never shown as good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.publish.history import LOG_NAME, REPORT_NAME, collect
from tests.publish.card_runs import RUN_ID, rows, write_run
from tests.publish.page_reader import check_harmless, page_of, run


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def nest(file: Path) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (REPORT_NAME, "no transfer report, so nothing is known of what was verified"),
        (LOG_NAME, "no log of the training, so there are no curves"),
        ("run.json", "no record of the run, so its settings are unknown"),
        ("integrity.json", "the run has not come to its end"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    directory = write_run(tmp_path / "run")
    (directory / name).unlink()
    assert run(capsys, "report", directory)[0] == 0
    content = (directory / "report.html").read_text()
    assert words in check_harmless(content).words
    assert '"verdict good"' not in content or name == "run.json"  # a missing proof is no proof


@pytest.mark.parametrize("harm", [truncate, nest, Path.unlink])
@pytest.mark.parametrize("name", [REPORT_NAME, LOG_NAME, "run.json", "integrity.json"])
def test_a_harmed_file_is_told_and_never_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], Any]
) -> None:
    directory = write_run(tmp_path / "run")
    harm(directory / name)
    left = collect(directory)
    assert [line for line in left.missing if name in line] or harm is Path.unlink
    seen = check_harmless(page_of(left))
    harmed = name if name != "run.json" else ""
    assert ("Verified" in seen.text) == (not harmed)


def test_a_killed_run_shows_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", finished=False)
    (directory / LOG_NAME).unlink()
    (directory / REPORT_NAME).unlink()
    for step in (2, 10, 4):
        checkpoint = directory / f"checkpoint-{step}"
        checkpoint.mkdir()
        state = {"global_step": step, "max_steps": 20, "log_history": [{"step": step, "loss": float(step)}]}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    left = collect(directory)
    assert (left.step, left.max_steps) == (10, 20)
    assert run(capsys, "report", directory)[0] == 0
    words = check_harmless((directory / "report.html").read_text()).words
    assert "10 of 20 steps" in words and "not come to its end" in words


def test_a_log_that_was_left_by_a_failure_and_a_checkpoint_after_it(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", finished=False)  # its log is of step 6
    for step, newest in ((4, 6), (8, 8)):
        checkpoint = directory / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
        left = collect(directory)
        assert left.step == newest
        assert left.trained["method"] == "LORA, r=16, alpha=32"  # known from the log in either case


def test_what_another_run_left_in_the_directory_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", finished=False)
    record = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**record, "run_id": "a-newer-run"}))
    left = collect(directory)
    assert (left.run_id, left.rows, left.report) == ("a-newer-run", [], {})
    assert len([line for line in left.missing if f"of another run, {RUN_ID}" in line]) == 2


def test_a_run_of_plain_trl_has_curves_and_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "trl"
    directory.mkdir()
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": 6, "log_history": rows()}))
    (directory / "adapter_config.json").write_text("{}")
    code, out, err = run(capsys, "report", directory)
    assert code == 0 and "loss.png" in out
    assert "unknown: Nothing is known of what was verified" in err


def test_a_result_that_was_changed_is_called_so(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "README.md").write_text("# edited\n")
    assert "Verified" in check_harmless(page_of(collect(directory))).text
    (directory / "adapter_config.json").write_text('{"r": 1}')
    seen = check_harmless(page_of(collect(directory)))
    assert "Wrong bytes" in seen.text and "The result is not what was written: adapter_config.json" in seen.words
