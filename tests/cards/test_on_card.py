"""Averages of gradients on an accelerator: what it is still writing is waited for, and training is that of stock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.cards.gradients import watch
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest
from tests.cards.gradient_rank import Net

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    gc.collect()  # a process group held in a cycle may abort the interpreter at its end
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_what_the_compute_stream_is_still_writing_is_waited_for(dtype: torch.dtype) -> None:
    settings = TransferSettings(slot_bytes=64 << 10)
    with Mover(DEVICE, settings=settings) as mover:
        averaging = HostAveraging(mover, SyncSettings(method="host"))
        slow = torch.randn(4096, 4096, device=DEVICE)
        for size in (1, 1000, 32_768, 300_001):
            for _ in range(20):
                slow = torch.tanh(slow @ slow)
            local = slow.flatten()[:size].to(dtype)
            average = averaging.begin(local, name="bucket", number=0).wait()
            twice = average * 2  # on the compute stream, which must have waited
            averaging.check()
            assert torch.equal(twice, local * 2)
        crossed = mover.report.to_dict()["buckets"]
    assert crossed["mismatches"] == 0 and crossed["verified_bytes"] == crossed["bytes"] > 0


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("fault", [None, "stage=buckets,kind=zero,rate=0.5", "stage=gradients,kind=flip,rate=0.5"])
@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_training_is_that_of_stock_averages(fault: str | None, compression: str) -> None:
    weights = []
    for way in ("ddp", "host"):
        torch.manual_seed(0)
        net = Net()
        net.unused.requires_grad_(False)
        model = DistributedDataParallel(net.to(DEVICE), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        faults = FaultSpec.parse(fault) if fault and way == "host" else None
        with Mover(DEVICE, faults=faults) as mover:
            check = watch(model, mover, None, SyncSettings(method=way, compression=compression))  # type: ignore[arg-type]
            assert check is not None
            for step in range(1, 6):
                model(
                    torch.randn(8, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(step))
                ).square().mean().backward()
                check.wait_verified(step=step)
                optimizer.step()
                optimizer.zero_grad()
            assert (mover.report.incidents != []) == (faults is not None)
        weights.append({name: digest(weight.detach()).hex() for name, weight in net.named_parameters()})
    assert weights[0] == weights[1]
