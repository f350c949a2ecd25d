"""Two processes that compute each layer together train like one, resume exactly, and let nothing wrong pass.

Both ranks get the same batches, so the batch is that of one process. Sums of two halves are rounded otherwise than one
sum: in float32 losses are within 1e-5 of each other and gradient norms within 1e-4, over 50 steps; adapters, in which
Adam turns a last bit into more where a gradient is near zero, within 1e-3.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, losses_of, report_of
from tests.e2e.test_fsdp import launched, ranks

BATCH, STEPS = 4, 50
TOGETHER = ["--tensor_parallel", "true"]


@pytest.fixture(scope="module")
def shared(model_of: Callable[[str], Path], scratch: Path) -> list[str]:
    """Flags of all runs; without steps between saves and output directory."""
    return flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(scratch / "tensor-parallel", train=BATCH * STEPS, test=5),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        max_length=64,
        learning_rate=0.005,
        lora_dropout=0.0,
        logging_steps=1,
        disable_tqdm=True,
    )


@pytest.fixture(scope="module")
def outputs(shared: list[str], server: CommandServer, scratch: Path) -> tuple[Path, Path]:
    """Output directories of one process and of two that compute each layer together."""
    one, two = scratch / "tp-one", scratch / "tp-two"
    save = flags(save_steps=25)
    for done in ranks(server, scratch / "tp-job", *shared, *save, *TOGETHER, *flags(output_dir=two), env={}):
        assert done.code == 0, done.stderr[-3000:]
    result = server.run(*shared, *save, *flags(output_dir=one))
    assert result.code == 0, result.stderr[-3000:]
    return one, two


def _rows(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "loss" in row]


def test_the_trajectory_is_that_of_one_process(outputs: tuple[Path, Path]) -> None:
    one, two = (_rows(output) for output in outputs)
    assert len(one) == len(two) == STEPS
    assert one[0]["loss"] - one[-1]["loss"] > 0.1  # it learned: a frozen trajectory would agree as well
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
        assert theirs["num_tokens"] == ours["num_tokens"]
    adapters = [load_file(output / "adapter_model.safetensors") for output in outputs]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], tensor, rtol=1e-3, atol=1e-3)


def test_the_report_covers_parts_and_counts_what_crossed(outputs: tuple[Path, Path]) -> None:
    one, two = (report_of(output) for output in outputs)
    assert two["ranks"] == 2 and two["grad_sync"]["way"] == "tensor_parallel"
    assert two["coverage"]["unverified"] == []
    assert two["coverage"]["verified_bytes"] == two["coverage"]["device_bytes"]
    # of 7 layers in each of 2 blocks, half of the weights on each rank; embeddings, head and norms on both
    whole = sum(each.nbytes for name, each in load_file(model_files(one)).items() if "_proj" not in name)
    assert two["weights"]["bytes"] == one["weights"]["bytes"] + whole
    assert two["gathered"]["checked"] > 0
    assert two["gathered"]["mismatches"] == two["frozen"]["mismatches"] == 0
    assert two["frozen"]["tensors"] == 2 * one["frozen"]["tensors"]
