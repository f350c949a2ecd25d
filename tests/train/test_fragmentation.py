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


HEALTHY = FULL._replace(free=4 * GIB)  # the driver has enough to give


@pytest.mark.parametrize(
    ("now", "earlier", "said"),
    [
        (FULL, None, "6.7 GiB are reserved beyond what was ever in use at once, and 0.4 GiB are left"),
        (HEALTHY._replace(retries=3), HEALTHY, "3 allocations succeeded only after"),
        (HEALTHY._replace(retries=3), HEALTHY._replace(retries=3), None),  # not again for the same ones
        (HEALTHY._replace(retries=3), None, None),  # of before the run
        (HEALTHY, HEALTHY, None),
        (FULL._replace(allocated_peak=int(18.9 * GIB)), FULL, None),  # a step needs nearly all of it
    ],
)
def test_the_cache_is_given_back_where_a_request_would_soon_fail(
    now: AllocatorReading, earlier: AllocatorReading | None, said: str | None
) -> None:
    reason = reason_to_empty(now, earlier)
    assert reason is None if said is None else said in str(reason)


def test_the_callback_acts_between_steps_and_then_lets_the_run_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cured = FULL._replace(reserved=int(12.5 * GIB), free=7 * GIB)
    left, emptied = [HEALTHY, FULL, cured, FULL, FULL, cured, cured], list[int]()
    monkeypatch.setattr("hf_rocm_tune.train.device_memory.read", lambda _: left.pop(0))
    monkeypatch.setattr("hf_rocm_tune.train.device_memory.release_memory", lambda: emptied.append(step))
    monkeypatch.setattr("hf_rocm_tune.train.device_memory.PAUSE", 2 * LOOK_EVERY)
    report = TransferReport()
    callback = FragmentationCallback(torch.device("cuda", 0), report)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for step in range(1, 5 * LOOK_EVERY + 1):
        callback.on_step_end(args, TrainerState(global_step=step), TrainerControl())
    assert emptied == [2 * LOOK_EVERY, 4 * LOOK_EVERY]  # not at every look, and not before the pause is over
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
