"""``bench transfer``: every way is measured and checked for right bytes, and the output can be read by programs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune import cli
from hf_rocm_tune.bench import transfers
from hf_rocm_tune.bench.command import byte_size
from hf_rocm_tune.bench.report import Spread, ratios, show_bytes, sizes
from hf_rocm_tune.bench.transfers import HOST, Direction, Send, directions, measure, missing_ways
from hf_rocm_tune.transfer import Mover

ON_HOST = Direction(name="host to device", source=HOST, target=HOST)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_last_line_is_the_json_that_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    flags = ["transfer", "--device", "cpu", "--max_size", "16KiB", "--repeats", "2", "--json", str(file)]
    code, out, _ = run(capsys, *flags)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert set(result) == {
        *("schema", "bench", "command", "machine", "settings", "rows", "notes", "left_out"),
    }
    assert (result["schema"], result["bench"]) == (1, "transfer")
    assert result["command"] == " ".join(["hf-rocm-tune bench", *flags])
    assert {"torch", "accelerate", "hf-rocm-tune", "python"} <= set(result["machine"]["versions"])
    assert result["machine"]["cores"] >= 1 and result["machine"]["memory_gb"] > 0
    assert any("no accelerator" in note for note in result["notes"]), "the CPU's figures are named as such"
    table = out.splitlines()[:-1]
    for row in result["rows"]:
        assert any(row["way"] in line and show_bytes(row["bytes"]) in line for line in table)
        assert row["seconds"]["n"] == 2 and 0 < row["seconds"]["min"] <= row["seconds"]["median"]
    for left in result["left_out"]:
        assert left["reason"] and any(left["what"] in line for line in table)


def test_every_way_is_measured_at_every_size_and_arrives_right() -> None:
    rows = [row for nbytes in (1, 4097, 1 << 16) for row in measure(ON_HOST, nbytes, 2)]
    ways = ["raw pageable", "tensor.to", "ours, unverified", "ours, verified"]
    assert [row["way"] for row in rows] == ways * 3
    assert all(row["wrong"] == 0 and math.isfinite(row["gb_per_s"]["median"]) for row in rows)
    reference = [row for row in rows if row["way"] == row["reference"]]
    assert [row["speed_to_reference"]["median"] for row in reference] == [1, 1, 1]


def test_ours_verifies_on_one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, float]] = []
    stock = Mover.close

    def close(self: Mover) -> None:
        weights = self.report.to_dict()["weights"]
        seen.append((self.settings.verify, weights["bytes"], weights["verified_bytes"]))
        stock(self)

    monkeypatch.setattr(Mover, "close", close)
    measure(ON_HOST, 4096, 1)
    (off, moved, unverified), (full, moved_too, verified) = seen
    assert (off, unverified, full) == ("off", 0, "full")
    assert moved == moved_too == verified > 0


def test_wrong_bytes_are_counted_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stock = transfers.prepare

    def prepare(direction: Direction, source: torch.Tensor, movers: Any) -> dict[str, Send]:
        return {**stock(direction, source, movers), "zeroing": lambda: torch.zeros_like(source)}

    monkeypatch.setattr(transfers, "prepare", prepare)
    code, out, _ = run(capsys, "transfer", "--device", "cpu", "--max_size", "4KiB", "--repeats", "3")
    assert code == 0
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert {row["way"]: row["wrong"] for row in rows if row["wrong"]} == {"zeroing": 3}
    assert "3 copies ARRIVED WRONG" in out


@pytest.mark.gpu
def test_on_an_accelerator_every_way_is_there() -> None:
    found, _ = directions(torch.device("cuda", 0))
    for direction in found:
        names = [row["way"] for row in measure(direction, 1 << 16, 1)]
        assert {"tensor.to", "send_to_device"} <= set(names)
        if direction.source.type == "cpu":
            assert {"raw pinned", "raw pageable", "ours, unverified", "ours, verified"} <= set(names)
        assert not {row["what"].rpartition(", ")[2] for row in missing_ways(direction)} & set(names)


def test_sizes_reach_the_largest_and_do_not_pass_it() -> None:
    assert sizes(4096, 4096) == [4096]
    assert sizes(4096, 100_000) == [4096, 16384, 65536, 100_000]
    assert sizes(4096, 1 << 30)[-2:] == [1 << 28, 1 << 30]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("4k", 4096), ("4KiB", 4096), ("1.5 MB", 3 << 19), ("1G", 1 << 30)]
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert byte_size(text) == nbytes


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], ["transfer|load|step"]),
        (["transfers"], ["transfers"]),
        (["transfer", "--max_size", "many"], ["--max_size", "'many'", "64KiB"]),
        (["transfer", "--max_size", "1KiB"], ["--max_size", "4 KiB"]),
        (["transfer", "--max_size", "1000000G"], ["--max_size", "memory"]),
        (["transfer", "--repeats", "0"], ["--repeats", "0"]),
        (["transfer", "--device", "tpu9"], ["--device", "tpu9"]),
        (["transfer", "--device", "cuda:77"], ["--device", "cuda:77"]),
        (["transfer", "--device", "meta"], ["--device", "meta"]),
        (["transfer", "--json", "no/such/directory/x.json"], ["--json", "no/such/directory"]),
        (["transfer", "--plot", "x.pdf"], ["--plot", ".png"]),
        (["load", "--scale", "2"], ["--scale", "2"]),
        (["load", "--repeats", "0"], ["--repeats"]),
        (["load", "--dir", "no/such/directory"], ["--dir"]),
        (["load", "--caches", "hot"], ["hot", "warm"]),
        (["step", "--plot", "x.png"], ["--plot"]),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    argv: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(name in err for name in named), err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from hf_rocm_tune import cli\n"
        "try: cli.main(['bench', 'load', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--load_in_4bit" in done.stdout


def test_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "transfer.png"
    code, _, err = run(capsys, "transfer", "--max_size", "16KiB", "--repeats", "2", "--plot", str(file))
    assert code == 0, err
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_plot_without_matplotlib_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = run(capsys, "transfer", "--plot", str(tmp_path / "x.png"))
    assert (code, out) == (2, "")
    assert "pip install matplotlib" in err
    assert os.listdir(tmp_path) == []


def test_spread_and_ratios() -> None:
    assert Spread.of([3.0]) == Spread(median=3, q1=3, q3=3, min=3, max=3, n=1)
    found = Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.min, found.q1, found.median, found.q3, found.max, found.n) == (1, 2, 3, 4, 5, 5)
    assert ratios([2.0, 9.0], [1.0, 3.0]).median == 2.5, "pair by pair, not of the medians"
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])
    assert Spread(**found.to_dict()) == found
