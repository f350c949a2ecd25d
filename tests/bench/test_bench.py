"""The benchmarks run: what is compared is the same work, bytes are checked, and the last line is the result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
FAILED = {"trl sft": "SystemExit: no such card"}
SMALL = ("--hidden", "64", "--layers", "1", "--batch", "1", "--seq", "16")


def bench(name: str, *argv: str, cwd: Path) -> tuple[Any, str]:
    """A benchmark on the CPU: its last line, and what it printed."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--device", "cpu", *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["machine"]["device"].startswith("cpu") and result["machine"]["versions"]["torch"]
    return result, done.stdout


def test_transfer_measures_every_way_and_checks_what_arrived(tmp_path: Path) -> None:
    result, _ = bench("transfer", "--max_mib", "1", "--repeats", "2", "--json", "out.json", cwd=tmp_path)
    ways = {"raw pageable", "tensor.to", "ours, unverified", "ours, verified"}
    assert {row["way"] for row in result["rows"]} == ways and len(result["rows"]) == 5 * len(ways)
    assert all(row["wrong"] == 0 and row["gb_per_s"]["n"] == 2 for row in result["rows"])
    assert json.loads((tmp_path / "out.json").read_text()) == result


@pytest.mark.long
def test_load_compares_the_same_logits(tmp_path: Path) -> None:
    result, _ = bench("load", "--gb", "0.01", "--repeats", "1", "--dir", str(tmp_path), cwd=tmp_path)
    stock, ours = result["rows"]
    assert (stock["side"], stock["verified_share"], ours["verified_share"]) == ("stock", None, 1.0)
    assert result["same_logits"] and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_comm_averages_and_trains_in_every_way(tmp_path: Path) -> None:
    result, _ = bench("comm", *SMALL, "--max_mib", "1", "--repeats", "1", "--turns", "1", cwd=tmp_path)
    assert {row["way"] for row in result["averages"]} == {"gloo", "host", "host, unverified"}
    assert not any(row["wrong"] for row in result["averages"])
    assert [row["way"] for row in result["training"]] == [
        "ddp",
        "ddp, again",
        "ddp, checked",
        "host, unverified",
        "host",
    ]


@pytest.mark.long
def test_sft_trains_every_side_to_the_same_loss(tmp_path: Path) -> None:
    result, printed = bench("sft", *SMALL[:4], "--batch", "2", "--turns", "1", "--steps", "3", cwd=tmp_path)
    rows = {row["side"]: row for row in result["rows"]}
    assert list(rows) == ["bare loop", "trl sft", "ours, unverified", "ours, verified", "ours, auto_fit plan"]
    assert (
        rows["ours, unverified"]["loss"]
        == rows["ours, verified"]["loss"]
        == pytest.approx(rows["trl sft"]["loss"], abs=2e-3)
    )
    assert rows["ours, verified"]["largest_difference_of_losses"] <= 2e-3 and "FAILED" not in printed
    chosen = rows["ours, auto_fit plan"]["chosen"]
    assert chosen["micro_batch"] * chosen["accumulation"] == 2


@pytest.mark.long
def test_a_side_that_fails_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'trl.scripts.sft' in sys.orig_argv: sys.exit('no such card')\n"
    )
    command = [sys.executable, str(SCRIPTS / "sft.py"), "--device", "cpu", *SMALL, "--turns", "1", "--steps", "2"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--sides", "bare"], capture_output=True, text=True, timeout=300, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["side"] for row in result["rows"]] == ["bare loop"] and result["failed"] == FAILED


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        pytest.param(
            ["transfer", "--json", "no/such/directory/x"], "--json no/such/directory/x", marks=pytest.mark.long
        ),
        (["sft", "--model", "./no/such/model", "--device", "cpu"], "--model ./no/such/model"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(argv: list[str], says: str) -> None:
    name, *flags = argv
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
