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
from tests.e2e.command import TIMEOUT, CommandServer
from tests.e2e.conftest import flags, report_of
from tests.e2e.test_methods import GENERATION, REWARDS, rows_of


def prepared(directory: Path, model: Path, **more: Any) -> list[str]:
    """The flags for GRPO of four steps, a checkpoint after the second; its files are in this directory."""
    rows = "".join(json.dumps(row) + "\n" for row in rows_of("grpo"))
    (directory / "prompts.jsonl").write_text(rows, encoding="utf-8")
    (directory / "rewards.py").write_text(REWARDS)
    settings: dict[str, Any] = {"model": model, "dataset": "prompts.jsonl", "output_dir": "out", **GENERATION}
    settings |= {"max_steps": 4, "save_steps": 2, "learning_rate": 0.01, "sentinel_every": 1, "dtype": "bfloat16"}
    return flags(**settings, per_device_train_batch_size=4, use_vllm=True, **more)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use of it
@pytest.mark.long
def test_by_consent_vllm_gets_the_merged_weights_and_the_frozen_ones_stay(tmp_path: Path) -> None:
    model = tiny.build("llama3", tmp_path / "models")
    vllm_stand_in.install(tmp_path / "installed")
    paths = os.pathsep.join([str(tmp_path / "installed"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune.grpo", *prepared(tmp_path, model, consent_unverified=True)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip
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


@pytest.mark.parametrize(("consent", "said"), [(False, "--consent_unverified"), (True, "pip install trl[vllm]")])
def test_without_consent_or_vllm_it_is_one_line(
    server: CommandServer, tmp_path: Path, consent: bool, said: str
) -> None:
    argv = prepared(tmp_path, tiny.build("llama3", tmp_path / "models"), consent_unverified=consent)
    done = server.run(*argv, env={"METHOD": "grpo"}, cwd=tmp_path)
    assert done.code == 2 and len(done.error_lines) == 1 and said in done.error_lines[0], done.stderr[-2000:]
    assert consent or not (tmp_path / "out").exists()
