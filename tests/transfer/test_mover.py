"""What crosses arrives with its own bytes, type and structure, and what is known of it stays true."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.errors import MemoryFaultError, UsageError
from hf_rocm_tune.transfer import (
    FaultSpec,
    HostBackend,
    Mover,
    TransferReport,
    TransferSettings,
    digest,
    tree_tensors,
    was_verified,
)
from hf_rocm_tune.transfer.backend import Label

from .test_digest import DTYPES

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: Tensor
    note: str


@pytest.fixture
def mover() -> Any:
    with Mover(CPU, settings=TransferSettings(slot_bytes=8192, slots=3)) as made:
        yield made


def begin_and_wait(mover: Mover, tree: Any) -> Any:
    moved = mover.begin(tree)
    mover.wait_verified(moved)
    return moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_crosses_alone_and_in_a_batch(mover: Mover, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (16 * 101,), dtype=torch.uint8)
    source = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (101,), (1,))
    for arrived in (mover.move(source, name="w"), begin_and_wait(mover, [raw[:3], source])[1]):
        assert arrived.dtype is dtype
        assert arrived.shape == source.shape
        assert digest(arrived) == digest(source)
        assert arrived.data_ptr() != source.data_ptr()
        assert was_verified(arrived)
    assert mover.move(source[10:20], name="w").untyped_storage().nbytes() == 10 * source.element_size()


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(30, 20).t(),
        torch.randn(1, 5, 1).expand(7, 5, 900),
        torch.randn(50, 50)[::2, 3:],
        torch.arange(5, dtype=torch.uint8)[1:],
        torch.nn.Parameter(torch.randn(4, 4)),
        torch.randn(40_001),
    ],
    ids=["0-dim", "empty", "transposed", "expanded", "strided", "unaligned", "parameter", "larger than the ring"],
)
def test_any_layout_arrives_contiguous_and_equal(mover: Mover, source: Tensor) -> None:
    for arrived in (mover.move(source, name="w"), begin_and_wait(mover, {"x": source})["x"]):
        assert torch.equal(arrived, source)
        assert arrived.shape == source.shape
        assert arrived.is_contiguous()
        assert not arrived.requires_grad
        assert type(arrived) is Tensor


def test_a_moved_weight_may_be_trained_in_place_after_inference_mode(mover: Mover) -> None:
    with torch.inference_mode():
        arrived = mover.move(torch.randn(3), name="w")
        batch = begin_and_wait(mover, [torch.randn(3)])
    weight = torch.nn.Parameter(arrived)
    (weight * batch[0]).sum().backward()
    with torch.no_grad():
        weight.add_(weight.grad)


def test_structures_keep_their_types_and_everything_that_is_no_tensor(mover: Mover) -> None:
    note = object()
    shared = torch.arange(4)
    tree = {
        "dict": OrderedDict(a=torch.ones(3), b=note),
        "default": defaultdict(list, x=torch.zeros(2)),
        "user": UserDict(y=torch.ones(2, dtype=torch.bool)),
        "pair": Pair(shared, "text"),
        "tuple": (shared, None, 3),
        "sample": Sample(torch.randn(2, 2), "note"),
        "nothing": [],
    }
    arrived = begin_and_wait(mover, tree)
    assert list(arrived) == list(tree)
    assert {key: type(value) for key, value in arrived.items()} == {key: type(value) for key, value in tree.items()}
    assert arrived["dict"]["b"] is note
    assert arrived["default"].default_factory is list
    assert arrived["pair"].first is arrived["tuple"][0]
    assert arrived["tuple"][1:] == (None, 3)
    assert all(torch.equal(a, b) for a, b in zip(tree_tensors(arrived), tree_tensors(tree), strict=True))
    assert tree["user"]["y"].data_ptr() != arrived["user"]["y"].data_ptr()
    assert all(mover.was_verified(tensor) for tensor in tree_tensors(arrived))


def test_token_encodings_survive_in_a_batch_encoding(mover: Mover) -> None:
    base = pytest.importorskip("transformers.tokenization_utils_base")
    batch = base.BatchEncoding({"input_ids": torch.arange(6).view(2, 3)}, n_sequences=1)
    arrived = begin_and_wait(mover, batch)
    assert type(arrived) is base.BatchEncoding
    assert arrived.n_sequences == 1
    assert torch.equal(arrived["input_ids"], batch["input_ids"])
    assert arrived["input_ids"] is not batch["input_ids"]


class Odd(torch.Tensor):
    """A subclass that makes zeros of what is asked of its tensors on the way."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, given: Any = (), more: Any = None) -> Any:
        found = super().__torch_function__(function, kinds, given, more or {})
        return torch.zeros_like(found) if function in (torch.Tensor.detach, torch.Tensor.permute) else found


def test_of_a_subclass_the_plain_data_is_copied(mover: Mover) -> None:
    sent, target = torch.randn(5, 7), torch.ones(5, 7)
    mover.deliver(target.as_subclass(Odd), sent.as_subclass(Odd), origin="a test")
    assert torch.equal(target, sent)


def test_batch_tensors_share_memory_but_not_version_counters(mover: Mover) -> None:
    arrived = begin_and_wait(mover, [torch.ones(3, requires_grad=False), torch.ones(3)])
    assert arrived[0].untyped_storage().data_ptr() == arrived[1].untyped_storage().data_ptr()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in arrived)
    before = arrived[1]._version
    arrived[0].add_(1)
    assert arrived[1]._version == before


def test_tensors_already_moved_and_batches_without_tensors_are_kept(mover: Mover) -> None:
    weight = mover.move(torch.randn(3), name="w")
    arrived = begin_and_wait(mover, {"w": weight, "x": torch.ones(1)})
    assert arrived["w"] is weight
    assert begin_and_wait(mover, {"a": 1, "b": ["text"]}) == {"a": 1, "b": ["text"]}


def test_provenance_follows_the_storage_and_dies_with_it(mover: Mover) -> None:
    moved = mover.move(torch.randn(8), name="w")
    parameter = torch.nn.Parameter(torch.empty(8))
    assert not mover.was_verified(parameter)
    parameter.data = moved
    assert mover.was_verified(parameter)
    assert mover.was_verified(parameter[2:5])
    assert was_verified(parameter)
    assert mover.digest_of(parameter) == digest(parameter)
    assert not mover.was_verified(parameter.clone())
    assert mover.provenance(torch.ones(1)) is None
    del moved, parameter
    gc.collect()
    assert len(mover._registry.entries) == 0


def test_host_source_is_kept_with_the_batch_and_freed_with_it(mover: Mover) -> None:
    labels = torch.arange(10)
    arrived = mover.begin({"labels": labels, "mask": torch.ones(10, dtype=torch.bool)})
    source = mover.host_source(arrived["labels"])
    assert source is not None and torch.equal(source, labels)
    mover.wait_verified(arrived)
    assert mover.host_source(arrived["labels"]) is source
    assert mover.host_source(arrived["labels"][1:]) is None
    assert mover.host_source(labels) is None
    del arrived, source
    gc.collect()
    assert len(mover._registry.entries) == len(mover._staged._layouts.entries) == 0


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_packed_tensors_may_wait_and_what_changes_meanwhile_is_not_sent(verify: str) -> None:
    originals = {"ids": torch.arange(50), "mask": torch.ones(7, dtype=torch.bool), "note": "kept"}
    with Mover(CPU, settings=TransferSettings(verify=verify)) as mover:
        for name in ("ids", "mask"):
            staged = mover.stage_batch(originals)
            originals[name].zero_()  # a collator that uses its memory again
            mover.require_unchanged(staged)
            staged[name].view(torch.uint8)[-1] ^= 1
            for use in (mover.require_unchanged, mover.begin):
                with pytest.raises(MemoryFaultError, match=f"'{name}' changed in host memory"):
                    use(staged)
            staged[name].view(torch.uint8)[-1] ^= 1
            begin_and_wait(mover, staged)
            assert {row["tensor"] for row in mover.report.incidents} == {name}
            mover.report._incidents.clear()


def test_a_copy_runs_when_somebody_waits_in_the_order_in_which_it_was_queued() -> None:
    backend = HostBackend()
    source, target = torch.ones(1 << 21, dtype=torch.uint8), torch.zeros(1 << 21, dtype=torch.uint8)
    ticket = backend.copy(target, source, Label("weights", 0, 0, ()))
    pending = backend.digest(target)
    backend.fill(target, 3)
    assert not ticket.done() and not target.any()
    assert pending.result() == digest(source)
    backend.close()
    assert bool((target == 3).all())


def test_off_and_sample_say_what_was_not_verified() -> None:
    with Mover(CPU, settings=TransferSettings(verify="off")) as off:
        arrived = off.move(torch.randn(10), name="w")
        assert off.provenance(arrived) == "unverified"
        assert not was_verified(arrived)
        assert off.report.to_dict()["weights"]["verified_bytes"] == 0
    with Mover(CPU, settings=TransferSettings(verify="sample")) as sampling:
        verified = [sampling.was_verified(begin_and_wait(sampling, [torch.ones(4)])[0]) for _ in range(33)]
        assert verified == [True, *[False] * 15] * 2 + [True]
        batches = sampling.report.to_dict()["batches"]
        assert (batches["bytes"], batches["verified_bytes"]) == (33 * 16, 3 * 16)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
    ],
    ids=["sparse", "meta", "conjugate"],
)
def test_what_has_no_plain_bytes_is_refused_by_name(mover: Mover, tensor: Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=f"odd.*{words}"):
        mover.begin({"odd": tensor})


def test_a_closed_mover_refuses_and_still_knows() -> None:
    mover = Mover(CPU)
    moved, begun = mover.move(torch.ones(2), name="w"), mover.begin([torch.ones(2)])
    mover.close()
    mover.close()
    mover.wait_verified(moved)
    assert mover.was_verified(moved) and not mover.was_verified(begun[0])
    for use in (
        lambda: mover.move(torch.ones(2), name="w"),
        lambda: mover.begin([torch.ones(2)]),
        lambda: mover.wait_verified(begun),
        lambda: mover.fetched(moved, name="w", stage="adapter"),
    ):
        with pytest.raises(RuntimeError, match="the mover is closed"):
            use()


def test_many_threads_recover_while_others_send() -> None:
    """What is remembered for the diagnosis is read by one thread while others add to it."""
    faults = FaultSpec.parse("kind=swap,rate=0.5,seed=5")
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within a loop, as they may at any time
    try:
        with Mover(torch.device("cpu"), faults=faults) as mover, ThreadPoolExecutor(8) as pool:
            sources = [torch.arange(number, number + 300) for number in range(600)]
            moved = list(pool.map(lambda source: mover.move(source, name="w"), sources))
    finally:
        sys.setswitchinterval(usual)
    assert all(torch.equal(a, b) for a, b in zip(moved, sources, strict=True))
    assert mover.report.to_dict()["weights"]["recovered"] > 100


def test_ranks_add_up_and_incidents_name_theirs() -> None:
    ranks = []
    for number in range(2):
        report = TransferReport()
        report.add(
            "weights", tensors=2, bytes=2_000_000_000, verified_bytes=5, transfer_seconds=0.5, verify_seconds=0.5
        )
        report.count("gradients", buckets=3, mismatches=number)
        report.watched("frozen", passes=1, tensors=7, new_mismatches=0)
        report.watched("frozen", passes=2, tensors=7, new_mismatches=1)
        report.incident({"step": number, "kind": "zeros"})
        ranks.append(json.loads(json.dumps(report.to_dict())))
    merged = TransferReport.merge(ranks)
    assert merged["weights"] == {
        "tensors": 4, "bytes": 4_000_000_000, "verified_bytes": 10, "mismatches": 0, "recovered": 0,
        "transfer_seconds": 1.0, "verify_seconds": 1.0, "seconds": 2.0, "gb_per_s": 2.0,
    }  # fmt: skip
    assert merged["gradients"] == {"buckets": 6, "mismatches": 1, "recovered": 0}
    assert merged["frozen"] == {"passes": 4, "tensors": 14, "mismatches": 2}
    assert [row["rank"] for row in merged["incidents"]] == [0, 1]
    assert TransferReport.merge(ranks[:1]) == ranks[0]
