"""Workloads for the device backend that go wrong when a wait, a ``record_stream`` or a pinned buffer is taken out.

``python mutants_on_card.py full|off [MUTANT ...]`` runs the engine as it is, then with each mutant (all of that mode by
default), and prints one JSON object: name -> what went wrong, or null. On the simulated card every task of a stream
takes a random time longer and freed memory is overwritten; on a real one only the delays of the workloads are there.

What has no mutant here, because it cannot go wrong:

* A fetch that is given up with its copy in flight: the next copy into that slot runs on the same queue, so after it.
  Its source may be given away; what is read of it is used by nobody.
* Early reuse of the memory in which digests land: each digest has its own, from torch's caching host allocator.
* The end of a mover with copies in flight: see `AcceleratorBackend.close`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest
from hf_rocm_tune.transfer.backend import AcceleratorBackend, _EventTicket, _QueuedDigest
from hf_rocm_tune.transfer.digest import DigestReadback
from hf_rocm_tune.transfer.interception import own_copies
from hf_rocm_tune.transfer.staging import Slot
from hf_rocm_tune.transfer.to_host import Fetched
from tests import card_time

CARD = torch.device("cuda", 0)
digests_of = sys.modules["hf_rocm_tune.transfer.digest"]  # the package has a function of that name
SIZE = 40_000
Problems = Iterator[str]


# ---- workloads ------------------------------------------------------------------------------------------------------


def slow(stream: Any, milliseconds: float = 30) -> None:
    """What is queued on a stream from now on begins so much later."""
    with torch.cuda.stream(stream):
        card_time.sleep(milliseconds)


def compute() -> Any:
    return torch.cuda.current_stream(CARD)


def made(verify: str, backend: AcceleratorBackend | None = None, fault: str = "", slots: int = 2) -> tuple[Mover, Any]:
    """A mover of the card, and its queue's stream."""
    backend = backend or AcceleratorBackend(CARD)
    settings = TransferSettings(verify=verify, slot_bytes=16384, slots=slots)
    return Mover(CARD, settings=settings, backend=backend, faults=FaultSpec.parse(fault) if fault else None), (
        backend._stream
    )


def batch(number: int, length: int = 1900) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "ids": torch.randint(1, 30_000, (2, length), generator=generator),
        "mask": torch.randint(0, 2, (2, length), generator=generator, dtype=torch.int32),
    }


def consumed(tree: dict[str, Tensor]) -> Tensor:
    weights = torch.arange(1, tree["ids"].shape[1] + 1, device=tree["ids"].device)
    return (tree["ids"] * weights + tree["mask"]).sum()


def told(mover: Mover) -> Problems:
    yield from (f"false incident {row}" for row in mover.report.incidents)


def batches(verify: str) -> Problems:
    """Sent one ahead, used by kernels that are queued and run later, freed before these have run."""
    mover, _ = made(verify)
    pending = []
    for number in range(12):
        hosts = [batch(2 * number + i, (600, 1000, 1900, 4000)[(number + i) % 4]) for i in range(2)]
        moved = [mover.begin(host) for host in hosts]
        if number % 3 == 0:
            slow(compute(), 3)
        for host, arrived in zip(hosts, moved, strict=True):
            mover.wait_verified(arrived)
            pending.append((int(consumed(host)), consumed(arrived)))
        del moved, arrived
    yield from (f"a kernel saw {int(got)}, not {right}" for right, got in pending if int(got) != right)
    yield from told(mover)


def one_slot(verify: str) -> Problems:
    """Rewritten for each of four batches behind a queue that is late."""
    mover, stream = made(verify, slots=1)
    slow(stream)
    moved = [mover.begin({"x": torch.full((900,), number)}) for number in range(4)]
    for number, arrived in enumerate(moved):
        mover.wait_verified(arrived)
        if not bool((arrived["x"] == number).all()):
            yield f"batch {number} holds {arrived['x'].unique().tolist()}"
    yield from told(mover)


def weights(verify: str) -> Problems:
    """Moved into memory that kernels in flight still use."""
    mover, _ = made(verify)
    for number in range(4):
        source = torch.randn(SIZE, generator=torch.Generator().manual_seed(number))
        used = torch.empty(SIZE, device=CARD)
        slow(compute(), 10)
        late = used.fill_(5.0).sum()
        del used
        moved = mover.move(source, name="w")
        if not torch.equal(moved.cpu(), source):
            yield "a weight differs"
        if float(late) != 5.0 * SIZE:
            yield f"memory in use was overwritten: {float(late)}"
    yield from told(mover)


class ShortOfMemory(AcceleratorBackend):
    """Page-locked memory is gone after the first slot."""

    slots = 0

    def staging(self, nbytes: int) -> Tensor:
        self.slots += 1
        if self.slots > 1:
            raise MemoryError("page-locked")
        return super().staging(nbytes)


def interrupted(verify: str) -> Problems:
    """A move that raises with copies in flight: its memory goes to others, who must not see them."""
    mover, stream = made(verify, ShortOfMemory(CARD))
    slow(stream)
    with suppress(MemoryError):
        mover.move(torch.zeros(SIZE), name="w")
        yield "it did not raise"
    other = torch.empty(SIZE, device=CARD).fill_(7.0)  # behind the exception, which holds the frame with the memory
    torch.cuda.synchronize()
    if float(other.sum()) != 7.0 * SIZE:
        yield "a copy landed in memory that belongs to another"


def fetched(verify: str) -> Problems:
    """What was computed a moment ago, whose kernels have not run."""
    mover, _ = made(verify)
    for size in (4, 3000, SIZE):
        source = mover.move(torch.randn(size), name="w")
        slow(compute(), 10)
        with mover.fetched(source * 2, name="u", stage="adapter") as found:
            if not torch.equal(found.host, source.cpu() * 2):
                yield f"fetched {size} differ"
    yield from told(mover)


def fetched_and_dropped(verify: str) -> Problems:
    """The caller drops its tensor at once, and its memory is used again."""
    mover, _ = made(verify)
    fetcher = mover.another_fetcher()
    source = mover.move(torch.randn(2000), name="w")
    torch.cuda.synchronize()
    slow(fetcher.backend._stream)  # type: ignore[attr-defined]
    found = fetcher.begin(source * 2, name="u", stage="adapter")
    others = [torch.empty(2000, device=CARD).fill_(9.0) for _ in range(3)]
    found.wait_verified()
    if not torch.equal(found.host, source.cpu() * 2):
        yield "fetched bytes are those of another tensor"
    del others


def digests(verify: str) -> Problems:
    """Several in flight, all there before the first is looked at."""
    mover, _ = made(verify)
    fetcher = mover.another_fetcher()
    sources = [mover.move(torch.randn(size), name="w") for size in (2000, 3000)]
    queued = [fetcher.begin(source, name="w", stage="adapter") for source in sources]
    torch.cuda.synchronize()
    for each in queued:
        each.wait_verified()
    yield from told(mover)


def first_digests(verify: str) -> Problems:
    """The table of weights is made on one stream and used on another."""
    mover, _ = made(verify)
    fetcher = mover.another_fetcher()
    source = torch.randn(2000)
    moved = source.to(CARD)
    torch.cuda.synchronize()
    for table in (digests_of.place_weights, digests_of.block_table):
        table.cache_clear()
    slow(fetcher.backend._stream, 1000)  # type: ignore[attr-defined]
    queued = fetcher.begin(moved, name="w", stage="adapter")
    if digest(moved) != digest(source):
        yield "a digest beside the queue differs"
    queued.wait_verified()
    yield from told(mover)


def recovered(verify: str) -> Problems:
    """A copy that went wrong is described as it was, and put right for those who read it later."""
    if verify == "off":
        return
    mover, _ = made(verify, fault="kind=zero,count=1")
    source = torch.randint(1, 255, (SIZE,), dtype=torch.uint8)
    slow(compute(), 2000)
    moved = mover.begin({"x": source})["x"]
    mover.wait_verified(moved)
    if not torch.equal(moved.cpu(), source):
        yield "recovered bytes differ"
    for row in mover.report.incidents:
        if (row["kind"], row["first_offset"], row["retry"]) != ("zeros", 0, "same_copy"):
            yield f"described as {row}"
    mover, _ = made(verify, fault="kind=flip,count=1,stage=adapter")
    moved = mover.move(torch.randn(2000), name="w")
    with mover.fetched(moved, name="u", stage="adapter") as found:
        if not torch.equal(found.host, moved.cpu()):
            yield "fetched again and differs"
    yield from (f"read again by {row['retry']}" for row in mover.report.incidents if row["retry"] != "same_copy")


def threads(verify: str) -> Problems:
    """Four at once on one mover."""
    mover, _ = made(verify)
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            for number in range(4):
                host = batch(100 * seed + number, 700)
                arrived = mover.begin(host)
                source = torch.full((3000 + seed,), float(number + seed))
                moved = mover.move(source, name=f"{seed}")
                with mover.fetched(moved * 2, name="u", stage="adapter") as found:
                    if not torch.equal(found.host, source * 2):
                        wrong.append("fetched differs")
                mover.wait_verified(arrived)
                if int(consumed(arrived)) != int(consumed(host)):
                    wrong.append("a batch differs")
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    yield from wrong
    yield from told(mover)


WORKLOADS = (
    batches,
    weights,
    one_slot,
    interrupted,
    fetched,
    fetched_and_dropped,
    digests,
    recovered,
    first_digests,
    threads,
)


# ---- mutants --------------------------------------------------------------------------------------------------------


def _allocate(self: Any, nbytes: int, *, waits: bool = True, records: bool = True) -> Tensor:
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
    if waits:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
    if records:
        buffer.record_stream(self._stream)
    return buffer


_stock_allocate = AcceleratorBackend.allocate
_stock_fetched = Fetched.__init__


def _weights_allocated(**what: bool) -> Callable[..., Tensor]:
    def allocate(self: Any, nbytes: int, *, long_lived: bool) -> Tensor:
        return _allocate(self, nbytes, **what) if long_lived else _stock_allocate(self, nbytes, long_lived=False)

    return allocate


def _hand_out(self: Any, buffer: Tensor, ticket: Any, *, waits: bool = False, records: bool = False) -> None:
    consumer = torch.cuda.current_stream(self.device)
    if waits:
        consumer.wait_event(ticket.event)
    if records:
        buffer.record_stream(consumer)


def _copy_on_callers_stream(self: Any, target: Tensor, source: Tensor, label: Any, *, blocking: bool = False) -> Any:
    with own_copies():
        target.copy_(source, non_blocking=not blocking)
    return _EventTicket(self._stream.record_event())


def _event_before_copy(self: Any, target: Tensor, source: Tensor, label: Any, *, blocking: bool = False) -> Any:
    with torch.cuda.stream(self._stream), own_copies():
        ticket = _EventTicket(self._stream.record_event())
        target.copy_(source, non_blocking=not blocking)
    return ticket


def _blocking_not_waited_for(self: Any, target: Tensor, source: Tensor, label: Any, *, blocking: bool = False) -> Any:
    with torch.cuda.stream(self._stream), own_copies():
        target.copy_(source, non_blocking=True)
        return _EventTicket(self._stream.record_event())


def _digest_on_callers_stream(self: Any, target: Tensor, word_offset: int = 0) -> Any:
    return _QueuedDigest(digests_of.digest_on_device(target, word_offset), target.numel())


def _one_buffer_for_all(self: Any, target: Tensor, word_offset: int = 0) -> Any:
    with torch.cuda.stream(self._stream):
        queued = _QueuedDigest(digests_of.digest_on_device(target, word_offset), target.numel())
        kept = vars(self).setdefault("buffer", queued._readback._landed)
        with own_copies():
            kept.copy_(queued._readback._landed)
        queued._readback._landed = kept
        return queued


def _digest_before_the_copy(self: Any, target: Tensor) -> Any:
    return self._digest_on(self._beside, target)


def _read_back_without_wait(self: Any, target: Tensor) -> Tensor:
    with torch.cuda.stream(self._stream), own_copies():
        return torch.full(target.shape, 17, dtype=target.dtype).pin_memory().copy_(target, non_blocking=True)


def _source_not_kept(self: Any, *arguments: Any) -> None:
    _stock_fetched(self, *arguments)
    self._source = torch.empty_like(self._source)


def _used_without_wait(self: Any) -> None:
    with patch.object(self, "_ticket"):
        _stock_wait(self)


_stock_wait = Fetched.wait_verified
_NEVER = property(lambda self: None, lambda self, value: None)

BOTH, FULL, OFF = ("full", "off"), ("full",), ("off",)
MUTANTS: dict[str, tuple[tuple[str, ...], Any, str, Any]] = {
    "weights allocated without a wait": (BOTH, AcceleratorBackend, "allocate", _weights_allocated(waits=False)),
    "weights allocated without record": (BOTH, AcceleratorBackend, "allocate", _weights_allocated(records=False)),
    "batches allocated on the caller's stream": (
        BOTH,
        AcceleratorBackend,
        "allocate",
        lambda self, nbytes, *, long_lived: _allocate(self, nbytes, waits=long_lived, records=long_lived),
    ),
    # Under "full" the host has waited for the digest, which comes after the copy.
    "handed out without a wait": (
        OFF,
        AcceleratorBackend,
        "hand_out",
        lambda self, buffer, ticket: _hand_out(self, buffer, ticket, records=True),
    ),
    "handed out without record": (
        BOTH,
        AcceleratorBackend,
        "hand_out",
        lambda self, buffer, ticket: _hand_out(self, buffer, ticket, waits=True),
    ),
    "followed without a wait": (BOTH, AcceleratorBackend, "follow", lambda self, source: None),
    "source of a fetch not kept": (BOTH, Fetched, "__init__", _source_not_kept),
    "fetch used without a wait": (BOTH, Fetched, "wait_verified", _used_without_wait),
    "slot without ticket": (BOTH, Slot, "ticket", _NEVER),
    "slot not joined": (BOTH, _EventTicket, "join", lambda self: None),
    "slot always done": (BOTH, _EventTicket, "done", lambda self: True),
    "copy on the caller's stream": (BOTH, AcceleratorBackend, "copy", _copy_on_callers_stream),
    "event before the copy": (BOTH, AcceleratorBackend, "copy", _event_before_copy),
    "blocking copy not waited for": (FULL, AcceleratorBackend, "copy", _blocking_not_waited_for),
    "digest on the caller's stream": (FULL, AcceleratorBackend, "digest", _digest_on_callers_stream),
    "digest before its copy": (FULL, AcceleratorBackend, "digest_beside", _digest_before_the_copy),
    "digest read early": (FULL, DigestReadback, "join", lambda self: None),
    "one buffer for all digests": (FULL, AcceleratorBackend, "digest", _one_buffer_for_all),
    "table used before it is made": (FULL, digests_of, "_computed", lambda table: table),
    "fill on the caller's stream": (FULL, AcceleratorBackend, "fill", lambda self, target, value: target.fill_(value)),
    "read back without a wait": (FULL, AcceleratorBackend, "read_back", _read_back_without_wait),
}
"""Modes of verification in which it can be seen, and what replaces which attribute of what."""


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    with ExitStack() as stack:
        if name is not None:
            _, owner, attribute, replacement = MUTANTS[name]
            stack.enter_context(patch.object(owner, attribute, replacement, create=True))
        yield


def first_problem(verify: str, name: str | None) -> str | None:
    """What goes wrong first, and in which workload; a mutant has three chances, since delays are random."""
    for workload in WORKLOADS * (1 if name is None else 3):
        with mutated(name):
            try:
                problem = next(workload(verify), None)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"[:200]
        torch.cuda.synchronize()
        if problem is not None:
            return f"{workload.__name__}: {problem}"
    return None


def main(verify: str, *names: str) -> None:
    simcard = sys.modules.get("simcard")
    digest(torch.ones(8, device=CARD))  # the table, and whatever starts at the first use
    if simcard is not None:
        simcard.poison(True)
        simcard.delay(0, 300, 0, 900)
    chosen = names or tuple(name for name, (modes, *_) in MUTANTS.items() if verify in modes)
    print(json.dumps({str(name): first_problem(verify, name) for name in (None, *chosen)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
