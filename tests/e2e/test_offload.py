"""8-bit and paged optimizers survive a kill bit for bit; offloaded activations are verified.

What only an accelerator has (pages that the driver moves) is marked `gpu`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune.survive import saved_state as restoring
from tests.e2e.conftest import Job, MakeJob, assert_same_run, losses_of, report_of, sampled

# From 4,096 elements on bitsandbytes keeps state in 8 bits (`min_8bit_size`): 64 x 64 of the attention's matrices.
RANK = 64


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("offload", train=12, num_train_epochs=3, gradient_accumulation_steps=2, lora_r=RANK, save_steps=2)


def saved_state(directory: Path) -> dict[str, Any]:
    """Every leaf of ``optimizer.pt``."""
    return dict(restoring.leaves(torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True)))


@pytest.mark.parametrize(
    "optim", sampled(["adamw_8bit", "paged_adamw_8bit", "lion_8bit", "paged_adamw_32bit"], "adamw_8bit")
)
def test_a_killed_run_goes_on_bit_for_bit(job: Job, tmp_path: Path, optim: str) -> None:
    whole, output = job.clean(optim=optim), tmp_path / "out"
    first, last = losses_of(whole)[0], losses_of(whole)[-1]
    assert last < first - 0.1, "it trains"
    state = saved_state(whole / "checkpoint-9")
    kinds = {value.dtype for value in state.values() if torch.is_tensor(value)}
    assert (torch.uint8 in kinds) == ("8bit" in optim)
    assert job.run(output, crash="step=5,kind=kill", optim=optim).code == -signal.SIGKILL
    result = job.done(output, optim=optim)
    assert_same_run(output, whole)
    assert report_of(output)["optimizer"]["tensors"] > 0, "its state came through the mover"
    again = saved_state(output / "checkpoint-9")
    assert state.keys() == again.keys()
    for name, value in state.items():
        same = torch.equal(value, again[name]) if torch.is_tensor(value) else value == again[name]
        assert same, name
    assert "not:" not in result.stdout.splitlines()[-1], "on a CPU nothing is offloaded"


@pytest.mark.gpu
def test_on_an_accelerator_it_asks_for_consent_and_is_named(job: Job, tmp_path: Path) -> None:
    """Not run here: the transfers exist on an accelerator only."""
    refused = job.run(tmp_path / "out", optim="paged_adamw_8bit")
    assert refused.code == 2
    assert "consent" in refused.error_lines[0] and "paged_adamw_8bit" in refused.error_lines[0]
    job.done(tmp_path / "out", "--consent_unverified", optim="paged_adamw_8bit")
    named = json.dumps(report_of(tmp_path / "out")["coverage"]["unverified"])
    assert "paged_adamw_8bit" in named


@pytest.mark.gpu
def test_paged_state_is_paged_again_after_a_resume() -> None:
    """Not run here: on a CPU bitsandbytes pages nothing."""
    from bitsandbytes.optim import PagedAdamW8bit

    parameter = torch.nn.Parameter(torch.randn(400, 400, device="cuda"))
    saved = PagedAdamW8bit([parameter], lr=1e-3)
    parameter.grad = torch.randn_like(parameter)
    saved.step()
    state = {key: value.clone() for key, value in saved.state[parameter].items() if torch.is_tensor(value)}
    fresh = PagedAdamW8bit([parameter], lr=1e-3)
    fresh.load_state_dict(saved.state_dict(), move_to_device=False)
    restoring._place_paged(fresh, lambda tensor, *, name, stage: tensor.cuda())
    assert all(getattr(fresh.state[parameter][name], "is_paged", False) for name in ("state1", "state2"))
    assert all(torch.equal(fresh.state[parameter][name].cpu(), value.cpu()) for name, value in state.items())
