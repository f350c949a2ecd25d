"""What waits in host memory for backward comes back bit for bit, or not at all."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.train.offload import STAGE, ActivationOffload
from hf_rocm_tune.transfer import Mover
from tests import simcard
from tests.train.offloaded import MUTANTS, llama, mover_of, same, steps

CPU = torch.device("cpu")
IDS = torch.ones(8, 256, dtype=torch.long)
SCRIPT = Path(__file__).with_name("offloaded.py")


def offload(model: Any, mover: Mover, **more: Any) -> ActivationOffload:
    return ActivationOffload(model, mover, **{"smallest_bytes": 4096, **more})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_are_those_without(checkpointing: bool) -> None:
    with mover_of(CPU) as mover:
        model = llama(mover, layers=12, checkpointing=checkpointing)
        plain = steps(model, mover, None)
        assert same(plain, steps(model, mover, offload(model, mover)))
        counted = mover.report.to_dict()[STAGE]
    # Each layer's input: 4 rows, 64 wide, float32; half of what is on its way may still be on the device.
    assert counted["verified_bytes"] == counted["bytes"] > 12 * 4 * 64 * 4 * (96 + 128 + 160)
    assert counted["mismatches"] == 0


def counted(offloading: ActivationOffload, mover: Mover) -> Any:
    """The counters, when all that is on its way is proven."""
    with offloading:
        pass
    return mover.report.to_dict()[STAGE]


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Views, transposed and expanded ones of one storage, and results that are saved themselves."""
    moved = tensor * 2
    top, bottom = moved.chunk(2)
    wide = bottom.t().sin().t()[:, None].expand(-1, 3, -1)
    return (top.exp() * bottom).sum() + (wide * wide).sum() + moved.sigmoid().prod(0).sum() + (top[1:] ** 3).sum()


def test_views_come_back_as_views_and_a_storage_crosses_once() -> None:
    tensor = torch.randn(64, 40, requires_grad=True)
    shared(tensor).backward()
    right, tensor.grad = tensor.grad, None
    with mover_of(CPU) as mover:
        offloading = offload(torch.nn.Linear(1, 1), mover)
        with offloading:
            result = shared(tensor)
        with offloading:  # gives up what the device still has
            pass
        crossed = mover.report.to_dict()[STAGE]["tensors"]
        result.backward()
        # tensor * 2, exp, sin of the lower half, sigmoid
        assert crossed == 4 and mover.report.to_dict()[STAGE]["tensors"] == 2 * crossed
    assert tensor.grad is not None and torch.equal(tensor.grad, right)


def saved_by(offloading: ActivationOffload, tensor: torch.Tensor) -> None:
    """Autograd saves this tensor, and no other."""
    with offloading:
        tensor * torch.ones((), requires_grad=True)


@pytest.mark.parametrize("kind", ["activation", "weight", "batch", "parameter", "small", "after the last layer"])
def test_what_lives_on_the_device_stays_there(kind: str) -> None:
    tensor = torch.randn(64, 64) if kind != "small" else torch.randn(4)
    with mover_of(CPU) as mover:
        model = llama(mover, layers=1)
        offloading = offload(model, mover)
        if kind == "weight":
            tensor = mover.move(tensor, name="weight")[1:].requires_grad_()
        elif kind == "batch":
            mover.settle(tensor := mover.begin(tensor))
        elif kind == "parameter":
            tensor = torch.nn.Parameter(tensor)
        elif kind == "after the last layer":
            with offloading, torch.no_grad():
                model(input_ids=torch.ones(1, 4, dtype=torch.long))
                with torch.enable_grad():
                    tensor * torch.ones((), requires_grad=True)
        if kind != "after the last layer":
            saved_by(offloading, tensor)
        assert counted(offloading, mover)["tensors"] == int(kind == "activation")


def test_what_has_no_room_on_the_host_stays(caplog: pytest.LogCaptureFixture) -> None:
    with mover_of(CPU) as mover:
        model = llama(mover)
        plain = steps(model, mover, None)
        offloading = offload(model, mover, limit_bytes=0)
        assert same(plain, steps(model, mover, offloading))
        assert counted(offloading, mover)["tensors"] == 0 == offloading.host_bytes
    assert [record.message for record in caplog.records if "host memory" in record.message] == [
        "--activation_offloading: 0.0 GiB of host memory are in use, the other activations stay on the card"
    ]


def test_host_memory_is_used_again() -> None:
    with mover_of(CPU) as mover:
        model = llama(mover)
        offloading = offload(model, mover)
        steps(model, mover, offloading, 6)
        held = offloading.host_bytes
        # A forward whose backward never comes gives its memory back too.
        for _ in range(40):
            with offloading:
                model(input_ids=IDS)
        gc.collect()
        assert offloading.host_bytes == held == 64 << 20


@pytest.mark.parametrize("kind", ["zero", "zero_range", "flip", "swap", "stale"])
@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_a_fault_on_either_way_is_found_and_recovered(kind: str, way: str) -> None:
    with mover_of(CPU) as mover:
        model = llama(mover)
        plain = steps(model, mover, None)
    fault = f"kind={kind},stage={STAGE},tensor=*.{way},rate=0.5,seed=3,count=9"
    with mover_of(CPU, fault=fault) as mover:
        model = llama(mover)
        assert same(plain, steps(model, mover, offload(model, mover)))
        found, injected = mover.report.to_dict(), mover.fault_injection()
    assert injected is not None and injected["injected"] == 9
    rows = [row for row in found["incidents"] if row["tensor"].endswith(way)]
    assert len(rows) == found[STAGE]["mismatches"] == found[STAGE]["recovered"] == 9
    assert {row["outcome"] for row in rows} == {"recovered"}


@pytest.mark.parametrize("way", ["to_host", "to_device"])
@pytest.mark.parametrize("stop", [False, True])
def test_one_that_stays_wrong_ends_the_run(way: str, stop: bool) -> None:
    settings, often = ({"on_corruption": "stop"}, "count=1") if stop else ({}, "persist=1")
    with mover_of(CPU, fault=f"kind=flip,stage={STAGE},tensor=*.{way},{often}", **settings) as mover:
        model = llama(mover)
        with pytest.raises(CorruptionError, match="--on_corruption stop" if stop else "failed too|gave wrong bytes"):
            steps(model, mover, offload(model, mover))
        assert mover.report.incidents[-1]["outcome"] == ("stopped" if stop else "failed")


def test_host_memory_that_changes_while_it_waits_ends_the_run() -> None:
    with mover_of(CPU) as mover:
        model = llama(mover)
        offloading = offload(model, mover)
        with offloading:
            loss = model(input_ids=IDS, labels=IDS).loss
        offloading._memory._slabs[0].memory[::4096] ^= 1
        with pytest.raises(CorruptionError, match="changed in host memory"):
            loss.backward()
        assert mover.report.incidents[-1]["kind"] == "changed on the host"


@pytest.mark.parametrize(("verify", "share"), [("off", 0.0), ("sample", 0.5)])
def test_as_much_is_verified_as_was_asked_for(verify: str, share: float) -> None:
    with mover_of(CPU, verify=verify, sample_every=3) as mover:
        model = llama(mover)
        plain = steps(model, mover, None)
        offloading = offload(model, mover)
        assert same(plain, steps(model, mover, offloading))
        found = counted(offloading, mover)
    assert found["bytes"] > 0 and found["verified_bytes"] <= share * found["bytes"]
    assert (found["verified_bytes"] > 0) == (share > 0)


def on_card(*mutant: str) -> subprocess.CompletedProcess[str]:
    try:
        environment = {**os.environ, **simcard.environment()}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    # Each task of a stream takes a random time longer, and freed memory is overwritten.
    environment |= {"SIMCARD_DELAYS": "0,100,0,300", "SIMCARD_POISON": "1"}
    command = [sys.executable, str(SCRIPT), *mutant]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_on_a_card_it_halves_the_peak_and_changes_nothing() -> None:
    done = on_card()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["same"] and found["incidents"] == 0
    assert found["verified_bytes"] == found["bytes"] > 0
    assert found["offloaded"] < 0.7 * found["plain"]


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_each_wait_is_needed(mutant: str) -> None:
    done = on_card(mutant)
    assert done.returncode != 0 or not json.loads(done.stdout)["same"]
