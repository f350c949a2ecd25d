"""``bench comm``: every way gives the right average, and all trainings on two ranks are the same training."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hf_rocm_tune.bench.command import main
from hf_rocm_tune.errors import UsageError

FLAGS = (
    *("--device", "cpu", "--max_size", "20K", "--repeats", "2", "--hidden", "64", "--layers", "1"),
    *("--batch", "1", "--seq", "16", "--turns", "1", "--steps", "2"),
)


@pytest.mark.long
def test_all_ways_are_measured_and_right() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune", "bench", "comm", *FLAGS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    averages = [row for row in result["rows"] if row["part"] == "average"]
    assert {row["bytes"] for row in averages} == {1024, 4096, 16384, 20480}
    ways = {"gloo", "host, unverified", "host", "host, fp16", "host, bf16"}
    assert {row["way"] for row in averages} == ways and len(averages) == 4 * len(ways)
    assert all(row["wrong"] == 0 and row["seconds"]["n"] == 2 for row in averages)
    training = {row["way"]: row for row in result["rows"] if row["part"] == "training"}
    assert [row["ranks"] for row in training.values()] == [1] + [2] * 7
    same = {training[way]["loss"] for way in ("ddp", "ddp, again", "ddp, checked", "host, unverified", "host")}
    assert len(same) == 1, "averages through the host are those of the process group, bit for bit"
    assert training["host, bf16"]["loss"] not in same
    host = training["host"]
    assert host["bytes_between_ranks_per_step"] == host["trainable_bytes"] > 0
    assert host["bytes_to_host_and_back_per_step"] == 2 * host["trainable_bytes"]
    assert training["host, bf16"]["bytes_between_ranks_per_step"] * 2 == host["trainable_bytes"]
    assert {row["seconds"]["n"] for row in training.values()} == {2}
    assert all(any(line.startswith(way + " ") for line in lines) for way in training)
    assert sum("goal: " in note for note in result["notes"]) == 1
    assert result["left_out"][0]["what"] == "RCCL or NCCL"


@pytest.mark.parametrize(
    "flags",
    [["--hidden", "100"], ["--turns", "-1"], ["--steps", "0"], ["--repeats", "0"], ["--max_size", "100"]],
)
def test_wrong_settings_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match=flags[0]):
        main(["comm", *flags], trainer_class=lambda: pytest.fail)
