"""The report of a run: true, self-contained, harmless whatever the run's files hold, and there for broken runs too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rocm_tune.doctor.findings import link_of
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish import page
from hf_rocm_tune.publish.history import Left, collect
from tests.publish.card_runs import RUN_ID, incident, report, rows, stage, write_run
from tests.publish.page_reader import check_harmless, page_of, run

HOSTILE = "\"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>'&amp;\x00\x1b[31m\ud800"


# ---- a whole run --------------------------------------------------------------------------------------------


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finding = {
        "check": "pcie",
        "status": "warn",
        "title": "The link is narrow",
        "text": "x4",
        "evidence": ["current_link_width 4"],
        "cure": "use the other slot",
        "sources": ["ROCm/ROCm#6603", "general knowledge"],
        "subject": "0000:03:00.0",
    }
    telemetry = {
        "rank": 0,
        "source": "amdgpu",
        "hotspot_c": {"mean": 90.5, "max": 97.0},
        "torch_peak_allocated_gib": 12.3,
    }
    directory = write_run(
        tmp_path / "run",
        batches=stage(mismatches=1, recovered=1),
        incidents=[incident()],
        findings=[finding, {**finding, "status": "ok", "title": "All is well"}],
        telemetry=[telemetry],
        fault_injection={"kind": "zero", "injected": 1},
    )
    (directory / "survival.jsonl").write_text(
        json.dumps({"run_id": RUN_ID, "time": "2026-01-01T00:00:00+00:00", "event": "start"})
        + "\n{torn\n"
        + json.dumps({"run_id": "another", "event": "start", "time": "never"})
    )
    code, out, err = run(capsys, "report", directory)
    assert code == 0
    names = ["loss", "learning_rate"]
    written = [directory / "report.html", *(directory / "report_plots" / f"{name}.png" for name in names)]
    assert out.splitlines() == [str(file) for file in written]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written[1:])
    seen = check_harmless(written[0].read_text(encoding="utf-8"))
    for words in (
        "100 % of the bytes on the device were verified. Something was wrong once, was noticed, and was recovered",
        "Faults were injected on request: kind=zero, injected=1.",
        "1,024 bytes from byte 64",
        "fresh slot",
        "fresh mapping visible late",
        "The link is narrow (0000:03:00.0)",
        "use the other slot",
        "current_link_width 4",
        "2026-01-01T00:00:00+00:00",
        "AMD Radeon RX 7900 XT",
        "19.98 GiB",
        "hotspot c 90.5 97",
        "LORA, r=16, alpha=32",
        "effective_batch_size 16",
        "torch 2.13.0",
    ):
        assert words in seen.words, words
    assert "never" not in seen.words  # another run's journal
    assert link_of("ROCm/ROCm#6603") in [dict(a).get("href") for n, a in seen.tags if n == "a"]
    assert [dict(a).get("open") for n, a in seen.tags if n == "details"][:2] == ["", None]
    assert err.startswith("hf-rocm-tune: ") and "recovered before it was used" in err
    assert manifest.inspect(directory).problems == []


def test_the_page_goes_where_it_is_told_and_the_run_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert run(capsys, "report", directory, "--out", tmp_path / "a page.htm")[0] == 0
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a page.htm", "a page_plots", "run"]


def test_no_path_user_or_secret_gets_onto_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_" + "s" * 34
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("USER", "gudrun")
    private = f"{tmp_path}/gudrun/model of gudrun at {secret}"
    directory = write_run(tmp_path / "run", incidents=[incident(source=private)], findings=[{"text": private}])
    record = json.loads((directory / "run.json").read_text())
    record["settings"] = {"model_name_or_path": f"{tmp_path}/gudrun/base", "dataset": [{"path": private}]}
    (directory / "run.json").write_text(json.dumps(record))
    assert run(capsys, "report", directory)[0] == 0
    content = (directory / "report.html").read_text()
    for word in (str(tmp_path), "gudrun", secret):
        assert word not in content


# ---- hostile content ----------------------------------------------------------------------------------------


def spoiled(value: Any) -> Any:
    """A JSON value with every string, keys included, replaced by something that would break a careless page."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, dict):
        return {key: spoiled(one) for key, one in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    return value


def test_hostile_strings_everywhere_stay_text(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", incidents=[incident()], findings=[{"title": "x", "evidence": ["x"]}])
    left = collect(directory)
    worst = Left(
        directory=directory,
        run_id=HOSTILE,
        rows=[*rows(), {HOSTILE: 1.0, "step": 1, f"eval_{HOSTILE}_loss": 2.0}],
        step=1,
        trained=spoiled(left.trained),
        report=spoiled(
            report(incidents=[incident(), "x"], findings=[{"sources": ["x"], "cure": "x", "status": "fail"}])
        ),
        settings=spoiled(left.settings),
        journal=[spoiled({"time": "x", "event": "y"})],
        inspection=left.inspection,
        missing=[HOSTILE],
    )
    for link in (link_of, lambda _: "javascript:alert(1)", lambda _: 'https://x.example/"><script>'):
        check_harmless(page_of(worst, link=link))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("<script>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_report_of_any_form_gives_a_page(data: st.DataObject) -> None:
    whole = report(incidents=[incident()], telemetry=[{"rank": 0}], findings=[{"title": "x"}])
    for key in data.draw(st.lists(st.sampled_from(sorted(whole)), max_size=6)):
        inside = isinstance(whole[key], dict) and whole[key] and data.draw(st.booleans())
        if inside:
            whole[key] = {**whole[key], data.draw(st.sampled_from(sorted(whole[key]))): data.draw(JSON)}
        else:
            whole[key] = data.draw(JSON)
    left = Left(
        directory=Path("run"),
        rows=[{"step": 1, "loss": 1.0}, data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3))],
        report=whole,
        settings=data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        trained=data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        inspection=manifest.Inspection(problems=[], unlisted=[], manifest=None),
    )
    check_harmless(page.build(left, [], title="a run"))


# ---- nonsense -----------------------------------------------------------------------------------------------


def nonsense(tmp_path: Path) -> dict[str, list[object]]:
    """Command lines by what is wrong with them."""
    whole = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (tmp_path / "file").touch()
    return {
        "the following arguments are required: DIR": [],
        "does not exist": [tmp_path / "nowhere"],
        "is a file": [tmp_path / "file"],
        "empty holds nothing that a training run leaves": [tmp_path / "empty"],
        "photos holds nothing that a training run leaves": [tmp_path / "photos"],
        "does not exist: ": ["nul\0byte"],
        "xxx does not exist": ["x" * 5000],
        "is a directory; name the file": [whole, "--out", tmp_path],
        "there is no directory": [whole, "--out", tmp_path / "no" / "page.html"],
        "unrecognized arguments: --nonsense": [whole, "--nonsense"],
        "cannot be written: File name too long": [whole, "--out", tmp_path / f"{'x' * 252}.htm"],
        "there is no directory ": [whole, "--out", tmp_path / "file" / "page.html"],
    }


def test_nonsense_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, argv in nonsense(tmp_path).items():
        code, out, err = run(capsys, "report", *argv)
        assert (code, out) == (2, ""), (words, err)
        assert words in err and err.startswith("hf-rocm-tune: error: ") and len(err.splitlines()) == 1, err
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_half_written_page_never_takes_the_place_of_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run")
    assert run(capsys, "report", directory)[0] == 0
    whole = (directory / "report.html").read_bytes()
    shutil.rmtree(directory / "report_plots")
    (directory / "report_plots").touch()  # the pictures cannot be written
    assert run(capsys, "report", directory)[0] == 2
    assert (directory / "report.html").read_bytes() == whole


def test_settings_that_stop_matplotlib_are_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune", "report", str(write_run(tmp_path / "run"))],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "of nobody"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "matplotlib does not start" in done.stderr and "mend MPLBACKEND or matplotlibrc" in done.stderr
