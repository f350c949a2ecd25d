"""Tests of the tests: with one wait taken out of the engine the corruption is there, and the digests see it.

Each proof runs twice: as shipped, where nothing may be wrong, and with the wait removed, where something must be. On
the CPU a held copy engine makes the race certain; on an accelerator a delay kernel does.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.transfer import (
    AcceleratorBackend,
    FaultSpec,
    HostBackend,
    Mover,
    TransferSettings,
    digest,
)
from hf_rocm_tune.transfer.backend import Label, PendingDigest, Ticket
from hf_rocm_tune.transfer.damage import POISON

CPU = torch.device("cpu")
ONE_SLOT = TransferSettings(slots=1, slot_bytes=1 << 20)
ONE_SLOT_UNVERIFIED = TransferSettings(slots=1, slot_bytes=1 << 20, verify="off")
DELAY_CYCLES = 200_000_000


class NoWait:
    """A ticket that says its copy has ended, whether it has or not."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def done(self) -> bool:
        return True

    def join(self) -> None:
        return None

    def wait(self) -> None:
        self.ticket.wait()


class Held(HostBackend):
    """A copy engine that does nothing until it is let go, and memory that holds poison until it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        return super().allocate(nbytes, long_lived=long_lived).fill_(POISON)

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        assert self.go.wait(20)
        super()._copy_now(target, source)

    def release_soon(self) -> None:
        threading.Timer(0.1, self.go.set).start()


class HeldWithoutSlotWait(Held):
    """The event that guards a slot is not waited for."""

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        return NoWait(super().copy(target, source, label, blocking=blocking))


class HeldWithoutHandOutWait(Held):
    """The consumer does not wait for the copy."""

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        return None


class HeldWithDigestBeside(Held):
    """The digest is taken at once, beside the copies, instead of after them in the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._beside = ThreadPoolExecutor(1)

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        found = digest(target, word_offset=word_offset)
        self.go.set()  # only now can the copy run
        return self._beside.submit(lambda: found)

    def close(self) -> None:
        super().close()
        self._beside.shutdown()


def send_while_held(mover: Mover, backend: Held) -> list[tuple[Tensor, Tensor]]:
    """Sources and arrivals of four batches that are begun while no copy can run, through one slot."""
    sources = [torch.full((500,), value) for value in range(1, 5)]
    arrived: list[list[Tensor]] = []
    sender = threading.Thread(target=lambda: arrived.extend(mover.begin([source]) for source in sources))
    sender.start()
    # Without the wait it gets through by itself; with it, it stands before the slot until the copies may run.
    sender.join(20 if isinstance(backend, HeldWithoutSlotWait) else 0.2)
    backend.go.set()
    sender.join(20)
    for batch in arrived:
        mover.settle(batch)
    return [(source, batch[0]) for source, batch in zip(sources, arrived, strict=True)]


@pytest.mark.parametrize(("backend", "broken"), [(Held, False), (HeldWithoutSlotWait, True)])
def test_a_slot_that_is_reused_too_early_is_seen_by_the_digests(backend: type[Held], broken: bool) -> None:
    copies = backend()
    with Mover(CPU, settings=ONE_SLOT, backend=copies) as mover:
        pairs = send_while_held(mover, copies)
        mismatches = mover.report.to_dict()["batches"]["mismatches"]
    # All but the last were overwritten by a later batch in the slot; the ladder then sent them again.
    assert mismatches == (3 if broken else 0)
    assert all(torch.equal(source, arrived) for source, arrived in pairs)


@pytest.mark.parametrize(("backend", "wrong"), [(Held, 0), (HeldWithoutSlotWait, 3)])
def test_without_verification_the_same_reuse_reaches_the_model(backend: type[Held], wrong: int) -> None:
    copies = backend()
    with Mover(CPU, settings=ONE_SLOT_UNVERIFIED, backend=copies) as mover:
        pairs = send_while_held(mover, copies)
    assert sum(digest(source) != digest(arrived) for source, arrived in pairs) == wrong


@pytest.mark.parametrize(("backend", "broken"), [(Held, False), (HeldWithoutHandOutWait, True)])
def test_a_consumer_that_does_not_wait_reads_what_never_arrived(backend: type[Held], broken: bool) -> None:
    copies = backend()
    source = torch.arange(1, 900)
    with Mover(CPU, settings=ONE_SLOT_UNVERIFIED, backend=copies) as mover:
        arrived = mover.begin([source])
        if not broken:
            copies.release_soon()
        mover.settle(arrived)
        seen = digest(arrived[0])
        copies.go.set()
    assert (seen != digest(source)) == broken


@pytest.mark.parametrize(("backend", "broken"), [(Held, False), (HeldWithDigestBeside, True)])
def test_a_digest_that_does_not_wait_for_its_copy_gives_a_bad_verdict(backend: type[Held], broken: bool) -> None:
    copies = backend()
    with Mover(CPU, settings=ONE_SLOT, backend=copies) as mover:
        arrived = mover.begin([torch.arange(1, 900)])
        if not broken:
            copies.release_soon()
        mover.settle(arrived)
        assert bool(mover.report.incidents) == broken


def test_a_late_copy_does_not_land_before_the_digest_of_its_own_batch() -> None:
    # Two chunks: the fault in the first must not be undone by the sending of the second.
    settings = TransferSettings(slots=2, slot_bytes=4096)
    with Mover(CPU, settings=settings, faults=FaultSpec(kind="late", tensor="first")) as mover:
        for value in range(1, 20):
            batch = {"first": torch.full((100,), value), "second": torch.full((1000,), value)}
            arrived = mover.begin(batch)
            mover.settle(arrived)
            assert torch.equal(arrived["first"], batch["first"])
        faults = mover.fault_injection()
        assert faults is not None
        assert faults["injected"] == len(mover.report.incidents) > 10


# ---- the same on an accelerator ---------------------------------------------------------------------------------


class WithoutSlotWait(AcceleratorBackend):
    """The event that guards a slot is not waited for."""

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        return NoWait(super().copy(target, source, label, blocking=blocking))


class WithoutConsumerWait(AcceleratorBackend):
    """The consumer's stream does not wait for the copy's event."""

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))


class WithoutRecord(AcceleratorBackend):
    """Batch memory is given away while kernels of the consumer's stream still have to read it."""

    def hand_out(self, buffer: Tensor, ticket: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket.event)


class WithoutProducerWait(AcceleratorBackend):
    """The copy stream does not wait for the kernels that still use the memory it was given."""

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self._stream)
        return buffer


def on_device(backend: type[AcceleratorBackend], settings: TransferSettings) -> tuple[Mover, AcceleratorBackend]:
    copies = backend(torch.device("cuda"))
    return Mover(copies.device, settings=settings, backend=copies), copies


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "broken"), [(AcceleratorBackend, False), (WithoutSlotWait, True)])
def test_on_the_device_a_slot_that_is_reused_too_early_is_seen(backend: type[AcceleratorBackend], broken: bool) -> None:
    mover, copies = on_device(backend, ONE_SLOT)
    with mover:
        with torch.cuda.stream(copies._stream):
            torch.cuda._sleep(DELAY_CYCLES)
        batches = [[torch.full((100_000,), value)] for value in range(1, 5)]
        for source, arrived in [(batch, mover.begin(batch)) for batch in batches]:
            mover.settle(arrived)
            assert torch.equal(arrived[0].cpu(), source[0])
        assert (mover.report.to_dict()["batches"]["mismatches"] > 0) == broken


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "broken"), [(AcceleratorBackend, False), (WithoutConsumerWait, True)])
def test_on_the_device_a_consumer_that_does_not_wait_reads_what_never_arrived(
    backend: type[AcceleratorBackend], broken: bool
) -> None:
    mover, copies = on_device(backend, ONE_SLOT_UNVERIFIED)
    with mover:
        source = torch.arange(1, 100_000)
        mover.settle(mover.begin([source]))  # the next batch gets this memory again, with these bytes in it
        torch.cuda.synchronize()
        with torch.cuda.stream(copies._stream):
            torch.cuda._sleep(DELAY_CYCLES)
        arrived = mover.begin([source + 1])
        mover.settle(arrived)
        seen = arrived[0].clone()
        torch.cuda.synchronize()
    assert (digest(seen) != digest(source + 1)) == broken


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "broken"), [(AcceleratorBackend, False), (WithoutRecord, True)])
def test_on_the_device_memory_that_is_not_recorded_is_given_away_too_early(
    backend: type[AcceleratorBackend], broken: bool
) -> None:
    mover, _ = on_device(backend, TransferSettings(slots=2, slot_bytes=1 << 20))
    with mover:
        source = torch.full((100_000,), 1)
        arrived = mover.begin([source])
        mover.settle(arrived)
        torch.cuda._sleep(DELAY_CYCLES)
        seen = arrived[0] + 0
        del arrived
        for _ in range(3):
            mover.settle(mover.begin([torch.full((100_000,), 2)]))
        torch.cuda.synchronize()
    assert (digest(seen) != digest(source)) == broken


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "broken"), [(AcceleratorBackend, False), (WithoutProducerWait, True)])
def test_on_the_device_a_copy_that_does_not_wait_is_overwritten_by_an_earlier_kernel(
    backend: type[AcceleratorBackend], broken: bool
) -> None:
    mover, _ = on_device(backend, TransferSettings(slots=2, slot_bytes=8 << 20))
    weight = torch.randint(1, 1000, (4 << 20,), dtype=torch.int16)
    with mover:
        mover.move(weight, name="warm")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        earlier = torch.empty(weight.nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(DELAY_CYCLES)
        earlier.fill_(7)
        del earlier  # its kernel is still queued; the weight gets the same memory
        moved = mover.move(weight, name="weight")
        torch.cuda.synchronize()
        assert (digest(moved) != digest(weight)) == broken
