"""The example loops and `script`: the losses of the stock loops, faults found, states sealed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loops.conftest import EXAMPLES, SCRIPT, RunFile, losses

PLAIN, ACCELERATE = EXAMPLES / "plain_loop.py", EXAMPLES / "accelerate_loop.py"


@pytest.mark.parametrize(
    ("on_card", "example"),
    [
        pytest.param(False, PLAIN, id="cpu-plain", marks=pytest.mark.long),
        pytest.param(False, ACCELERATE, id="cpu-accelerate", marks=pytest.mark.long),
        pytest.param(True, PLAIN, id="card-plain", marks=pytest.mark.long),
        pytest.param(True, ACCELERATE, id="card-accelerate"),
    ],
)
def test_losses_are_those_of_the_stock_loop(
    run_file: RunFile, card: dict[str, str], example: Path, on_card: bool
) -> None:
    env = card if on_card else {}
    stock = losses(run_file(example, "stock", "--stock", env=env))
    assert len(stock) == 2
    assert losses(run_file(example, "ours", env=env)) == stock
    if not on_card:
        return
    harm = {"SIMCARD_HARM": "flip,0.1,64", "SIMCARD_HARM_BACK": "zero,0.1,64", "SIMCARD_DELAYS": "0,40,0,40"}
    assert losses(run_file(*SCRIPT, example, "script", "--stock", env={**card, **harm})) == stock


def test_a_script_has_a_report_beside_its_output_and_ends_with_our_codes(
    run_file: RunFile, card: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, pathlib, sys, torch\n"
        "flags = argparse.ArgumentParser(); flags.add_argument('--output_dir'); given = flags.parse_args()\n"
        "pathlib.Path(given.output_dir).mkdir(exist_ok=True)\n"
        "model = torch.nn.Linear(64, 64).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.randn(2, 64).cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "sys.exit(7)\n"
    )
    done = run_file(*SCRIPT, script, "--output_dir", tmp_path / "out", env=card)
    assert done.returncode == 7 and "error:" not in done.stderr, done.stderr[-2000:]
    report = json.loads((tmp_path / "out" / "transfer_report.json").read_text())
    assert report["schema"] == 2 and report["coverage"]["unverified"] == []
    assert report["coverage"]["crossed_bytes"] == report["coverage"]["verified_bytes"] > 4 * 64 * 64
    origins = {row["origin"] for row in report["origins"]}
    assert "train.py:<module>" in origins and not any("/" in one.split(":")[0] for one in origins if "train.py" in one)
    persistent = {**card, "HF_ROCM_TUNE_FAULT": "kind=zero,rate=1,persist=1"}
    done = run_file(*SCRIPT, script, "--output_dir", tmp_path / "out", env=persistent)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert run_file(*SCRIPT, tmp_path / "none.py").returncode == 2


def test_a_saved_state_is_sealed_and_checked(run_file: RunFile, tmp_path: Path) -> None:
    assert len(losses(run_file(ACCELERATE, "state"))) == 2
    state = tmp_path / "state"
    assert (state / "integrity.json").is_file()
    assert losses(run_file(ACCELERATE, "state", "--resume"))
    content = bytearray((state / "optimizer.bin").read_bytes())
    content[len(content) // 2] ^= 4
    (state / "optimizer.bin").write_bytes(content)
    done = run_file(ACCELERATE, "state", "--resume")
    assert done.returncode != 0 and "optimizer.bin is changed" in done.stderr


def test_the_engine_needs_no_trainer_library(run_file: RunFile) -> None:
    names = ("transformers", "trl", "peft", "accelerate")
    code = (
        "import sys, hf_rocm_tune; t = hf_rocm_tune.VerifiedTransfers('cpu');"
        f"print([name for name in {names} if name in sys.modules])"
    )
    done = run_file("-c", code)
    assert done.stdout.strip() == "[]", (done.stdout, done.stderr)
