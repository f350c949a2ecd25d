"""Several fetches are under way at once, in few slots, and a slot comes back however its fetch ends."""

from __future__ import annotations

import pytest
import torch

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings

CPU = torch.device("cpu")
SLOT = 4096


def _mover(fault: str = "") -> Mover:
    settings = TransferSettings(slot_bytes=SLOT, slots=2)
    return Mover(CPU, settings=settings, faults=FaultSpec.parse(fault) if fault else None)


def test_several_are_under_way_and_end_in_any_order() -> None:
    with _mover() as mover:
        fetcher = mover.another_fetcher()
        tensors = [torch.full((100,), value) for value in (1.0, 2.0)]
        first, second = (
            fetcher.begin(tensor, mover.errand(str(number), "buckets")) for number, tensor in enumerate(tensors)
        )
        second.settle()
        first.settle()
        assert torch.equal(first.host, tensors[0]) and torch.equal(second.host, tensors[1])
        first.host.zero_()  # it is staging memory, not the source
        assert tensors[0].all()
        for each in (first, second, first):  # the last does nothing
            each.release()
        again = fetcher.begin(tensors[1], mover.errand("2", "buckets"))
        again.settle()
        assert torch.equal(again.host, tensors[1])


def test_what_cannot_be_read_right_gives_its_slot_back() -> None:
    tensor = torch.arange(1, 100)
    with _mover("kind=zero,tensor=bad,persist=1") as mover:
        for _ in range(3):  # more often than there are slots
            with (
                pytest.raises(CorruptionError, match="3 ways of reading it did not help"),
                mover.fetched(tensor, name="bad", stage="buckets"),
            ):
                pass
        with mover.fetched(tensor, name="good", stage="buckets") as found:
            assert torch.equal(found.host, tensor)
    assert mover.report.to_dict()["buckets"]["mismatches"] == 3
