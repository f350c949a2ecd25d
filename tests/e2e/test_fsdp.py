"""FSDP2 with two processes trains like one process with twice the batch, resumes exactly, and lets nothing wrong pass.

Tolerances. LoRA in float32 differs in the order of float sums: losses within 1e-5 of each other, gradient norms within
1e-4, over 50 steps; Adam turns a last bit into more where a gradient is near zero, so adapters are compared at 1e-3.
QLoRA averages gradients in bfloat16, which one process does not: it is compared with two processes under DDP, which do,
and whose norms are sums in bfloat16: losses within 1e-3.

The full matrix is `long`: QLoRA, accumulation with packing, a tied head with evaluation, a run that is killed and goes
on (through the real launcher and its configuration), and injected faults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import TIMEOUT, CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.two_ranks import environments

BATCH, STEPS = 2, 50
QLORA = {"load_in_4bit": True, "bnb_4bit_quant_storage": "float32"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture(scope="module")
def shared(model_of: Callable[[str], Path], scratch: Path) -> list[str]:
    """Flags of all runs; without batch size, steps between saves and output directory."""
    return flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(scratch / "fsdp", train=4 * BATCH * STEPS, test=5),
        max_steps=STEPS,
        max_length=64,
        learning_rate=0.005,
        lora_dropout=0.0,
        logging_steps=1,
        disable_tqdm=True,
    )


def launched(config: str, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The real command line."""
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", config, *argv]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=environment)


def ranks(server: CommandServer, tmp_path: Path, *argv: str, env: dict[str, str]) -> tuple[Result, Result]:
    """Two ranks of one job, as a launcher starts them, but forked: it is quicker."""
    running = [server.start(*argv, env=each) for each in environments(tmp_path / "exit.json", **env)]
    first, second = (each.wait() for each in running)
    return first, second


def rows_of(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "loss" in row]


@pytest.fixture(scope="module")
def outputs(shared: list[str], server: CommandServer, scratch: Path) -> tuple[Path, Path]:
    """Output directories of one process with batch 2B, and of two with FSDP2 and batch B."""
    one, two = scratch / "fsdp-one", scratch / "fsdp-two"
    save = flags(save_steps=25)
    argv = [*shared, *save, *flags(per_device_train_batch_size=BATCH, output_dir=two)]
    for done in ranks(server, scratch / "fsdp-job", *argv, env=FSDP2):
        assert done.code == 0, done.stderr[-3000:]
    result = server.run(*shared, *save, *flags(per_device_train_batch_size=2 * BATCH, output_dir=one))
    assert result.code == 0, result.stderr[-3000:]
    return one, two


def test_the_trajectory_is_that_of_one_process_with_twice_the_batch(outputs: tuple[Path, Path]) -> None:
    one, two = (rows_of(output) for output in outputs)
    assert len(one) == len(two) == STEPS
    assert one[0]["loss"] - one[-1]["loss"] > 0.1  # it learned: a frozen trajectory would agree as well
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
        assert theirs["num_tokens"] == ours["num_tokens"]


# PEFT 0.21 asks for a property that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_adapter_is_a_plain_one_that_peft_loads(
    outputs: tuple[Path, Path], model_of: Callable[[str], Path]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    one, two = (load_file(output / "adapter_model.safetensors") for output in outputs)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-3)
    tokens = torch.arange(24)[None]
    logits = []
    for output in outputs:
        base = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
        model = PeftModel.from_pretrained(base, output)
        assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name)
        logits.append(model(input_ids=tokens).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_the_report_covers_shards_and_what_crossed_between_the_ranks(outputs: tuple[Path, Path]) -> None:
    one, two = (report_of(output) for output in outputs)
    assert two["ranks"] == 2 and two["grad_sync"]["way"] == "fsdp2"
    assert two["coverage"]["unverified"] == []
    assert two["coverage"]["verified_bytes"] == two["coverage"]["device_bytes"]
    assert two["weights"]["bytes"] == pytest.approx(one["weights"]["bytes"], rel=0.05)  # each weight once, not twice
    assert two["gathered"]["checked"] > two["gradients"]["buckets"] >= 2 * STEPS
    assert two["gathered"]["mismatches"] == two["gradients"]["mismatches"] == two["frozen"]["mismatches"] == 0
    assert two["frozen"]["tensors"] == 2 * one["frozen"]["tensors"]
    assert two["memory"]["steps_down"] is False  # stated: a step that runs out of memory is not done again


def test_a_checkpoint_has_the_form_of_a_single_process(outputs: tuple[Path, Path]) -> None:
    one, two = (output / "checkpoint-25" for output in outputs)
    ours, theirs = ({file.name for file in each.iterdir()} for each in (one, two))
    assert {name for name in ours ^ theirs if not name.startswith("rng_state")} == set()
    optimizers = [torch.load(each / "optimizer.pt", weights_only=True) for each in (one, two)]
    shapes = [{key: value["exp_avg"].shape for key, value in each["state"].items()} for each in optimizers]
    assert shapes[0] == shapes[1]
    assert json.loads((two / "integrity.json").read_text())["extra"] == {"compared": True}


# ---- the full matrix --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_is_killed_continues_to_the_same_adapter(
    outputs: tuple[Path, Path], shared: list[str], tmp_path: Path
) -> None:
    argv = [*shared, *flags(save_steps=25, per_device_train_batch_size=BATCH, output_dir=tmp_path / "out")]
    killed = launched("cpu_dual_fsdp2", *argv, env={"HF_ROCM_TUNE_CRASH": "step=38,kind=kill,rank=1"})
    assert killed.returncode not in (0, 2, 3)
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    again = launched("cpu_dual_fsdp2", *argv)
    assert again.returncode == 0, again.stderr[-3000:]
    whole, continued = (load_file(each / "adapter_model.safetensors") for each in (outputs[1], tmp_path / "out"))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert losses_of(tmp_path / "out") == losses_of(outputs[1])


@pytest.mark.long
def test_a_checkpoint_of_ddp_is_continued_with_fsdp2(
    shared: list[str], outputs: tuple[Path, Path], tmp_path: Path
) -> None:
    argv = [*shared, *flags(save_steps=25, per_device_train_batch_size=BATCH, output_dir=tmp_path / "out")]
    assert launched("cpu_dual", *argv, env={"HF_ROCM_TUNE_CRASH": "step=30,kind=kill"}).returncode != 0
    again = launched("cpu_dual_fsdp2", *argv)
    assert again.returncode == 0, again.stderr[-3000:]
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(outputs[1]), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama3", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "window", [{}, {"one_pass_loss": True}, {"gradient_accumulation_steps": 2, "packing": True, "lora_r": 3}]
)
def test_lora_like_one_process(
    arch: str,
    window: dict[str, object],
    shared: list[str],
    server: CommandServer,
    model_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    more = {
        "eval_strategy": "steps",
        "eval_steps": 25,
        "per_device_eval_batch_size": 1,
        "activation_checkpointing": True,
    }
    argv = [*shared, *flags(**window, **more, save_steps=STEPS, model_name_or_path=model_of(arch))]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = server.run(*argv, *flags(per_device_train_batch_size=2 * BATCH, output_dir=one))
    assert alone.code == 0, alone.stderr[-3000:]
    sharded = flags(per_device_train_batch_size=BATCH, output_dir=two)
    for each in ranks(server, tmp_path, *argv, *sharded, env=FSDP2):
        assert each.code == 0, each.stderr[-3000:]
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    assert report_of(two)["coverage"]["unverified"] == []


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_qlora_like_ddp(accumulation: int, shared: list[str], server: CommandServer, tmp_path: Path) -> None:
    argv = [*shared, *flags(**QLORA, gradient_accumulation_steps=accumulation, save_steps=STEPS)]
    argv += flags(per_device_train_batch_size=BATCH)
    outputs = {"ddp": tmp_path / "ddp", "fsdp2": tmp_path / "fsdp2"}
    for way, output in outputs.items():
        env = FSDP2 if way == "fsdp2" else {}
        for each in ranks(server, tmp_path, *argv, *flags(output_dir=output), env=env):
            assert each.code == 0, each.stderr[-3000:]
    assert losses_of(outputs["fsdp2"]) == pytest.approx(losses_of(outputs["ddp"]), rel=1e-3)
    ddp, sharded = (report_of(output) for output in outputs.values())
    assert sharded["coverage"]["unverified"] == [] and sharded["frozen"]["mismatches"] == 0
    # packed weights and their constants are watched, as under DDP: all of them, in each rank's own part
    assert sharded["frozen"]["tensors"] == ddp["frozen"]["tensors"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("kind=after,stage=weights,tensor=*embed_tokens*,count=1", 0, ""),
        ("kind=after,stage=weights,tensor=*embed_tokens*", 3, "embed_tokens.weight do not make the tensor"),
        ("kind=flip,stage=gathered,first=20,count=1", 3, "gathered from the other cards arrived wrong"),
        ("kind=zero,stage=gradients,first=3,count=2", 0, ""),
        ("kind=zero,stage=gradients,first=3,persist=1", 3, "averaging it again through the host failed too"),
    ],
)
def test_faults_between_the_ranks(
    fault: str, code: int, says: str, shared: list[str], server: CommandServer, tmp_path: Path
) -> None:
    argv = [*shared, *flags(max_steps=4, save_strategy="no", per_device_train_batch_size=BATCH)]
    output = tmp_path / "out"
    ended = ranks(server, tmp_path, *argv, *flags(output_dir=output), env={**FSDP2, "HF_ROCM_TUNE_FAULT": fault})
    assert [each.code for each in ended] == [code, code], [each.stderr[-1500:] for each in ended]
    assert any(says in each.stderr for each in ended)
    if code == 0:
        found = report_of(output)
        assert found["incidents"] and all(row["outcome"] == "recovered" for row in found["incidents"])
