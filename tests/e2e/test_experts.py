"""A user's mixture of experts on a small card: trained in 4 bit, harmed, killed, merged, and asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_rocm_tune import cli
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.transfer import Mover
from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, losses_of, report_of
from tests.e2e.test_card_runs import weights

EXPERTS = ["--lora_target_parameters", "experts.gate_up_proj", "experts.down_proj"]
LOSS_DISTANCE = {"gpt_oss-mxfp4": 1e-3, "qwen3_moe": 5e-3}
"""Relative, of the losses from those over unquantised experts. MXFP4 is exact: only bfloat16's roundings differ."""
MERGED_DISTANCE = 0.02
"""Relative, of the merged model's logits from those of base and adapter. Of NF4 the base is the unquantised one."""


@pytest.fixture
def argv(messages: Path, model_of: Callable[[str], Path]) -> Callable[..., list[str]]:
    """The command line of a run of four steps with a checkpoint after two."""

    def make(arch: str, output: Path, *more: str, quantised: bool = True) -> list[str]:
        usual = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "max_length": 64, "doctor": "off"}
        usual |= {"logging_steps": 1, "learning_rate": 0.01, "disable_tqdm": True, "dtype": "bfloat16"}
        model = model_of(arch) if quantised or "mxfp4" not in arch else _in_16_bits(model_of(arch), output.parent)
        where = {"model_name_or_path": model, "dataset_name": messages, "output_dir": output}
        four_bit = ["--load_in_4bit"] if quantised and "mxfp4" not in arch else []
        return [*flags(**where, **usual), *four_bit, *more]

    return make


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use of it
@pytest.mark.parametrize("arch", ["gpt_oss-mxfp4", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_the_journey_of_a_mixture(
    arch: str, argv: Callable[..., list[str]], model_of: Callable[[str], Path], server: CommandServer, tmp_path: Path
) -> None:
    clean, harmed, merged = tmp_path / "clean", tmp_path / "harmed", tmp_path / "merged"
    done = server.run(*argv(arch, clean, *EXPERTS))
    assert done.code == 0, done.stderr[-2000:]
    assert report_of(clean)["coverage"]["unverified"] == []

    fault = {"HF_ROCM_TUNE_FAULT": "kind=flip,rate=0.2,seed=5"}
    killed = server.run(*argv(arch, harmed, *EXPERTS), env={**fault, "HF_ROCM_TUNE_CRASH": "step=3,kind=kill"})
    assert killed.code == -9
    assert server.run(*argv(arch, harmed, *EXPERTS), env=fault).code == 0
    report = report_of(harmed)
    assert {row["outcome"] for row in report["incidents"]} == {"recovered"} and report["coverage"]["unverified"] == []
    assert weights(harmed) == weights(clean)

    unquantised = server.run(*argv(arch, tmp_path / "plain", *EXPERTS, quantised=False))
    assert unquantised.code == 0, unquantised.stderr[-2000:]
    assert losses_of(clean) == pytest.approx(losses_of(tmp_path / "plain"), rel=LOSS_DISTANCE[arch])

    assert cli.main(["merge", str(clean), str(merged)]) == 0
    ids = torch.arange(64).view(2, 32)
    with Mover(torch.device("cpu")) as mover, torch.no_grad():
        base, _ = load_model(ModelSource(name=str(model_of(arch)), init={"dtype": torch.bfloat16}), mover)
        trained = PeftModel.from_pretrained(base, clean)
        answers = trained(input_ids=ids).logits
        with trained.disable_adapter():
            untrained = trained(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    assert _distance(found, answers) < MERGED_DISTANCE < _distance(untrained, answers)


def _in_16_bits(packed: Path, folder: Path) -> Path:
    """The same model, which is unpacked when it is loaded."""
    plain = Path(shutil.copytree(packed, folder / "unpacked", dirs_exist_ok=True))
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"]["dequantize"] = True
    (plain / "config.json").write_text(json.dumps(config))
    return plain


def _distance(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())
