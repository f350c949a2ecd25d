"""GRPO with vLLM, by consent: vLLM gets the weights with the adapter, and the frozen ones stay as they are.

vLLM itself does not run here; TRL's own code runs against `tests.e2e.vllm_stand_in`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.e2e import vllm_stand_in
from tests.e2e.command import TIMEOUT, error_lines
from tests.e2e.conftest import flags, report_of
from tests.e2e.test_methods import GENERATION, REWARDS, rows_of


def start(directory: Path, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """GRPO of four steps in this directory, a checkpoint after the second."""
    rows = "".join(json.dumps(row) + "\n" for row in rows_of("grpo"))
    (directory / "prompts.jsonl").write_text(rows, encoding="utf-8")
    (directory / "rewards.py").write_text(REWARDS)
    settings: dict[str, Any] = {"model": model, "dataset": "prompts.jsonl", "output_dir": "out", **GENERATION}
    settings |= {"max_steps": 4, "save_steps": 2, "learning_rate": 0.01, "sentinel_every": 1, "dtype": "bfloat16"}
    argv = [*flags(**settings, use_vllm=True), "--per_device_train_batch_size", "4", *more]
    paths = os.pathsep.join([str(directory / "installed"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune.grpo", *argv],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use of it
def test_by_consent_vllm_gets_the_merged_weights_and_the_frozen_ones_stay(tmp_path: Path) -> None:
    model = tiny.build("llama3", tmp_path / "models")
    vllm_stand_in.install(tmp_path / "installed")
    refused = start(tmp_path, model)
    assert refused.returncode == 2 and "--consent_unverified" in error_lines([refused.stderr])[0]
    assert not (tmp_path / "out").exists()

    done = start(tmp_path, model, "--consent_unverified", "true")
    assert done.returncode == 0, done.stderr[-3000:]
    report = report_of(tmp_path / "out")
    assert report["incidents"] == [] and report["frozen"]["passes"] > 0
    assert ["vLLM" in row["tensor"] for row in report["coverage"]["unverified"]] == [True]

    sent = [load_file(file) for file in sorted(tmp_path.glob("sent-*.safetensors"))]
    base = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    assert sent[0].keys() == dict(base.named_parameters()).keys() and len(sent) == 4
    for name, value in base.named_parameters():
        assert sent[0][name].equal(value), "the new adapter adds nothing"
    merged = PeftModel.from_pretrained(base, tmp_path / "out" / "checkpoint-2")
    for name, value in merged.merge_and_unload().named_parameters():
        assert sent[2][name].equal(value), name
    assert any(not sent[2][name].equal(value) for name, value in sent[0].items())


def test_without_vllm_it_is_one_line(tmp_path: Path) -> None:
    done = start(tmp_path, tiny.build("llama3", tmp_path / "models"), "--consent_unverified", "true")
    assert done.returncode == 2
    (line,) = error_lines([done.stderr])
    assert "pip install trl[vllm]" in line
