"""Slots are not rewritten before their copies end, stay bounded, and survive whatever happens to a batch."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.transfer import HostBackend, Mover, Ring, TransferSettings

CPU = torch.device("cpu")


class HeldBackend(HostBackend):
    """A copy engine that does nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        assert self.go.wait(20)
        super()._copy_now(target, source)


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_slot_is_not_rewritten_before_its_copy_has_ended(verify: str) -> None:
    backend = HeldBackend()
    # Verification must not be what saves it: with the wait removed, "full" shows mismatches and "off" wrong bytes.
    with Mover(CPU, backend=backend, settings=TransferSettings(slots=1, verify=verify)) as mover:
        batches = [{"x": torch.full((64,), value)} for value in range(4)]
        moved: list[dict[str, Tensor]] = []
        sender = threading.Thread(target=lambda: moved.extend(mover.begin(batch) for batch in batches))
        sender.start()
        sender.join(0.3)
        backend.go.set()
        sender.join(20)
        for batch, arrived in zip(batches, moved, strict=True):
            mover.settle(arrived)
            assert torch.equal(batch["x"], arrived["x"])
        assert mover.report.to_dict()["batches"]["mismatches"] == 0


def test_settle_waits_for_the_copy() -> None:
    backend = HeldBackend()
    with Mover(CPU, backend=backend) as mover:
        batch = mover.begin({"x": torch.arange(100)})
        assert mover.is_pending(batch["x"])
        assert not mover.was_verified(batch["x"])
        waiter = threading.Thread(target=mover.settle, args=(batch,))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        assert mover.is_pending(batch["x"])
        backend.go.set()
        waiter.join(20)
        assert mover.was_verified(batch["x"])
        assert torch.equal(batch["x"], torch.arange(100))


def test_memory_is_bounded_and_reused() -> None:
    made: list[int] = []

    class Counting(HostBackend):
        staging_grows = False

        def staging(self, nbytes: int) -> Tensor:
            made.append(nbytes)
            return super().staging(nbytes)

    with Mover(CPU, backend=Counting(), settings=TransferSettings(slots=3, slot_bytes=4096)) as mover:
        weight = torch.randn(100_000)
        for _ in range(5):
            assert torch.equal(mover.move(weight, name="w"), weight)
    assert made == [4096] * len(made)
    assert len(made) <= 3


def test_an_exception_while_packing_gives_the_slot_back() -> None:
    backend = HostBackend()
    ring = Ring(backend, slot_bytes=4096, slots=1)
    for _ in range(3):
        with pytest.raises(KeyError), ring.slot(100):
            raise KeyError
    with ring.slot(4096) as (_, memory):
        assert memory.numel() == 4096
    backend.close()


def test_abandoned_batches_leave_the_ring_usable() -> None:
    with Mover(CPU, settings=TransferSettings(slots=2, slot_bytes=4096)) as mover:
        for number in range(50):
            mover.begin({"x": torch.full((3000,), number)})
        kept = mover.begin({"x": torch.arange(3000)})
        mover.settle(kept)
        assert torch.equal(kept["x"], torch.arange(3000))


def test_many_threads_at_once() -> None:
    failures: list[BaseException] = []

    def work(mover: Mover, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for number in range(40):
                size = int(torch.randint(0, 9000, (), generator=generator))
                weight = torch.randn(size, generator=generator)
                assert torch.equal(mover.move(weight, name=f"{seed}.{number}"), weight)
        except BaseException as error:
            failures.append(error)

    with Mover(CPU, settings=TransferSettings(slots=2, slot_bytes=8192)) as mover:
        threads = [threading.Thread(target=work, args=(mover, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        weights = mover.report.to_dict()["weights"]
    assert not failures
    assert weights["tensors"] == 320
    assert weights["verified_bytes"] == weights["bytes"]
    assert not weights["mismatches"]
