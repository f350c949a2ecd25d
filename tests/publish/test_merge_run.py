"""From a real 4-bit run to the merged model and to answers: through the commands, on what the run itself wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from hf_rocm_tune import cli
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish.generate import LoadSettings, loaded_model
from tests import tiny
from tests.e2e import probe
from tests.e2e.command import CommandServer
from tests.publish.merge_cases import load_base, logits, reference


@pytest.fixture(scope="module")
def run(commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished QLoRA run that went far from its start; ``live`` holds the logits of the model that was trained."""
    scratch = tmp_path_factory.mktemp("run")
    base = tiny.build("llama3", scratch / "models")
    data = tiny.write_messages_jsonl(scratch / "data" / "train.jsonl", 16)
    done = commands.run(
        *("--model_name_or_path", str(base), "--dataset_name", str(data), "--output_dir", str(scratch / "out")),
        *("--load_in_4bit", "true", "--max_steps", "3", "--learning_rate", "0.03", "--max_length", "64"),
        *("--lora_dropout", "0", "--disable_tqdm", "true", "--per_device_train_batch_size", "2"),
        env={"DUMP_LOGITS": str(scratch / "live.pt")},
    )
    assert done.code == 0, done.stderr
    return {"base": base, "out": scratch / "out", "live": scratch / "live.pt", "data": data}


def test_a_4bit_run_is_merged_into_the_original_weights(
    run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["merge", str(run["out"]), str(tmp_path / "merged")]) == 0  # the run says which base
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'merged'}\n"
    assert "trained on 4-bit weights and is merged into the original ones" in printed.err
    assert "equal to its manifest" in printed.err
    alone, wanted = reference(run["base"], run["out"])
    found = logits(load_base(tmp_path / "merged"))
    assert float((found - wanted).abs().max()) < 1e-5 < 0.02 < float((wanted - alone).abs().max())
    sealed = manifest.inspect(tmp_path / "merged")
    assert sealed.manifest is not None and not sealed.problems
    assert sealed.manifest.run_id == json.loads((run["out"] / "run.json").read_text())["run_id"]
    assert sealed.manifest.extra["merged"]["trained_in_bits"] == 4


def test_loaded_in_4_bit_the_model_is_the_one_that_was_trained(run: dict[str, Path]) -> None:
    lines: list[str] = []
    with loaded_model(LoadSettings(model=str(run["out"]), load_in_4bit=True), lines.append) as loaded:
        assert torch.equal(probe.logits(loaded.model), torch.load(run["live"]))
        assert loaded.verified["verified_bytes"] == loaded.verified["device_bytes"] > 0
    assert any("100 % of the bytes on the device verified" in line for line in lines)


def test_loaded_as_it_is_the_difference_is_said(run: dict[str, Path]) -> None:
    lines: list[str] = []
    with loaded_model(LoadSettings(model=str(run["out"])), lines.append) as loaded:
        wanted = reference(run["base"], run["out"])[1]
        assert float((logits(loaded.model) - wanted).abs().max()) < 1e-5
    assert any("--load_in_4bit" in line for line in lines)


def test_a_run_whose_adapter_was_changed_is_not_used(
    run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run["out"], tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 64
    file.write_bytes(raw)
    for argv in (
        ["merge", str(tmp_path / "changed"), str(tmp_path / "merged")],
        ["generate", str(tmp_path / "changed"), "--prompt", "x"],
        ["eval", str(tmp_path / "changed"), "--dataset_name", str(run["data"])],
    ):
        assert cli.main(argv) == 2
        assert "adapter_model.safetensors is changed" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
