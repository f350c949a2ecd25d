"""What is fetched from a device is what lies there, whatever happens on the way; nothing wrong is handed out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import FaultSpec, HostBackend, Mover, TransferSettings, digest

STAGE = "activations"


@contextmanager
def mover_with(text: str = "", **settings: Any) -> Iterator[Mover]:
    faults = FaultSpec.parse(text) if text else None
    with Mover(torch.device("cpu"), settings=TransferSettings(**settings), faults=faults) as made:
        yield made


def fetch(mover: Mover, tensor: Tensor, name: str = "hidden") -> Tensor:
    with mover.fetched(tensor, name=name, stage=STAGE) as fetched:
        assert fetched.digest in (None, digest(tensor))
        return fetched.host.clone()


TENSORS: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.randn(3, 5, 7).bfloat16(),
    "strided": lambda: torch.randn(8, 9).t()[1:5],
    "expanded": lambda: torch.randn(1, 4).expand(6, 4),
    "mask": lambda: torch.rand(2, 1, 5, 5) > 0.5,
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 4),
    "larger_than_a_slot": lambda: torch.randn(3 << 20),
}


@pytest.mark.parametrize("kind", list(TENSORS))
def test_arrives_bit_for_bit_in_memory_of_its_own(kind: str) -> None:
    tensor = TENSORS[kind]()
    with mover_with() as mover, mover.fetched(tensor, name="hidden", stage=STAGE) as fetched:
        assert torch.equal(fetched.host, tensor)
        assert (fetched.host.dtype, fetched.host.shape) == (tensor.dtype, tensor.shape)
        assert not tensor.numel() or fetched.host.data_ptr() != tensor.data_ptr()
        counted = mover.report.to_dict()[STAGE]
    assert counted["tensors"] == 1
    assert counted["bytes"] == counted["verified_bytes"] == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("kind", ["zero", "zero_range", "flip", "swap"])
def test_a_fault_is_found_and_read_again(kind: str) -> None:
    tensor = torch.randn(100, 30)
    with mover_with(f"kind={kind},stage={STAGE},count=1") as mover:
        assert torch.equal(fetch(mover, tensor), tensor)
        counted = mover.report.to_dict()
        assert mover.fault_injection() is not None and mover.fault_injection()["injected"] == 1  # type: ignore[index]
    assert counted[STAGE]["mismatches"] == counted[STAGE]["recovered"] == 1
    (row,) = counted["incidents"]
    assert (row["outcome"], row["tensor"], row["retry"]) == ("recovered", "hidden", "same_copy")
    assert row["length"] >= 1


def test_stop_means_the_first_mismatch() -> None:
    stopping = mover_with(f"kind=zero,stage={STAGE},count=1", on_corruption="stop")
    with stopping as mover, pytest.raises(CorruptionError, match="on_corruption stop"):
        fetch(mover, torch.randn(50))


@pytest.mark.parametrize(("verify", "verified"), [("off", 0), ("sample", 2), ("full", 20)])
def test_as_much_is_verified_as_was_asked_for(verify: str, verified: int) -> None:
    with mover_with(verify=verify) as mover:
        for _ in range(20):
            fetch(mover, torch.ones(4))
        assert mover.report.to_dict()[STAGE]["verified_bytes"] == 16 * verified


@pytest.mark.gpu
def test_from_an_accelerator_after_the_kernels_that_write_it() -> None:
    device = torch.device("cuda", 0)
    with Mover(device) as mover:
        for _ in range(20):
            left = torch.randn(512, 512, device=device)
            product = left @ left
            assert torch.equal(fetch(mover, product), product.cpu())
        assert mover.report.to_dict()[STAGE]["mismatches"] == 0


def test_several_are_under_way_and_end_in_any_order() -> None:
    with mover_with(slot_bytes=4096, slots=2) as mover:
        fetcher = mover.another_fetcher()
        tensors = [torch.full((100,), value) for value in (1.0, 2.0)]
        first, second = (
            fetcher.begin(tensor, name=str(number), stage="buckets") for number, tensor in enumerate(tensors)
        )
        second.wait_verified()
        first.wait_verified()
        assert torch.equal(first.host, tensors[0]) and torch.equal(second.host, tensors[1])
        first.host.zero_()  # it is staging memory, not the source
        assert tensors[0].all()
        for each in (first, second, first):  # the last does nothing
            each.release()
        again = fetcher.begin(tensors[1], name="2", stage="buckets")
        again.wait_verified()
        assert torch.equal(again.host, tensors[1])


def test_what_cannot_be_read_right_gives_its_slot_back() -> None:
    tensor = torch.arange(1, 100)
    with mover_with("kind=zero,tensor=bad,persist=1", slot_bytes=4096, slots=2) as mover:
        for _ in range(3):  # more often than there are slots
            with (
                pytest.raises(CorruptionError, match="all 2 retries failed"),
                mover.fetched(tensor, name="bad", stage="buckets"),
            ):
                pass
        assert mover.report.incidents[-1]["outcome"] == "failed"
        with mover.fetched(tensor, name="good", stage="buckets") as found:
            assert torch.equal(found.host, tensor)
    assert mover.report.to_dict()["buckets"]["mismatches"] == 3


class _ShortOfMemory(HostBackend):
    """A device on which the first digests find no memory."""

    def __init__(self, shortages: int) -> None:
        super().__init__()
        self.shortages = shortages

    def digest(self, target: Tensor, word_offset: int = 0) -> Any:
        if self.shortages:
            self.shortages -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().digest(target, word_offset)


def test_a_shortage_of_memory_leaves_its_staging_memory_to_the_next() -> None:
    tensor, fetched, kept = torch.randn(40), list[Tensor](), list[Any]()
    backend = _ShortOfMemory(3)
    with Mover(torch.device("cpu"), settings=TransferSettings(slots=3), backend=backend) as mover:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError) as error:
                fetch(mover, tensor)
            kept.append(error)  # and its frames, which may hold what they have taken
        last = threading.Thread(target=lambda: fetched.append(fetch(mover, tensor)), daemon=True)
        last.start()
        last.join(30)
        assert not last.is_alive(), "it waits for staging memory that nobody holds"
    assert torch.equal(fetched[0], tensor)
