"""How many batches are on their way changes when a transfer begins, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.command import CommandServer
from tests.e2e.conftest import flags, losses_of, report_of

ADAPTER = "adapter_model.safetensors"


def test_every_depth_trains_the_same_run(
    server: CommandServer, model_of: Callable[[str], Path], messages: Path, tmp_path: Path
) -> None:
    shared = flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=messages,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        max_length=64,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
        check_arithmetic="off",  # a batch that is computed twice is sent twice unless it was on its way
    )
    for depth in (1, 0, 3):
        output = tmp_path / str(depth)
        result = server.run(*shared, *flags(output_dir=output, prefetch_batches=depth))
        assert result.code == 0, result.stderr[-3000:]
        assert (output / ADAPTER).read_bytes() == (tmp_path / "1" / ADAPTER).read_bytes()
        assert losses_of(output) == losses_of(tmp_path / "1") and len(losses_of(output)) == 4
        batches = report_of(output)["batches"]
        assert batches["verified_bytes"] == batches["bytes"] == report_of(tmp_path / "1")["batches"]["bytes"] > 0
    again = server.run(*shared, *flags(output_dir=tmp_path / "1", prefetch_batches=2))
    assert again.code == 0 and "is finished" in again.stdout, "the depth made it another run"
