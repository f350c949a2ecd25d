"""Two real ranks whose gradients are averaged through the host: bit for bit DistributedDataParallel's over gloo, and
nothing that goes wrong on the way reaches the optimizer or leaves a rank waiting. On an accelerator, one rank.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.cards.gradients import watch
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest
from tests.cards.gradient_rank import Net
from tests.cards.host_sync_rank import LONG
from tests.cards.pair import Outcomes, run_pair, start_pair, wait_for


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    return run_pair("tests.cards.host_sync_rank", tmp_path_factory.mktemp("host-sync") / "store", checkout)


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("host", "ddp"),
        ("host long", "ddp long"),
        ("host bf16 weights", "ddp bf16 weights"),
        ("host no window", "ddp no window"),
        ("host unverified", "ddp"),
        ("host views", "ddp"),
        ("host pieces", "ddp"),
        ("host unused", "ddp"),
        ("host fp16, bf16 weights", "ddp bf16 weights"),  # 16-bit gradients are not cast
        ("ddp fp16", "ddp fp16 unchecked"),
        ("host fp16", "ddp fp16"),
        ("host bf16", "ddp bf16"),
        ("host bf16 pieces", "ddp bf16"),
        ("powersgd", "powersgd unchecked"),
    ],
)
def test_the_weights_are_bit_for_bit_those_of_plain_averages(outcomes: Outcomes, case: str, plain: str) -> None:
    for rank in outcomes:
        assert rank[case]["weights"] == rank[plain]["weights"]
        assert rank[case]["incidents"] == [] and rank[case]["gradients"]["mismatches"] == 0
    assert outcomes[0][case]["weights"] == outcomes[1][case]["weights"]


def test_compression_is_in_effect(outcomes: Outcomes) -> None:
    weights = [outcomes[0][case]["weights"]["wide.weight"] for case in ("ddp long", "ddp fp16", "ddp bf16", "powersgd")]
    assert len(set(weights)) == 4


@pytest.mark.parametrize("case", ["host", "host pieces", "host bf16", "host bf16 weights"])
def test_every_byte_is_verified_both_ways(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        crossed = rank[case]["buckets"]
        assert crossed["tensors"] >= 2 * rank[case]["gradients"]["buckets"] > 0
        assert crossed["verified_bytes"] == crossed["bytes"] > 0
        assert crossed["mismatches"] == 0


def test_the_report_says_how_and_how_much(outcomes: Outcomes) -> None:
    none, bf16 = (outcomes[0][case]["sync"] for case in ("host long", "host bf16"))
    assert (none["way"], none["compression"], none["judged"], none["averages"]) == ("host", "none", "projections", LONG)
    assert none["process_group"] == "gloo"
    assert none["bytes_to_host_and_back_per_step"] == 2 * none["bytes_between_ranks_per_step"]
    assert bf16["bytes_between_ranks_per_step"] * 2 == none["bytes_between_ranks_per_step"]
    assert none["wait_seconds"] > 0
    assert outcomes[0]["host unverified"]["sync"]["judged"] == "no"
    assert outcomes[0]["host unverified"]["buckets"]["verified_bytes"] == 0
    ddp, powersgd = (outcomes[0][case]["sync"] for case in ("ddp bf16", "powersgd"))
    assert ddp["way"] == "ddp" and ddp["wait_seconds"] is None
    assert ddp["bytes_between_ranks_per_step"] == bf16["bytes_between_ranks_per_step"]
    assert powersgd["judged"] == "equal on all ranks" and powersgd["bytes_between_ranks_per_step"] is None
    assert outcomes[0]["ddp"]["sync"] is None


# Each summand is rounded once by the cast, and by the one addition of two ranks; its spacing is 2^-23, 2^-10, 2^-7.
@pytest.mark.parametrize(("compression", "spacing"), [("none", 2**-23), ("fp16", 2**-10), ("bf16", 2**-7)])
def test_an_average_is_as_near_as_its_dtype_allows(outcomes: Outcomes, compression: str, spacing: float) -> None:
    for rank in outcomes:
        found = rank[f"average {compression}"]
        assert found["worst"] <= 2 * spacing
        assert compression == "none" or found["worst"] > spacing / 16, "it was not cast"


def test_what_a_cast_makes_infinite_is_named_and_passed_on(outcomes: Outcomes) -> None:
    for rank in outcomes:
        case = rank["fp16 overflow"]
        assert case["done"] == 4 and case["gradients"]["mismatches"] == 0
        assert {(row["kind"], row["outcome"]) for row in case["incidents"]} == {("not finite", "passed on")}


def test_nan_that_backward_made_is_named_and_passed_on(outcomes: Outcomes) -> None:
    for rank in outcomes:
        case = rank["host not finite"]
        assert case["done"] == 4 and case["gradients"]["mismatches"] == case["buckets"]["mismatches"] == 0
        assert {tuple(row["ranks"]) for row in case["incidents"]} == {(1,)}


@pytest.mark.parametrize(
    ("case", "plain", "least"),
    [
        ("to host, once", "ddp", 1),
        ("to host, every one", "ddp", 7),
        ("to host, pieces", "ddp", 3),
        ("to device, once", "ddp", 1),
        ("to device, dropped", "ddp", 7),
        ("host fp16, to host", "ddp fp16", 2),
    ],
)
def test_a_bucket_that_arrives_wrong_is_sent_again(outcomes: Outcomes, case: str, plain: str, least: int) -> None:
    for rank in outcomes:
        crossed = rank[case]["buckets"]
        assert crossed["mismatches"] == crossed["recovered"] == len(rank[case]["incidents"])
        assert {row["stage"] for row in rank[case]["incidents"]} <= {"buckets"}
        assert rank[case]["gradients"]["mismatches"] == 0  # it never came to an average
        assert rank[case]["weights"] == rank[plain]["weights"]
    harmed = outcomes[1][case]
    assert harmed["injected"] >= harmed["buckets"]["recovered"] >= least
    wanted = "to device" if case.startswith("to device") else "to host"
    assert all(row["tensor"].endswith(wanted) and row["length"] > 0 for row in harmed["incidents"])


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("average, on one", "ddp"),
        ("average, on both", "ddp"),
        ("average, views", "ddp"),
        ("to device, after the verdict", "ddp"),
        ("everything once", "ddp"),
        ("ddp fp16, flip on one", "ddp fp16"),
        ("ddp bf16, zero on both", "ddp bf16"),
    ],
)
def test_a_wrong_average_is_made_again_bit_for_bit(outcomes: Outcomes, case: str, plain: str) -> None:
    for rank in outcomes:
        found = rank[case]["gradients"]
        assert found["mismatches"] == found["recovered"] > 0
        assert {row["outcome"] for row in rank[case]["incidents"]} == {"recovered"}
        assert rank[case]["weights"] == rank[plain]["weights"]


def test_of_powersgd_what_differs_between_the_ranks_is_replaced_by_the_average(outcomes: Outcomes) -> None:
    case = "powersgd, flip on one"
    for rank in outcomes:
        assert rank[case]["gradients"]["mismatches"] == rank[case]["gradients"]["recovered"] == 1
        assert [row["kind"] for row in rank[case]["incidents"]] == ["differs between ranks"]
    assert outcomes[0][case]["weights"] == outcomes[1][case]["weights"] != outcomes[0]["powersgd"]["weights"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("to host, for good", "from cpu arrived wrong on the host"),
        ("to device, for good", "could not be copied back to cpu"),
        ("to device, for good on both", "could not be copied back to cpu"),
        ("average, for good", "averaging it again through the host failed too"),
        ("to host, stop", "--on_corruption stop is set"),
        ("to device, stop", "--on_corruption stop is set"),
    ],
)
def test_what_cannot_be_made_right_stops_both_ranks_in_the_same_step(outcomes: Outcomes, case: str, said: str) -> None:
    assert outcomes[0][case]["weights"] == outcomes[1][case]["weights"]
    assert said in outcomes[1][case]["error"]
    for rank in outcomes:
        assert rank[case]["done"] == 1
        line = rank[case]["error"]
        assert "at step 2 on ranks" in line and "was not used" in line and "\n" not in line
        assert rank[case]["gradients"]["recovered"] == 0


@pytest.mark.long
def test_a_rank_that_dies_in_a_step_leaves_no_other_waiting(tmp_path: Path, checkout: Path) -> None:
    ranks = start_pair("tests.cards.host_sync_rank", tmp_path / "store", checkout, "dying")
    (said, complaint), (_, other) = wait_for(ranks)
    assert ranks[1].returncode == -signal.SIGKILL, other
    assert ranks[0].returncode == 0, complaint
    assert said.startswith("RuntimeError")


def test_powersgd_through_the_host_is_refused() -> None:
    with pytest.raises(UsageError, match="powersgd does not go with --grad_sync host"):
        SyncSettings(way="host", compression="powersgd")


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    gc.collect()  # a process group held in a cycle may abort the interpreter at its end
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_what_the_compute_stream_is_still_writing_is_waited_for(dtype: torch.dtype) -> None:
    settings = TransferSettings(slot_bytes=64 << 10)
    with Mover(DEVICE, settings=settings) as mover:
        averaging = HostAveraging(mover, SyncSettings(way="host"))
        slow = torch.randn(4096, 4096, device=DEVICE)
        for size in (1, 1000, 32_768, 300_001):
            for _ in range(20):
                slow = torch.tanh(slow @ slow)
            local = slow.flatten()[:size].to(dtype)
            average = averaging.begin(local, name="bucket", number=0, is_last=True).wait()
            twice = average * 2  # on the compute stream, which must have waited
            averaging.check()
            assert torch.equal(twice, local * 2)
        crossed = mover.report.to_dict()["buckets"]
    assert crossed["mismatches"] == 0 and crossed["verified_bytes"] == crossed["bytes"] > 0


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("fault", [None, "stage=buckets,kind=zero,rate=0.5", "stage=gradients,kind=flip,rate=0.5"])
@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_training_is_that_of_stock_averages(fault: str | None, compression: str) -> None:
    weights = []
    for way in ("ddp", "host"):
        torch.manual_seed(0)
        net = Net()
        net.unused.requires_grad_(False)
        model = DistributedDataParallel(net.to(DEVICE), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        faults = FaultSpec.parse(fault) if fault and way == "host" else None
        with Mover(DEVICE, faults=faults) as mover:
            check = watch(model, mover, None, SyncSettings(way=way, compression=compression))  # type: ignore[arg-type]
            assert check is not None
            for step in range(1, 6):
                model(
                    torch.randn(8, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(step))
                ).square().mean().backward()
                check.settle(step=step)
                optimizer.step()
                optimizer.zero_grad()
            assert (mover.report.incidents != []) == (faults is not None)
        weights.append({name: digest(weight.detach()).hex() for name, weight in net.named_parameters()})
    assert weights[0] == weights[1]
