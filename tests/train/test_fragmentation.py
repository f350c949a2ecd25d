"""The cache is given back when recorded counters say that a request would soon fail, and in no healthy state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_rocm_tune.train.device_memory import (
    LOOK_EVERY,
    AllocatorReading,
    FragmentationCallback,
    read,
    reason_to_empty,
)
from hf_rocm_tune.transfer import TransferReport

GIB = 2**30
# The card's size and the 7.10 GiB that were reserved and not allocated when a request failed are those of
# pytorch#138002; what is not told there is made up around them.
FULL = AllocatorReading(
    total=int(19.92 * GIB),
    free=int(0.4 * GIB),
    allocated=int(11.98 * GIB),
    allocated_peak=int(12.4 * GIB),
    reserved=int(19.08 * GIB),
    inactive_split=int(3.2 * GIB),
    retries=0,
)


def test_a_pool_full_of_what_was_never_in_use_is_given_back_before_a_request_fails() -> None:
    reason = reason_to_empty(FULL, None)
    assert reason is not None and "6.7 GiB are reserved beyond" in reason and "0.4 GiB are left" in reason


@pytest.mark.parametrize(
    "healthy",
    [
        {"free": 4 * GIB},  # the driver has enough to give
        {"allocated_peak": int(18.9 * GIB)},  # a step needs nearly all of it: activations come back to the pool
        {"allocated_peak": int(19.08 * GIB), "allocated": 1 * GIB},
    ],
)
def test_a_healthy_run_keeps_its_cache(healthy: dict[str, int]) -> None:
    assert reason_to_empty(FULL._replace(**healthy), FULL._replace(**healthy)) is None


def test_an_allocator_that_had_to_give_back_its_cache_within_a_step_is_helped_between_steps() -> None:
    healthy = FULL._replace(free=4 * GIB)
    troubled = healthy._replace(retries=3)
    assert "3 allocations succeeded only after" in (reason_to_empty(troubled, healthy) or "")
    assert reason_to_empty(troubled, troubled) is None  # not again for the same ones
    assert reason_to_empty(troubled, None) is None  # of before the run


class Trouble:
    """What is read from step to step; emptying the cache cures it."""

    def __init__(self, readings: list[AllocatorReading]) -> None:
        self.left = readings
        self.emptied = 0

    def read(self, _device: torch.device) -> AllocatorReading:
        return self.left.pop(0)

    def empty(self) -> None:
        self.emptied += 1


def test_the_callback_acts_between_steps_and_then_lets_the_run_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cured = FULL._replace(reserved=int(12.5 * GIB), free=7 * GIB)
    trouble = Trouble([FULL._replace(free=4 * GIB), FULL, cured, FULL, FULL, cured, cured])
    monkeypatch.setattr("hf_rocm_tune.train.device_memory.read", trouble.read)
    monkeypatch.setattr("hf_rocm_tune.train.device_memory.release_memory", trouble.empty)
    monkeypatch.setattr("hf_rocm_tune.train.device_memory.PAUSE", 2 * LOOK_EVERY)
    report = TransferReport()
    callback = FragmentationCallback(torch.device("cuda", 0), report)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    acted = []
    for step in range(1, 5 * LOOK_EVERY + 1):
        before = trouble.emptied
        callback.on_step_end(args, TrainerState(global_step=step), TrainerControl())
        acted += [step] * (trouble.emptied - before)
    assert acted == [2 * LOOK_EVERY, 4 * LOOK_EVERY]  # not at every look, and not before the pause is over
    first = report.incidents[0]
    assert (first["kind"], first["outcome"]) == ("fragmented", "cache given back")
    assert first["returned_bytes"] == FULL.reserved - cured.reserved
    assert report.to_dict()["memory"]["cache_given_back"] == 2
    assert "--train_sampling_strategy group_by_length" in caplog.text


@pytest.mark.gpu
def test_what_an_accelerator_says_adds_up() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = read(device)
    held = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    during = read(device)
    assert during.allocated - before.allocated == held.nbytes
    assert during.allocated <= during.allocated_peak and during.allocated <= during.reserved
    assert during.reserved + during.free <= during.total
    del held
    torch.cuda.empty_cache()
    assert read(device).reserved <= before.reserved
