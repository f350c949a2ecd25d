"""``--cards_way auto``: the plan's way for two simulated cards of different sizes, and a run that follows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests import simcard, tiny
from tests.e2e.conftest import flags, report_of

EFFECTIVE = 4


def command(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        card = simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    variables = {**os.environ, **card, "SIMCARD_DEVICES": "2", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", *argv], env=variables, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def job(model_of: Callable[[str], Path], scratch: Path) -> list[str]:
    """Flags of a job with 128 MiB of weights, more than all else that it needs of a card but the context."""
    root = scratch / "cards-way"
    tokenizer = tiny.build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return flags(
        model_name_or_path=root / "model",
        dataset_name=tiny.write_dataset_dir(root / "data", train=24, test=4),
        output_dir=root / "out",
        max_steps=2,
        max_length=64,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        bf16=False,
        dtype="float32",
        eval_strategy="no",
        doctor="off",
        report_to="none",
        disable_tqdm=True,
    )


@pytest.mark.parametrize(
    ("megabytes", "way", "wanted"),
    [
        (770, "tensor", ["--accelerate_config", "dual_rx7900xt", "--tensor_parallel", "true"]),
        (820, "fsdp2", ["--accelerate_config", "dual_rx7900xt_fsdp2"]),
        (2000, "ddp", ["--accelerate_config", "dual_rx7900xt"]),
    ],
)
def test_the_way_follows_from_the_memory_and_the_effective_batch_stays(
    job: list[str], megabytes: int, way: str, wanted: list[str]
) -> None:
    done = command("hf_rocm_tune.job.cards", *job, SIMCARD_CAPACITY=f"{megabytes}000000", HF_ROCM_TUNE_SPLIT="1")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["why"].startswith(f"{way}: ") and found["flags"][: len(wanted)] == wanted
    given = dict(zip(found["flags"][len(wanted) :: 2], found["flags"][len(wanted) + 1 :: 2], strict=True))
    sequences = int(given["--per_device_train_batch_size"]) * int(given["--gradient_accumulation_steps"])
    assert sequences * (2 if way in ("ddp", "fsdp2") else 1) == EFFECTIVE


@pytest.mark.parametrize(
    ("megabytes", "way", "judged", "batch"),
    [
        (2000, "ddp: lora fits on each card", "ddp", "accumulated x 2 = 4 effective"),
        pytest.param(820, "fsdp2: lora does not fit", "fsdp2", "accumulated x 2 = 4 effective", marks=pytest.mark.long),
        pytest.param(
            770, "tensor: lora does not fit", "tensor_parallel", "accumulated x 1 = 4 effective", marks=pytest.mark.long
        ),
    ],
)
def test_the_launcher_starts_the_job_in_that_way(
    job: list[str], megabytes: int, way: str, judged: str, batch: str, tmp_path: Path
) -> None:
    out = flags(output_dir=tmp_path / "out", preflight="off")
    done = command("hf_rocm_tune", "sft", *job, *out, "--cards_way", "auto", SIMCARD_CAPACITY=f"{megabytes}000000")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"# hf-rocm-tune: --cards_way {way}" in done.stdout and batch in done.stdout
    report = report_of(tmp_path / "out")
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    assert report["grad_sync"]["way"] == judged


@pytest.mark.parametrize(
    ("argv", "devices", "said"),
    [
        (["--cards_way", "auto"], "1", "needs two visible cards, and there are 1"),
        (["--cards_way", "auto", "--split_layers", "4,4"], "2", "chooses --split_layers: leave out"),
        (["--cards_way", "auto", "--num_processes", "2"], "2", "and so does --num_processes; keep one"),
        (["--cards_way", "split"], "2", "there is only `auto`"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(job: list[str], argv: list[str], devices: str, said: str) -> None:
    done = command("hf_rocm_tune", "sft", *job, *argv, SIMCARD_DEVICES=devices)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr[-2000:]


def test_where_no_way_fits_it_ends_with_code_5(job: list[str]) -> None:
    done = command("hf_rocm_tune", "sft", *job, "--cards_way", "auto", SIMCARD_CAPACITY="600000000")
    assert done.returncode == 5 and "--cards_way auto: none of these fits" in done.stderr
