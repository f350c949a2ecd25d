"""Two processes with shares 3:1 train like one process with the whole batch, and so does what continues such a run.

The rows of every micro-step are the same and the loss is divided by the label tokens of all ranks, so what differs is
the order of float sums and how far a batch is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.two_ranks import environments

STEPS = 8
ROWS = 24  # three batches an epoch; what Accelerate does where they do not come out is tests/data/test_batch_shares.py


@pytest.fixture(scope="module")
def shared(model_of: Callable[[str], Path], scratch: Path) -> list[str]:
    return flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(scratch / "batch-shares", train=ROWS, test=4),
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        max_length=64,
        learning_rate=0.01,
        lora_dropout=0.0,
        logging_steps=1,
        save_steps=4,
        disable_tqdm=True,
    )


def ranks(server: CommandServer, argv: list[str], **env: str) -> list[Result]:
    """Both ranks of a job, to their ends."""
    exit_file = Path(argv[argv.index("--output_dir") + 1]).with_suffix(".exit.json")
    running = [server.start(*argv, env=each) for each in environments(exit_file, **env)]
    return [each.wait() for each in running]


def test_shares_of_three_to_one_train_like_one_process(shared: list[str], server: CommandServer, scratch: Path) -> None:
    one, two = scratch / "whole-batch", scratch / "three-to-one"
    whole = server.start(*shared, *flags(per_device_train_batch_size=8, output_dir=one))
    argv = [*shared, *flags(per_device_train_batch_size=4, output_dir=two, batch_shares="3:1")]
    ended = [*ranks(server, argv), whole.wait()]
    assert [each.code for each in ended] == [0, 0, 0], [each.stderr[-3000:] for each in ended]
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-5)
    assert len(losses_of(two)) == STEPS
    state = {out: json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text()) for out in (one, two)}
    tokens = {out: [row["num_tokens"] for row in state[out]["log_history"] if "num_tokens" in row] for out in state}
    assert tokens[one] == tokens[two], "the rows of every step are the same"
    for name, tensor in load_file(one / "adapter_model.safetensors").items():
        other = load_file(two / "adapter_model.safetensors")[name]
        torch.testing.assert_close(other, tensor, rtol=1e-3, atol=1e-4)
    assert report_of(two)["batch_rows"] == [6, 2] and report_of(one)["batch_rows"] is None


@pytest.mark.long
def test_a_run_with_shares_goes_on_from_its_checkpoint_where_it_was(
    shared: list[str], server: CommandServer, scratch: Path
) -> None:
    straight, killed = scratch / "shares-straight", scratch / "shares-killed"
    wanted = [*shared, *flags(per_device_train_batch_size=4, batch_shares="3:1")]
    assert [result.code for result in ranks(server, [*wanted, *flags(output_dir=straight)])] == [0, 0]
    first, other = ranks(server, [*wanted, *flags(output_dir=killed)], HF_ROCM_TUNE_CRASH="step=6,kind=kill")
    assert first.code == -9 and other.code != 0
    assert [result.code for result in ranks(server, [*wanted, *flags(output_dir=killed)])] == [0, 0]
    assert losses_of(killed) == pytest.approx(losses_of(straight), rel=1e-6)
    moments = [report_of(output).get("optimizer", {}).get("tensors", 0) for output in (straight, killed)]
    assert moments[0] == 0 < moments[1], "the optimizer's state came from the checkpoint"


@pytest.mark.long
def test_measured_shares_give_every_row_to_some_rank(shared: list[str], server: CommandServer, scratch: Path) -> None:
    out = scratch / "shares-auto"
    argv = [*shared, *flags(per_device_train_batch_size=4, batch_shares="auto", output_dir=out)]
    results = ranks(server, argv)
    assert [result.code for result in results] == [0, 0], results[0].stderr[-3000:]
    assert "TFLOP/s" in results[0].stdout
    rows = report_of(out)["batch_rows"]
    assert sum(rows) == 8 and min(rows) >= 1


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (flags(batch_shares="3:1"), "this job has one: leave it out"),
        (flags(batch_shares="three"), "whole numbers such as 3:1"),
        (flags(batch_shares="0:1"), "whole numbers such as 3:1"),
    ],
)
def test_shares_that_mean_nothing_are_refused(
    wanted: list[str], words: str, shared: list[str], server: CommandServer, tmp_path: Path
) -> None:
    result = server.run(*shared, *wanted, *flags(output_dir=tmp_path / "out"))
    assert result.code == 2 and len(result.error_lines) == 1 and words in result.error_lines[0]
