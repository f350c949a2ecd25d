"""Slots, and tests of the tests: with one wait taken out of the engine the corruption is there, and digests see it.

Each proof runs twice: as shipped, where nothing may be wrong, and with the wait removed, where something must be. A
held copy engine makes the race certain; `mutants_on_card` does the same on a card.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.transfer import (
    FaultSpec,
    HostBackend,
    Mover,
    Ring,
    TransferSettings,
    digest,
)
from hf_rocm_tune.transfer.backend import Label, Queued
from hf_rocm_tune.transfer.damage import POISON

CPU = torch.device("cpu")
ONE_SLOT = TransferSettings(slots=1, slot_bytes=1 << 20)
ONE_SLOT_UNVERIFIED = TransferSettings(slots=1, slot_bytes=1 << 20, verify="off")


class NoWait:
    """A ticket that says its copy has ended, whether it has or not."""

    def __init__(self, ticket: Queued) -> None:
        self.ticket = ticket

    def done(self) -> bool:
        return True

    def join(self) -> None:
        return None

    def result(self) -> None:
        self.ticket.result()


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

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Queued:
        return NoWait(super().copy(target, source, label, blocking=blocking))


class HeldWithoutHandOutWait(Held):
    """The consumer does not wait for the copy."""

    def hand_out(self, buffer: Tensor, ticket: Queued) -> None:
        return None


class HeldWithDigestBeside(Held):
    """The digest is taken at once, beside the copies, instead of after them in the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._beside = ThreadPoolExecutor(1)

    def digest(self, target: Tensor, word_offset: int = 0) -> Queued:
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
        mover.wait_verified(batch)
    return [(source, batch[0]) for source, batch in zip(sources, arrived, strict=True)]


@pytest.mark.parametrize(("backend", "broken"), [(Held, False), (HeldWithoutSlotWait, True)])
def test_a_slot_that_is_reused_too_early_is_seen_by_the_digests(backend: type[Held], broken: bool) -> None:
    copies = backend()
    with Mover(CPU, settings=ONE_SLOT, backend=copies) as mover:
        pairs = send_while_held(mover, copies)
        mismatches = mover.report.to_dict()["batches"]["mismatches"]
    # All but the last were overwritten by a later batch in the slot; the retry policy then sent them again.
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
        mover.wait_verified(arrived)
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
        mover.wait_verified(arrived)
        assert bool(mover.report.incidents) == broken


def test_a_late_copy_does_not_land_before_the_digest_of_its_own_batch() -> None:
    # Two chunks: the fault in the first must not be undone by the sending of the second.
    settings = TransferSettings(slots=2, slot_bytes=4096)
    with Mover(CPU, settings=settings, faults=FaultSpec(kind="late", tensor="first")) as mover:
        for value in range(1, 20):
            batch = {"first": torch.full((100,), value), "second": torch.full((1000,), value)}
            arrived = mover.begin(batch)
            mover.wait_verified(arrived)
            assert torch.equal(arrived["first"], batch["first"])
        faults = mover.fault_injection()
        assert faults is not None
        assert faults["injected"] == len(mover.report.incidents) > 10


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
        mover.wait_verified(kept)
        assert torch.equal(kept["x"], torch.arange(3000))
