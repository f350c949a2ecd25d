"""After the first few batches nothing is allocated and nothing blocks; and loading takes the ring's memory, no more."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.transfer import HostBackend, Mover, TransferSettings
from hf_rocm_tune.transfer.backend import Label, Queued

CPU = torch.device("cpu")
MEMORY_PROBE = Path(__file__).with_name("loading_memory.py")


class Counting(HostBackend):
    """Counts what costs time or memory: allocations, copies that block, reads back, fills. Copies can be held up."""

    def __init__(self, *, grows: bool = False) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.staging_grows = grows
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def staging(self, nbytes: int) -> Tensor:
        self.calls["staging"] += 1
        self.largest = max(self.largest, nbytes)
        return super().staging(nbytes)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        self.calls["allocate"] += 1
        return super().allocate(nbytes, long_lived=long_lived)

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Queued:
        self.calls["blocking copy" if blocking else "copy"] += 1
        return super().copy(target, source, label, blocking=blocking)

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        assert self.go.wait(20)
        super()._copy_now(target, source)

    def fill(self, target: Tensor, value: int) -> None:
        self.calls["fill"] += 1
        super().fill(target, value)

    def digest(self, target: Tensor, word_offset: int = 0) -> Queued:
        self.calls["digest"] += 1
        return super().digest(target, word_offset)

    def read_back(self, target: Tensor) -> Tensor:
        self.calls["read back"] += 1
        return super().read_back(target)


def batch(number: int, length: int = 512) -> dict[str, Tensor]:
    ids = torch.full((4, length), number)
    return {"input_ids": ids, "labels": ids + 1, "attention_mask": torch.ones_like(ids)}


def train_on(mover: Mover, batches: list[dict[str, Tensor]], ahead: int = 2) -> None:
    """Begin some batches ahead of the one that is used, as the loader does."""
    waiting: list[Any] = []
    for source in batches:
        waiting.append((source, mover.begin(source)))
        if len(waiting) > ahead:
            right, arrived = waiting.pop(0)
            mover.wait_verified(arrived)
            assert torch.equal(arrived["labels"], right["labels"])
    for _, arrived in waiting:
        mover.wait_verified(arrived)


@pytest.mark.parametrize("grows", [False, True], ids=["page-locked", "pageable"])
def test_a_batch_costs_one_copy_one_digest_and_no_staging_memory(grows: bool) -> None:
    backend = Counting(grows=grows)
    with Mover(CPU, backend=backend, settings=TransferSettings(slots=4, slot_bytes=1 << 20)) as mover:
        backend.go.clear()
        begun = [mover.begin(batch(number)) for number in range(4)]  # with no copy done, each takes a slot of its own
        backend.go.set()
        mover.wait_verified(begun)
        warm = backend.calls.copy()
        train_on(mover, [batch(number) for number in range(200)])
    assert warm["staging"] == 4
    assert backend.calls - warm == Counter(allocate=200, copy=200, digest=200)


def test_the_digest_of_what_arrives_is_queued_behind_its_copy() -> None:
    """The verdict is there when the batch is used, without a wait for a digest that begins only then."""
    backend = Counting()
    with Mover(CPU, backend=backend) as mover:
        arrived = mover.begin(batch(1))
        assert backend.calls["copy"] == backend.calls["digest"] == 1
        mover.wait_verified(arrived)
        assert backend.calls["digest"] == 1
    assert mover.was_verified(arrived["input_ids"])


def test_memory_of_the_ring_is_bounded_whatever_the_lengths() -> None:
    lengths = [1 + (number * 7919) % 3000 for number in range(300)]
    backend = Counting(grows=True)
    with Mover(CPU, backend=backend, settings=TransferSettings(slots=3, slot_bytes=128 << 10)) as mover:
        train_on(mover, [batch(number, length) for number, length in enumerate(lengths)])
    # Three slots, of which each grows from 64 to 128 KiB, once.
    assert backend.calls["staging"] <= 3 * 2 and backend.largest <= 128 << 10


def test_the_clean_path_never_blocks_on_a_copy_nor_reads_back() -> None:
    backend = Counting()
    with Mover(CPU, backend=backend, settings=TransferSettings(slots=2, slot_bytes=64 << 10)) as mover:
        train_on(mover, [batch(number, 5000) for number in range(10)])
        for number in range(10):
            mover.move(torch.randn(50_001), name=f"layer.{number}")
    assert not {"blocking copy", "read back", "fill"} & set(backend.calls)


def test_host_memory_while_loading_is_the_rings_for_a_checkpoint_twenty_times_larger(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(MEMORY_PROBE), str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["checkpoint_bytes"] >= 20 * found["ring_bytes"]
    assert found["verified_bytes"] >= found["checkpoint_bytes"] - found["header_bytes"]
    assert found["staging_bytes"] <= found["ring_bytes"]
    # One shard's metadata, and what the interpreter allocates meanwhile.
    assert found["peak_bytes"] <= found["ring_bytes"] + found["slack_bytes"], found


@pytest.mark.gpu
def test_on_the_device_no_batch_synchronises_it_or_allocates_from_the_driver() -> None:
    from torch.profiler import ProfilerActivity, profile

    with Mover(torch.device("cuda")) as mover:
        train_on_device(mover, 20)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            train_on_device(mover, 100)
    calls = Counter(event.name for event in trace.events())
    driver = {name: count for name, count in calls.items() if name.startswith(("cuda", "hip"))}
    assert driver, "the trace holds no calls of the driver, so it proves nothing"
    forbidden = ("DeviceSynchronize", "HostAlloc", "HostMalloc", "HostRegister", "cudaMalloc", "hipMalloc", "Free")
    # The profiler itself synchronises the device when it starts and when it stops.
    assert not {name: count for name, count in driver.items() if name.endswith(forbidden) and count > 2}


def train_on_device(mover: Mover, batches: int) -> None:
    """The same number of batches behind a little compute, each waited for one later."""
    weight = torch.randn(512, 512, device="cuda")
    waiting = mover.begin(batch(0))
    for number in range(1, batches):
        following = mover.begin(batch(number))
        mover.wait_verified(waiting)
        weight = torch.tanh(weight @ weight + waiting["labels"].sum())
        waiting = following
    mover.wait_verified(waiting)
