"""The report of a run: true, self-contained, harmless whatever the run's files hold, and there for broken runs too."""

from __future__ import annotations

import json
import math
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rocm_tune import cli
from hf_rocm_tune.machine.sources import link_of
from hf_rocm_tune.publish import page
from hf_rocm_tune.publish.history import LOG_NAME, REPORT_NAME, Run, collect
from hf_rocm_tune.publish.page import loss_panel, panels, write_png
from hf_rocm_tune.publish.training_log import last, series
from tests.publish.run_files import RUN_ID, incident, report, rows, spoiled, stage, write_run

DATA = {"split": "train", "rows": 300, "tokens": 41230, "median": 132, "p95": 201, "longest": 412, "cut": 12}
DATA |= {"lost": 903, "dropped": 2, "trained": 20100, "kept": 40327}
FINDING = {"source": "x", "fix": "x", "status": "fail"}
HOSTILE = "\"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>'&amp;\x00\x1b[31m\ud800"


# ---- a whole run --------------------------------------------------------------------------------------------


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finding = {
        "check": "pcie",
        "status": "warn",
        "title": "The link is narrow",
        "text": "x4",
        "read": ["current_link_width 4"],
        "fix": "use the other slot",
        "source": "ROCm/ROCm#6603; general knowledge",
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
        data=[DATA],
        events={"restarts by the supervisor": "2"},
    )
    code, out, err = run(capsys, "report", directory)
    assert code == 0
    assert out.splitlines() == [str(directory / "report.html")]
    seen = check_harmless((directory / "report.html").read_text(encoding="utf-8"))
    drawn = [dict(each)["aria-label"] for name, each in seen.tags if name == "svg"]
    assert drawn == [
        "Loss (loss) from step 1 to 6; newest: training 0.5, evaluation 0.75",
        "Learning rate (learning rate) from step 1 to 6; newest: learning rate 0.0001",
        "Time of a step (seconds) from step 1 to 6; newest: seconds a step 15",
    ]
    for words in (
        "base on rows",
        "Verified, with remarks",
        "step 4: training 0.75",
        "What is a sum? step 6 A number.",
        "train 300 41,230 132 201 412 12 903 2 49.8 %",
        "100 % of the bytes on the device were verified. Corruption was found once and recovered",
        "Faults were injected on request: kind=zero, injected=1.",
        "1,024 bytes from byte 64",
        "fresh slot",
        "fresh mapping visible late",
        "The link is narrow (0000:03:00.0)",
        "use the other slot",
        "current_link_width 4",
        "AMD Radeon RX 7900 XT",
        "21.5 GB",
        "hotspot c 90.5, at most 97",
        "LoRA, r=16, alpha=32",
        "effective_batch_size 16",
        "restarts by the supervisor 2",
        "torch 2.13.0",
    ):
        assert words in seen.words, words
    assert link_of("ROCm/ROCm#6603") in [dict(a).get("href") for n, a in seen.tags if n == "a"]
    assert [dict(a).get("open") for n, a in seen.tags if n == "details"][1:3] == ["", None]
    assert err.startswith("hf-rocm-tune: ") and "recovered before it was used" in err


def test_runs_side_by_side_show_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    record = json.loads((runs[1] / "run.json").read_text())
    record["settings"]["learning_rate"] = 1e-4
    (runs[1] / "run.json").write_text(json.dumps(record))
    before = {path: path.read_bytes() for each in runs for path in each.iterdir()}
    code, out, err = run(capsys, "report", *runs, "--out", tmp_path / "both.html")
    assert {path: path.read_bytes() for each in runs for path in each.iterdir()} == before
    assert (code, out) == (0, f"{tmp_path / 'both.html'}\n") and "two: good: 100 %" in err
    seen = check_harmless((tmp_path / "both.html").read_text())
    for words in (
        "one and two",
        "Settings that differ one two learning_rate 0.0002 0.0001",
        "Loss, evaluation one 0.75 two 0.75",
    ):
        assert words in seen.words, words
    assert "lora_r" not in seen.words


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


def test_a_secret_in_the_words_of_a_finding_is_hidden_whole_and_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [
        "password='correct horse battery 9'",
        "Authorization: Bearer correct-horse-9",
        "curl -H 'authorization: basic correcthorse'",
        '{"cmd": "run --to x api_key=correct-horse-9"}',
        "see https://example.org/?access_token=correct-horse-9",
        "--db_password='correct horse battery 9'",
    ]
    found = [{"status": "fail", "title": "long", "text": "x" * 50_000}, *({"text": text} for text in said)]
    begun = time.monotonic()
    assert run(capsys, "report", write_run(tmp_path / "run", findings=found))[0] == 0
    assert time.monotonic() - begun < 30  # a pattern that is quadratic takes more than a minute
    content = (tmp_path / "run" / "report.html").read_text()
    assert content.count("REDACTED") >= len(said)
    for word in ("correct", "horse", "battery"):
        assert word not in content


# ---- hostile content ----------------------------------------------------------------------------------------


def test_hostile_strings_everywhere_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path / "run", incidents=[incident()], findings=[{"title": "x", "read": ["x"]}])
    files = collect(directory)
    worst = replace(
        files,
        run_id=HOSTILE,
        rows=[*rows(), {HOSTILE: 1.0, "step": 1, "loss": HOSTILE}],
        trained=spoiled(files.trained, HOSTILE),
        report=spoiled(report(incidents=[incident(), "x"], findings=[FINDING], events={"x": "x"}), HOSTILE),
        settings=spoiled(files.settings, HOSTILE),
        missing=[HOSTILE],
    )
    for link in (link_of, lambda _: "javascript:alert(1)", lambda _: 'https://x.example/"><script>'):
        monkeypatch.setattr(page, "link_of", link)
        check_harmless(page_of(worst))
        check_harmless(page.build({HOSTILE: worst, "two": worst}))


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
    files = Run(
        directory=Path("run"),
        rows=[{"step": 1, "loss": 1.0}, data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3))],
        report=whole,
        settings=data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        trained=data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    )
    check_harmless(page_of(files))


# ---- nonsense -----------------------------------------------------------------------------------------------


def test_nonsense_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.jpg").touch()
    (tmp_path / "file").touch()
    wrong: dict[str, list[object]] = {
        "the following arguments are required: DIR": [],
        "nowhere is not a directory": [tmp_path / "nowhere"],
        "file is not a directory": [tmp_path / "file"],
        "empty has no file of a training run": [tmp_path / "empty"],
        "nul byte is not a directory": ["nul\0byte"],
        "cannot be written: Is a directory": [whole, "--out", tmp_path],
        "cannot be written: No such file": [whole, "--out", tmp_path / "no" / "page.html"],
        "cannot be written: File name too long": [whole, "--out", tmp_path / f"{'x' * 252}.htm"],
    }
    for words, argv in wrong.items():
        code, out, err = run(capsys, "report", *argv)
        assert (code, out) == (2, ""), (words, err)
        assert words in err and err.startswith("hf-rocm-tune: error: ") and len(err.splitlines()) == 1, err
    assert not (whole / "report.html").exists()


def test_a_file_of_the_users_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path / "run") / "report.html"
    file.write_text("mine")
    code, _, err = run(capsys, "report", tmp_path / "run")
    assert code == 2 and f"{file} exists and is not of an earlier" in err and len(err.splitlines()) == 1
    assert file.read_text() == "mine"
    file.unlink()
    assert [run(capsys, "report", tmp_path / "run")[0] for _ in range(2)] == [0, 0]


# ---- Reports of broken and half-written runs: what is missing or harmed is said, and never shown as good ----


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def nest(file: Path) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize("harm", [truncate, nest, Path.unlink])
@pytest.mark.parametrize("name", [REPORT_NAME, LOG_NAME, "run.json", "integrity.json"])
def test_a_harmed_file_is_told_and_never_good(tmp_path: Path, name: str, harm: Callable[[Path], Any]) -> None:
    directory = write_run(tmp_path / "run")
    harm(directory / name)
    files = collect(directory)
    assert [line for line in files.missing if name in line] or harm is Path.unlink
    seen = check_harmless(page_of(files))
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
    files = collect(directory)
    assert (files.step, files.max_steps) == (10, 20)
    assert run(capsys, "report", directory)[0] == 0
    words = check_harmless((directory / "report.html").read_text()).words
    assert "10 of 20 steps" in words and "not finished" in words


def test_what_another_run_left_in_the_directory_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", finished=False)
    record = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**record, "run_id": "a-newer-run"}))
    files = collect(directory)
    assert (files.run_id, files.rows, files.report) == ("a-newer-run", [], {})
    assert len([line for line in files.missing if f"belongs to another run, {RUN_ID}" in line]) == 2


def test_a_result_that_was_changed_is_called_so(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "README.md").write_text("# edited\n")
    assert "Verified" in check_harmless(page_of(collect(directory))).text
    (directory / "adapter_config.json").write_text('{"r": 1}')
    seen = check_harmless(page_of(collect(directory)))
    assert "Wrong bytes" in seen.text and "The result differs from what was written: adapter_config.json" in seen.words


# ---- What tests of the report read of a page ----


_VOID = frozenset({"meta", "br", "img", "link", "input", "hr", "base"})


class Seen(HTMLParser):
    """Every element of a page, and whether they are closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in _VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def check_harmless(content: str) -> Seen:
    """A page that runs nothing and asks nobody for anything."""
    seen = Seen(content)
    assert {name for name, _ in seen.tags}.isdisjoint({"script", "iframe", "object", "embed", "link", "form"})
    for name, attributes in seen.tags:
        assert not [key for key in attributes if key.startswith("on")]
        assert "srcset" not in attributes and not attributes.get("src")
        address = attributes.get("href")
        if name == "a":
            assert address is not None and re.match(r"https?://", address)
        else:
            assert address is None or address.startswith("#")
    assert "@import" not in content
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", content))
    policy = next(dict(a)["content"] for n, a in seen.tags if n == "meta" and "http-equiv" in a)
    assert policy is not None and "default-src 'none'" in policy
    return seen


def page_of(files: Run) -> str:
    """The page without the command around it."""
    return page.build({"a run": files})


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# ---- curves: what is drawn is what was logged, whatever the log holds ---------------------------------------


NAN = math.nan


def test_what_was_logged_has_its_panel_and_what_was_not_has_none() -> None:
    def titles(rows: list[dict[str, Any]], **others: Run) -> list[str]:
        return [panel.title for panel in panels({"run": Run(directory=Path("run"), rows=rows), **others})]

    other = Run(directory=Path("other"), rows=[{"step": 3, "gpu/hotspot_c": 90.0, "gpu/edge_c": 60.0}])
    assert titles(rows()) == ["Loss", "Learning rate", "Time of a step"]
    assert titles(rows(), other=other)[-2:] == ["Temperature, hotspot", "Temperature, edge"]
    assert titles([]) == titles([{"step": 1, "loss": NAN, "grad_norm": "high", "learning_rate": None}]) == []


def test_incidents_are_marked_at_their_steps_by_how_they_ended() -> None:
    ended = [{"step": 1, "outcome": "recovered"}, {"step": 2, "outcome": "stopped"}, {"step": 3}, {"outcome": "x"}]
    panel = loss_panel(Run(directory=Path("run"), rows=rows(), report={"incidents": ended}))
    assert panel is not None
    assert panel.marks == {"incident, recovered": [1.0], "incident, not recovered": [2.0, 3.0]}


def test_every_curve_has_a_colour_and_neighbours_differ() -> None:
    shown = page.build({f"run {at}": Run(directory=Path("run"), rows=rows()) for at in range(8)})
    for drawing in re.findall(r"<svg.*?</svg>", shown, re.DOTALL):
        classes = re.findall(r'<g class="(c\d+)"', drawing)
        assert all(f".{name}" in shown for name in classes), classes
        assert all(first != second for first, second in pairwise(classes)) and len(set(classes)) >= min(6, len(classes))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_curve_fills_the_height_and_rises_as_its_values_do(scale: float) -> None:
    drawn = page_of(Run(directory=Path("run"), rows=[{"step": at, "loss": at * scale} for at in (1, 2, 3)]))
    (points,) = [re.findall(r"[ML]([\d.-]+) ([\d.-]+)", d) for d in re.findall(r'd="(M[^"]+)"', drawn)][:1]
    heights = [float(height) for _, height in points]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert 0 < heights[2] < heights[0] < 200 and heights[0] - heights[2] > 120


def test_series_keeps_steps_in_order_the_newest_value_and_gaps() -> None:
    rows = [
        {"step": 3, "loss": 3.0},
        {"step": 1, "loss": 1.0},
        {"step": 3, "loss": 4.0},  # logged again after a restart
        {"step": 2, "loss": math.inf},
        {"step": 4, "loss": True},
        {"step": 5, "loss": "5"},
        {"step": 6, "loss": 10**400},
        {"step": None, "loss": 7.0},
        {"loss": 8.0},
        {"step": 9, "eval_loss": 9.0},
    ]
    found = series(rows, "loss")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found if not math.isnan(value)] == [1.0, 4.0]
    assert last(rows, "loss") == 4.0
    assert last(rows, "nothing") is None


def test_png_is_whole_the_same_each_time_and_leaves_nothing_beside(tmp_path: Path) -> None:
    panel = loss_panel(Run(directory=Path("run"), rows=rows()))
    assert panel is not None
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        write_png(panel, file)
    content = files[0].read_bytes()
    assert content == files[1].read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", content[16:24]) == (936, 520)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
