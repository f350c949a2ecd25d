"""Every kind of fault, put in at the backend: found before use, recovered when transient, stopped when not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, SourceChangedError, UsageError
from hf_rocm_tune.transfer import FaultSpec, HostBackend, Mover, TransferSettings
from hf_rocm_tune.transfer.faults import KINDS

CPU = torch.device("cpu")
ON_THE_WAY = [kind for kind in KINDS if kind != "after"]
SMALL = TransferSettings(slot_bytes=8192, slots=2)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 30_000, (4, 50), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(0), "scale": torch.rand(3, generator=generator).to(torch.bfloat16)}


def weight(seed: int) -> Tensor:
    return torch.randn(4001, generator=torch.Generator().manual_seed(seed))


def send(mover: Mover, stage: str, seed: int) -> bool:
    """Whether what arrived, and may now be used, is right."""
    if stage == "batches":
        source = batch(seed)
        arrived = mover.begin(source)
        mover.wait_verified(arrived)
        return all(torch.equal(arrived[name].cpu(), source[name]) for name in source)
    return torch.equal(mover.move(weight(seed), name=f"layer.{seed}", stage=stage).cpu(), weight(seed))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stage", ["batches", "weights"])
@pytest.mark.parametrize("kind", ON_THE_WAY)
def test_transient_faults_are_recovered_with_the_right_bytes(kind: str, stage: str, device: str) -> None:
    with Mover(torch.device(device), settings=SMALL, faults=FaultSpec(kind=kind, rate=0.5, seed=11)) as mover:
        assert all(send(mover, stage, seed) for seed in range(30))
        injected = mover.fault_injection()["injected"]
        counters = mover.report.to_dict()[stage]
    assert injected > 5
    assert injected == counters["mismatches"] == counters["recovered"] == len(mover.report.incidents)
    assert {row["outcome"] for row in mover.report.incidents} == {"recovered"}
    assert counters["verified_bytes"] == counters["bytes"]


@pytest.mark.parametrize("stage", ["batches", "weights"])
@pytest.mark.parametrize("kind", ON_THE_WAY)
def test_persistent_faults_stop_with_an_incident_that_says_where(kind: str, stage: str) -> None:
    spec = FaultSpec(kind=kind, first=3, persist=True, tensor="*input_ids" if stage == "batches" else "*", count=1)
    found: dict[str, set[str]] = {"zero": {"zeros"}, "flip": {"bit_flip"}, "drop": {"poison"}, "late": {"poison"}}
    with Mover(CPU, settings=SMALL, faults=spec) as mover:
        mover.step = 7
        with pytest.raises(CorruptionError, match="arrived wrong") as caught:
            assert all(send(mover, stage, seed) for seed in range(6))
        (row,) = mover.report.incidents
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 3
        assert row["tensor"] in str(caught.value)
        assert send(mover, stage, 99)
    assert row["stage"] == stage
    assert row["step"] == 7
    assert row["outcome"] == "failed"
    assert row["kind"] in found.get(kind, {"zeros", "stale", "mixed", "other"})
    assert row["causes"]
    assert row["length"] > 0
    assert row["first_offset"] % row["alignment"] == 0
    assert mover.report.to_dict()[stage]["recovered"] == 0


def test_a_failed_batch_fails_again_and_never_counts_as_verified() -> None:
    with Mover(CPU, faults=FaultSpec(kind="zero", persist=True)) as mover:
        arrived = mover.begin(batch(0))
        for _ in range(2):
            with pytest.raises(CorruptionError):
                mover.wait_verified(arrived)
        assert not mover.was_verified(arrived["labels"])


def test_corruption_after_the_verdict_is_not_a_transfer_fault() -> None:
    with Mover(CPU, faults=FaultSpec(kind="after")) as mover:
        assert not send(mover, "weights", 1)
        assert not send(mover, "batches", 1)
        assert mover.fault_injection()["injected"] == 4
        assert not mover.report.incidents


def test_a_count_holds_for_transfers_that_are_under_way_together() -> None:
    with Mover(CPU, faults=FaultSpec(kind="after", count=1)) as mover:
        under_way = [mover.begin(batch(seed)) for seed in range(3)]
        for each in under_way:
            mover.wait_verified(each)
        assert mover.fault_injection()["injected"] == 1


def test_faults_that_change_nothing_are_not_counted() -> None:
    with Mover(CPU, faults=FaultSpec(kind="zero")) as mover:
        mover.move(torch.zeros(100), name="w")
        assert mover.fault_injection()["injected"] == 0
    for kind in ("stale", "swap"):
        with Mover(CPU, faults=FaultSpec(kind=kind)) as mover:
            for _ in range(3):
                mover.move(torch.ones(100), name="w")
            assert mover.fault_injection()["injected"] == 0
            assert not mover.report.incidents


def test_an_all_ones_mask_that_arrives_as_zeros_is_caught() -> None:
    with Mover(CPU, faults=FaultSpec(kind="zero", tensor="attention_mask")) as mover:
        arrived = mover.begin({"attention_mask": torch.ones(4, 64, dtype=torch.int64), "x": torch.ones(2)})
        mover.wait_verified(arrived)
        assert bool(arrived["attention_mask"].all())
        (row,) = mover.report.incidents
    seen = (row["tensor"], row["kind"], row["first_offset"], row["retry"])
    assert seen == ("attention_mask", "zeros", 0, "same_copy")


def test_a_large_tensor_in_many_chunks_names_the_offset_of_a_flip() -> None:
    source = torch.randint(0, 256, (200_000,), dtype=torch.uint8)
    with Mover(CPU, settings=SMALL, faults=FaultSpec(kind="flip", persist=True)) as mover:
        with pytest.raises(CorruptionError):
            mover.move(source, name="big", source="model-00001.safetensors")
        (row,) = mover.report.incidents
    assert row["kind"] == "bit_flip"
    assert row["length"] == 1
    assert row["source"] == "model-00001.safetensors"
    assert (int(row["found"], 16) ^ int(source[row["first_offset"]])).bit_count() == 1


def test_stop_raises_at_the_first_mismatch() -> None:
    settings = TransferSettings(on_corruption="stop")
    with Mover(CPU, settings=settings, faults=FaultSpec(kind="flip")) as mover:
        with pytest.raises(CorruptionError, match="stop"):
            send(mover, "weights", 0)
        assert [row["outcome"] for row in mover.report.incidents] == ["stopped"]


@pytest.mark.parametrize("stage", ["batches", "weights"])
def test_a_source_that_changed_is_named_so(stage: str) -> None:
    source = torch.arange(1000)
    writing_to = [source]

    class Writing(HostBackend):
        """Somebody writes to the host tensor while it is on its way, and the copy sees it half."""

        def _copy_now(self, target: Tensor, staged: Tensor) -> None:
            writing_to[0][500] = -1
            super()._copy_now(target, staged)
            target[17] ^= 1

    with Mover(CPU, backend=Writing()) as mover:
        staged = mover.stage_batch({"x": source})
        writing_to[0] = staged["x"] if stage == "batches" else source
        use = {
            "batches": lambda: mover.wait_verified(mover.begin(staged)),
            "weights": lambda: mover.move(source, name="x"),
        }
        with pytest.raises(SourceChangedError, match="changed while"):
            use[stage]()
    assert mover.report.incidents[0]["kind"] == "source_changed"


def test_a_rung_that_keeps_helping_is_kept() -> None:
    class NeedsBlocking(HostBackend):
        """Only blocking copies arrive whole."""

        broken = 0

        def copy(self, target: Tensor, source: Tensor, label: Any, *, blocking: bool = False) -> Any:
            ticket = super().copy(target, source, label, blocking=blocking)
            if not blocking:
                self.broken += 1
                self._queued(target[:4].zero_)
            return ticket

    backend = NeedsBlocking()
    with Mover(CPU, backend=backend) as mover:
        for _ in range(10):
            moved = mover.move(torch.ones(100), name="w")
            assert bool((moved == 1).all())
    assert [row["retry"] for row in mover.report.incidents] == ["synchronous"] * 3
    assert backend.broken == 9  # three failing ways, three times; then never again


def test_the_same_seed_hits_the_same_transfers() -> None:
    def incidents(order: list[int]) -> set[str]:
        with Mover(CPU, faults=FaultSpec(kind="flip", rate=0.4, seed=5)) as mover:
            for seed in order:
                send(mover, "weights", seed)
            return {f"{row['tensor']}@{row['first_offset']}" for row in mover.report.incidents}

    forward = incidents(list(range(12)))
    assert forward and forward == incidents(list(reversed(range(12))))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind=zap", "kind=zap.*zero_range"),
        ("kind=zero,speed=3", "'speed=3'.*valid keys: kind rate"),
        ("kind=zero,rate=2", "rate=2 .*0 to 1"),
        ("kind=zero,persist=yes", "persist=yes.*0 or 1"),
        ("kind=zero,stage=lunch", "stage=lunch.*weights"),
    ],
)
def test_a_bad_specification_names_the_key_and_what_is_valid(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        FaultSpec.from_environment({"HF_ROCM_TUNE_FAULT": text})


def test_a_good_specification_is_read_whole() -> None:
    text = "kind=zero_range, rate=0.02,seed=7,persist=1,stage=weights,tensor=model.*,first=5,count=2"
    assert FaultSpec.from_environment({"HF_ROCM_TUNE_FAULT": text}) == FaultSpec(
        kind="zero_range", rate=0.02, seed=7, persist=True, stage="weights", tensor="model.*", first=5, count=2
    )
    assert FaultSpec.from_environment({}) is None
    assert FaultSpec.from_environment({"HF_ROCM_TUNE_FAULT": " "}) is None
