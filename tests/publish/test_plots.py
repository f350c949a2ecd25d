"""Curves: what is drawn is what was logged, whatever the log holds; no text of the user's gets into a picture."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.history import last, series, training_seconds
from hf_rocm_tune.publish.plots import Curve, loss_panel, panels, svg, write_png

NAN = math.nan


def training(count: int = 20) -> list[dict[str, Any]]:
    """A log with everything that can be logged."""
    return [
        {
            "step": step,
            "loss": 2.0 / step,
            "grad_norm": 1.0,
            "learning_rate": 1e-4 / step,
            "speed/tokens_per_second": 1000.0 + step,
            "speed/seconds_per_step": 2.0,
            "gpu/vram_used_gib": 16.0,
            "gpu/torch_allocated_gib": 9.0,
            "gpu/torch_reserved_gib": 10.0,
            "gpu/hotspot_c": 90.0 + step,
            "gpu/power_w": 300.0,
        }
        for step in range(1, count + 1)
    ]


def test_every_metric_has_its_panel_and_what_was_not_logged_has_none() -> None:
    everything = ["loss", "learning_rate", "gradient_norm", "tokens_per_second", "step_time"]
    everything += ["memory", "temperature", "power"]
    assert [panel.name for panel in panels(training())] == everything
    assert [panel.name for panel in panels([{"step": 1, "loss": 1.0}])] == ["loss"]
    assert panels([]) == []
    assert panels([{"step": 1, "loss": NAN, "grad_norm": "high", "learning_rate": None}]) == []


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


def test_training_time_counts_every_start_of_a_run() -> None:
    paced = [
        {"step": step, "speed/seconds_per_step": pace} for step, pace in ((10, 2.0), (20, 3.0), (30, NAN), (40, 1))
    ]
    ended = [{"step": 40, "train_runtime": 7.0}, {"step": 40, "train_runtime": 5.0}]
    assert training_seconds([*paced, *ended]) == 20.0 + 30.0 + 10.0
    assert training_seconds(ended) == 5.0 + 7.0
    assert training_seconds([]) == 0


@given(st.lists(st.one_of(st.floats(-100, 100), st.just(NAN)), min_size=100, max_size=300))
@settings(max_examples=15, deadline=None)
def test_running_mean_is_the_mean_of_what_is_around(values: list[float]) -> None:
    half = max(2, len(values) // 100)
    means = Curve(label="", points=list(enumerate(values))).running_mean()
    for at, (step, mean) in enumerate(means):
        around = [v for v in values[max(0, at - half) : at + half + 1] if not math.isnan(v)]
        assert step == at
        assert mean == pytest.approx(sum(around) / len(around), abs=1e-9) if around else math.isnan(mean)


def test_evaluations_are_told_apart_and_their_names_stay_out_of_the_picture() -> None:
    hostile = "<script>$\\frac{</script>"
    rows = [{"step": 1, "loss": 1.0}, {"step": 1, f"eval_{hostile}_loss": 2.0}, {"step": 1, "eval_b_loss": 3.0}]
    panel = loss_panel(rows)
    assert panel is not None
    assert [curve.label for curve in panel.curves] == ["training", "evaluation 1", "evaluation 2"]
    assert "script" not in svg(panel)
    one = loss_panel([{"step": 1, "eval_loss": 2.0}])
    assert one is not None and [curve.label for curve in one.curves] == ["evaluation"]


def test_incidents_are_marked_by_how_they_ended() -> None:
    report = {
        "incidents": [
            {"step": 2, "outcome": "recovered"},
            {"step": 2, "outcome": "recovered"},
            {"step": 3, "outcome": "stopped"},
            {"step": None, "outcome": "recovered"},
            "nonsense",
        ]
    }
    panel = loss_panel(training(), report)
    assert panel is not None
    assert panel.marks == {"incident, recovered": [2, 2], "incident, not recovered": [3]}
    assert "incident, recovered (2)" in svg(panel)


def test_png_is_whole_the_same_each_time_and_leaves_nothing_beside(tmp_path: Path) -> None:
    panel = loss_panel(training())
    assert panel is not None
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        write_png(panel, file)
    content = files[0].read_bytes()
    assert content == files[1].read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", content[16:24]) == (936, 520)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_the_users_matplotlibrc_changes_nothing(tmp_path: Path) -> None:
    import matplotlib

    panel = loss_panel(training())
    assert panel is not None
    write_png(panel, tmp_path / "plain.png")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.linewidth": 9}):
        write_png(panel, tmp_path / "other.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "other.png").read_bytes()


def test_svg_takes_its_colours_from_the_page_and_asks_for_nothing_outside() -> None:
    for panel in panels(training(150), {"incidents": [{"step": 3, "outcome": "stopped"}]}):
        drawn = svg(panel)
        root = ElementTree.fromstring(drawn)
        assert root.tag == "svg" and root.get("viewBox") and root.get("width") is None
        assert "http" not in drawn and drawn.count("url(") == drawn.count("url(#")
        assert not re.search(r"#[0-9a-f]{6}\b", drawn, re.IGNORECASE), "a colour that the page's theme cannot change"
        assert "var(--series-1)" in drawn and "var(--muted)" in drawn
        assert "<style" not in drawn and "<metadata" not in drawn


def test_without_matplotlib_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    panel = loss_panel(training())
    assert panel is not None
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        write_png(panel, tmp_path / "x.png")
