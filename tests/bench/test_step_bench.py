"""``bench step``: all sides train the same, and differ in what they verify only."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hf_rocm_tune.bench.command import main
from hf_rocm_tune.errors import UsageError

FLAGS = (
    *("--device", "cpu", "--hidden", "64", "--layers", "1", "--batch", "1", "--seq", "16"),
    *("--turns", "2", "--steps", "3", "--sentinel_every", "2"),
)


@pytest.mark.long
def test_sides_train_the_same_and_verify_what_they_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune", "bench", "step", *FLAGS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    rows = {row["side"]: row for row in result["rows"]}
    assert list(rows) == ["off", "off again", "sample", "full"]
    assert all(any(line.startswith(side + " ") for line in lines) for side in rows)
    share = {side: row["batch_verified_bytes"] / row["batch_bytes"] for side, row in rows.items()}
    assert share["off"] == share["off again"] == 0 < share["sample"] < share["full"] == 1
    assert len({row["training_loss"] for row in rows.values()}) == 1, "verification changes no bit"
    assert {row["seconds"]["n"] for row in rows.values()} == {6}, "two turns of three steps"
    assert rows["off"]["ratio"]["max"] == rows["off"]["ratio"]["min"] == 1
    assert result["settings"]["parameters"] > 0
    assert sum("goal: " in note for note in result["notes"]) == 1
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "flags",
    [["--hidden", "100"], ["--hidden", "0"], ["--turns", "0"], ["--steps", "-1"], ["--sentinel_every", "-1"]],
)
def test_wrong_sizes_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match=flags[0]):
        main(["step", *flags], trainer_class=lambda: pytest.fail)
