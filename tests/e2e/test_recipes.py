"""Every recipe trains at small scale through the real command line, verified, and a fault put in on purpose is caught.

Only size is overridden: model, data, steps, row length, and a micro-batch for rows this short. Method, adapters,
schedule and checkpointing are the recipe's. Not covered: the full-size models, which need the card.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hf_rocm_tune.configs import RECIPES as recipes
from tests.e2e.command import TIMEOUT, CommandServer
from tests.e2e.conftest import flags, report_of, sampled

ADAPTER = "adapter_model.safetensors"
SINGLE = [name for name in recipes.names() if "dual" not in name]
DUAL = [name for name in recipes.names() if "dual" in name]


@pytest.fixture
def small(model_of: Callable[[str], Path], messages: Path) -> Callable[[str], list[str]]:
    """The command line for a recipe: the recipe by name, and what makes it small."""

    def command(name: str) -> list[str]:
        model = model_of({"llama": "llama3", "gemma": "gemma3", "mistral": "mistral"}.get(name.split("_")[0], "qwen3"))
        data = messages.parent / "pairs"
        for split in ("train", "test") if "dpo" in name else ():
            chats = [json.loads(row)["messages"] for row in (messages / f"{split}.jsonl").read_text().splitlines()]
            rows = [{"prompt": one[:1], "chosen": one[1:], "rejected": two[1:]} for one, two in pairwise(chats)]
            data.mkdir(exist_ok=True)
            (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        size = flags(
            model_name_or_path=model,
            dataset_name=data if "dpo" in name else messages,
            max_steps=2,
            max_length=64,
            eval_steps=2,
            disable_tqdm=True,
        )
        return ["--config", name, *size, *flags(logging_steps=1, save_steps=2, warmup_steps=0)]

    return command


@pytest.mark.parametrize("name", sampled(SINGLE, "qwen_8b_dpo_qlora"))
def test_trains_and_recovers_from_faults_with_the_same_adapter(
    name: str, small: Callable[[str], list[str]], server: CommandServer, tmp_path: Path
) -> None:
    clean, harmed = tmp_path / "clean", tmp_path / "harmed"
    method = {"METHOD": "dpo"} if "dpo" in name else {}
    done = server.run(*small(name), *flags(output_dir=clean), env=method)
    assert done.code == 0, done.stderr[-3000:]
    report = report_of(clean)
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    fault = "kind=zero_range,rate=0.2,seed=3,persist=0"
    done = server.run(*small(name), *flags(output_dir=harmed), env={"HF_ROCM_TUNE_FAULT": fault, **method})
    assert done.code == 0, done.stderr[-3000:]
    report = report_of(harmed)
    found = sum(report[stage]["mismatches"] for stage in ("weights", "batches"))
    assert found == sum(report[stage]["recovered"] for stage in ("weights", "batches")) > 0
    assert report["incidents"] and report["fault_injection"] is not None
    assert (harmed / ADAPTER).read_bytes() == (clean / ADAPTER).read_bytes()
    config = json.loads((clean / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 32)


@pytest.mark.parametrize("name", SINGLE[:1])
def test_a_fault_that_stays_ends_the_run_with_code_3(
    name: str, small: Callable[[str], list[str]], server: CommandServer, tmp_path: Path
) -> None:
    fault = "kind=zero,stage=batches,persist=1"
    done = server.run(*small(name), *flags(output_dir=tmp_path / "out"), env={"HF_ROCM_TUNE_FAULT": fault})
    assert done.code == 3 and len(done.error_lines) == 1
    assert not (tmp_path / "out" / ADAPTER).exists()


@pytest.mark.long
@pytest.mark.parametrize("name", DUAL)
def test_two_processes_catch_a_wrong_average_of_gradients(
    name: str, small: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=zero,stage=gradients,count=1,seed=1")
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", *small(name)]
    command += flags(output_dir=tmp_path / "out", gradient_accumulation_steps=2)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    report = report_of(tmp_path / "out")
    assert report["ranks"] == 2
    assert report["gradients"]["mismatches"] == report["gradients"]["recovered"] > 0
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
