"""The same promises on a card: streams, events and page-locked slots."""

from __future__ import annotations

import pytest
import torch

from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest
from hf_rocm_tune.transfer.faults import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a HIP or CUDA device"),
]


def test_device_digest_equals_the_host_digest() -> None:
    source = torch.randint(0, 256, (70_000_003,), dtype=torch.uint8)
    assert digest(source.cuda()) == digest(source)
    assert digest(source.cuda()[1:]) == digest(source[1:])


def test_weights_and_batches_arrive_behind_a_busy_compute_stream() -> None:
    settings = TransferSettings(slots=2, slot_bytes=1 << 20)
    with Mover(torch.device("cuda"), settings=settings) as mover:
        busy = torch.randn(4096, 4096, device="cuda")
        weight = torch.randn(3_000_001)
        for number in range(40):
            busy = (busy @ busy).clamp_(-1, 1)
            batch = {"ids": torch.full((8, 2048), number), "mask": torch.ones(8, 2048, dtype=torch.bool)}
            arrived = mover.begin(batch)
            mover.settle(arrived)
            assert int(arrived["ids"].sum()) == number * 8 * 2048
            assert bool(arrived["mask"].all())
        assert torch.equal(mover.move(weight, name="w").cpu(), weight)
        assert not mover.report.incidents


def test_a_slot_is_not_rewritten_while_a_copy_waits_on_its_stream() -> None:
    settings = TransferSettings(slots=1, slot_bytes=1 << 20, verify="off")
    with Mover(torch.device("cuda"), settings=settings) as mover:
        with torch.cuda.stream(mover._backend._stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(200_000_000)
        moved = [mover.begin([torch.full((100_000,), number)]) for number in range(4)]
        for number, arrived in enumerate(moved):
            mover.settle(arrived)
            assert bool((arrived[0] == number).all())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "after"])
def test_transient_faults_are_recovered_on_the_device(kind: str) -> None:
    with Mover(torch.device("cuda"), faults=FaultSpec(kind=kind, rate=0.5, seed=5)) as mover:
        for number in range(20):
            source = {"ids": torch.randint(1, 30_000, (4, 512)), "w": torch.randn(100 + number)}
            arrived = mover.begin(source)
            mover.settle(arrived)
            assert all(torch.equal(arrived[name].cpu(), source[name]) for name in source)
        counters = mover.report.to_dict()["batches"]
        injected = mover.fault_injection()["injected"]
        assert injected == counters["mismatches"] == counters["recovered"] > 0
