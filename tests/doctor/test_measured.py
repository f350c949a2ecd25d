"""Measured checks: a right machine passes, and each fault of their kind is found and named.

On the CPU the same code copies from memory to memory and computes; the faults go in at the copy or the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.doctor import arithmetic, layers, transfers
from hf_rocm_tune.doctor.diagnose import MEASURED, VARIABLE, DoctorFault, measure_here, run_measured
from hf_rocm_tune.doctor.findings import Finding, failure
from hf_rocm_tune.doctor.links import LinkRate, judge_bandwidth
from hf_rocm_tune.doctor.transfers import CAST_WAYS
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import ENDINGS, Outcome
from hf_rocm_tune.machine.survey import CARDS
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.damage import FAULTS
from tests.doctor.together import together

LATE = 120.0
CPU = {"device": "cpu"}
SMALL: dict[str, dict[str, Any]] = {
    "round_trip": {"largest": 65_536, "repeats": 4},
    "casts": {},
    "mmap_heap": {},
    "bandwidth": {"mib": 1},
    "canaries": {"cycles": 3, "seconds": 60, "share": 0.9},
}
COMPUTE = ("gemm", "gemm_repeat", "attention", "norm", "nf4")
RESULT_FAULTS = [(name, kind) for name in COMPUTE for kind in MEASURED[name].faults if kind != "math"]


def found(name: str, fault: tuple[str, str] | None = None, **request: Any) -> list[Finding]:
    """The findings of a check that measures in this process, taken through JSON as a child's are."""
    asked = {**CPU, "seconds": 0.01, **SMALL.get(name, {}), **request}
    asked["fault"] = {"kind": fault[0], "where": fault[1]} if fault else None
    answer = json.loads(json.dumps(measure_here(MEASURED[name], asked)))
    return [Finding.from_dict(values) for values in answer["findings"]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few dtypes and small sizes, for tests that only want to see one fault found."""
    monkeypatch.setattr(arithmetic, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(layers, "DTYPES", (torch.bfloat16, torch.float16))
    monkeypatch.setattr(arithmetic, "SHAPES", ((3, 5, 7), (17, 31, 63)))
    monkeypatch.setattr(arithmetic, "LAYOUT_SHAPES", ((17, 31, 63),))
    monkeypatch.setattr(arithmetic, "REPEATED_SHAPES", {"cpu": (8, 16, 24)})
    monkeypatch.setattr(layers, "SIZES", ((5, 63),))
    monkeypatch.setattr(layers, "CLASSES", 101)
    monkeypatch.setattr(layers, "NF4_DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(layers, "NF4_SHAPES", ((64, 512),))
    monkeypatch.setattr(layers, "ROWS", (1, 9))


# ---- children ----------------------------------------------------------------------------------------------------


def in_child(name: str, deadline_s: float = LATE, kind: str = "") -> list[Finding]:
    request = {**CPU, **SMALL.get(name, {"seconds": 0.01})}
    fault = DoctorFault(check=name, kind=kind) if kind else None
    return run_measured(replace(MEASURED[name], deadline_s=deadline_s), [request], fault=fault)


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, str], list[Finding]]:
    """Findings of children: of a sound machine, of one whose canaries change, and of children that give no result."""
    sound = {(name, ""): partial(in_child, name) for name in SMALL}
    late = {"hang": 1, "kill": LATE, "garbage": LATE}
    bad = {("casts", kind): partial(in_child, "casts", late[kind], kind) for kind in late}
    harmed = {("canaries", "zeros"): partial(in_child, "canaries", kind="zeros")}
    wrong = {("gemm_repeat_long", "wrong"): partial(in_child, "gemm_repeat_long", kind="wrong")}
    return together({**sound, **bad, **harmed, **wrong}, workers=2)


@pytest.mark.parametrize("name", SMALL)
def test_a_sound_machine_passes_in_a_child(name: str, ended: dict[tuple[str, str], list[Finding]]) -> None:
    (finding,) = ended[name, ""]
    # What the link of a CPU gives cannot be compared with anything.
    assert finding.status == ("info" if name == "bandwidth" else "ok"), finding
    assert finding.check == name and finding.subject == "cpu" and finding.evidence and finding.sources


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("casts", "hang", "had not ended"),
        ("casts", "kill", "SIGKILL"),
        ("casts", "garbage", "cannot be read"),
        ("gemm_repeat_long", "wrong", "elements wrong"),
        ("canaries", "zeros", "without allocator settings: changed in cycle 2 too"),
    ],
)
def test_a_fault_in_a_child_is_a_finding_under_the_name_of_the_check(
    name: str, kind: str, said: str, ended: dict[tuple[str, str], list[Finding]]
) -> None:
    notice, finding = ended[name, kind]
    assert notice.row == "fault_on_purpose" and notice.check == finding.check == name
    assert finding.status == "fail" and finding.cure and finding.sources
    assert VARIABLE in finding.evidence[0] and said in " ".join((finding.text, *finding.evidence))


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (Outcome(status="died", error="OutOfMemoryError: HIP out of memory", code=1), "unknown", "not enough memory"),
        (Outcome(status="died", error="RuntimeError: HIP error: invalid device function", code=1), "fail", "HIP error"),
        (Outcome(status="died", error="AcceleratorError: HIP error", code=1), "fail", "HIP error"),
        (Outcome(status="died", error="ImportError: libamdhip64.so.7", code=1), "unknown", "broken installation"),
        (Outcome(status="died", code=-11, step="casting"), "fail", "SIGSEGV while casting"),
        (Outcome(status="timeout", seconds=60, state="D (disk sleep), in amdgpu_x"), "fail", "could not be killed"),
    ],
)
def test_what_no_result_means_depends_on_how_the_child_ended(outcome: Outcome, status: str, words: str) -> None:
    finding = failure("casting", outcome, subject="cpu")
    assert finding.status == status and words in finding.text


@pytest.mark.parametrize(
    "text",
    [
        "check=round_trip",
        "kind=zeros",
        "check=nothing,kind=zeros",
        "check=canaries,kind=drop",
        "check=casts,kind=zeros,kind=flip",
        "round_trip",
        "check=casts,kind=zeros,rate=1",
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        DoctorFault.from_environment({VARIABLE: text})


def test_every_fault_of_every_check_can_be_asked_for() -> None:
    assert DoctorFault.from_environment({}) is None and DoctorFault.from_environment({VARIABLE: " "}) is None
    for name, measured in MEASURED.items():
        for kind in (*measured.faults, *ENDINGS):
            fault = DoctorFault.from_environment({VARIABLE: f"check={name},kind={kind},where=a b"})
            assert fault == DoctorFault(check=name, kind=kind, where="a b")


def test_the_parents_half_imports_no_torch() -> None:
    code = "import sys, hf_rocm_tune.doctor.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    from hf_rocm_tune.cards import trial_measures

    copies, sums = MEASURED["casts"].faults, MEASURED["all_reduce"].faults
    assert (copies, sums) == (FAULTS, trial_measures.SUM_FAULTS), "copies of what imports torch"


def test_a_check_that_does_not_exist_is_refused_by_hand() -> None:
    argv = [sys.executable, "-m", "hf_rocm_tune.doctor.diagnose", "nothing"]
    done = subprocess.run(argv, input="{}", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "round_trip" in done.stderr and "Traceback" not in done.stderr


# ---- transfers and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where", "row"),
    [
        ("zeros", " to cpu", "memory"),
        ("stale", " to cpu", "sending"),
        ("drop", " to cpu", "not_written"),
        ("drop", "back", "mapping"),
        ("unstable", "back", "read_back"),
        ("flip", "to page-locked memory", "read_back"),
        ("zero_range", "65,536 bytes of uint8, page-locked, non_blocking to", "memory"),
        ("unstable", "bfloat16, pageable to", "memory"),
        ("flip", "strided to", "memory"),
        ("flip", "bytes to", "memory"),
        ("drop", "reused to", "not_written"),
        ("zeros", "cold: 65,536 bytes of uint8, pageable to", "memory"),
        ("flip", "1 bytes of uint8, pageable to", "memory"),
    ],
)
def test_a_faulty_copy_is_found_and_its_way_is_named(kind: str, where: str, row: str) -> None:
    (finding,) = found("round_trip", (kind, where))
    assert (finding.status, finding.row) == ("fail", f"round_trip_{row}")
    first = finding.evidence[0]
    assert "wrong, the first at offset" in first and "instead of" in first
    assert {"zeros": "100 % zeros", "drop": "poison (never written)"}.get(kind, "") in first


class Scripted:
    """Copies that do something else at chosen calls."""

    def __init__(self, harm: Any) -> None:
        self.harm, self.calls = harm, 0

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        destination.copy_(source)
        self.calls += 1
        self.harm(self, destination, source, what)


def once(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    if copies.calls == 1:
        destination.zero_()


def source_too(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    """The source was right when it was sent, and changes behind it."""
    if " to cpu" in what and "cold" in what:
        destination[:100] ^= 1
        source[:100] ^= 1


def late(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    """Not there when the device looks, and there when it is read."""
    if "cold" in what and " to cpu" in what:
        destination.zero_()
    elif "cold" in what:
        destination[:] = transfers.fill_with_pattern(torch.empty_like(destination), 0)


def refuse(copies: Scripted, destination: Tensor, source: Tensor, what: str) -> None:
    if "float8_e5m2," in what:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("harm", "row"), [(once, "sending"), (source_too, "source"), (late, "device_only"), (refuse, "right")]
)
def test_what_is_no_constant_fault_of_the_way_is_told_apart(
    harm: Any, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "copies_for", lambda request: Scripted(harm))
    (finding,) = found("round_trip")
    assert finding.row == f"round_trip_{row}"
    assert (harm is refuse) == ("float8_e5m2" in finding.evidence[-1]), "a copy that torch does not have is said"


def test_wrong_bytes_are_tried_again_without_copy_engines_on_rocm_only() -> None:
    for hip in (False, True):
        asked = {**CPU, **SMALL["round_trip"], "hip": hip, "fault": {"kind": "zeros", "where": "cold"}}
        answer = measure_here(MEASURED["round_trip"], asked)
        assert (answer["again"] is not None) == hip
    assert answer["again"]["environ"] == {"HSA_ENABLE_SDMA": "0"}
    second = measure_here(MEASURED["round_trip"], {**asked, "fault": None, "first": answer["findings"]})
    (finding,) = second["findings"]
    assert finding["row"] == "round_trip_memory" and "HSA_ENABLE_SDMA=0: none wrong" in finding["evidence"][-1]


CASTS = [
    ("on the device", "zeros"),
    ("to the device, non_blocking", "zero_range"),
    ("from the device, blocking", "unstable"),
]
OTHERS = [(way, kind) for way in CAST_WAYS for kind in FAULTS if kind != "stale" and (way, kind) not in CASTS]


@pytest.mark.parametrize(
    ("where", "kind"), [*CASTS, *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_a_wrong_cast_is_found_whichever_way_it_is_made(where: str, kind: str) -> None:
    (finding,) = found("casts", (kind, f"torch.float32 to torch.bfloat16 {where}"))
    assert finding.row == "casts_wrong" and where in finding.evidence[1]


def test_the_smallest_difference_of_a_source_that_arrived_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Skewed(Mover):
        def move(self, tensor: Tensor, **named: Any) -> Tensor:
            moved = super().move(tensor, **named)
            moved.view(torch.int16)[6] ^= 1
            return moved

    monkeypatch.setattr(transfers, "Mover", Skewed)
    (finding,) = found("casts")
    assert finding.row == "casts_wrong" and "instead of" in finding.evidence[1]


def test_a_mapped_copy_that_is_slow_or_wrong_is_told() -> None:
    (finding,) = found("mmap_heap", ("slow", ""))
    assert (finding.status, finding.row) == ("warn", "mapped_file_stall")
    assert "8 MiB" in finding.text, "where it stalls, the larger tensor is not waited for"
    (finding,) = found("mmap_heap", ("zeros", "mapped"))
    assert (finding.status, finding.row) == ("fail", "mapped_file_wrong")


def test_mapped_tensors_are_mapped(tmp_path: Path) -> None:
    file = transfers.write_tensor(tmp_path, 1)
    with transfers.safe_open(file, framework="pt") as opened:
        tensor = opened.get_tensor("weight")
        addresses = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
        ranges = [tuple(int(end, 16) for end in line.split("-")) for line in addresses]
        assert any(first <= tensor.data_ptr() < last for first, last in ranges)


@pytest.mark.parametrize(("kind", "words"), [("zeros", "zeros"), ("flip", "bit_flip")])
def test_a_canary_that_changes_is_found(kind: str, words: str) -> None:
    (finding,) = found("canaries", (kind, ""))
    assert (finding.status, finding.row) == ("fail", "canaries_changed")
    assert words in finding.evidence[0] and "cycle 2" in finding.evidence[0]


def test_a_short_watch_claims_no_more_than_it_saw() -> None:
    (finding,) = found("canaries", seconds=0)
    assert finding.row == "canaries_held_for_now" and "0 cycles" in finding.text, "no cycle begins after its time"


@pytest.mark.parametrize(
    ("rate", "links", "row", "words"),
    [
        (28.4, [(16, 16.0)], "bandwidth_right", "x16 link: 28.4 GB/s"),
        (6.5, [(16, 16.0), (4, 16.0)], "bandwidth_of_narrow_link", "x4 link"),
        (13.0, [(16, 8.0)], "bandwidth_right", "x16 link"),
        (6.5, [(16, 16.0)], "bandwidth_low", "21 %"),
        (3.0, [(4, 16.0)], "bandwidth_low", "38 %"),
        (6.5, [], "bandwidth_of_unknown_link", "6.5 GB/s"),
    ],
)
def test_a_link_is_called_by_its_name(rate: float, links: list[tuple[int, float]], row: str, words: str) -> None:
    states = [LinkRate(width, speed, "0000:03:00.0") for width, speed in links]
    (finding,) = judge_bandwidth({"device": "cuda:0", "mib": 256}, rate, rate + 1, states)
    assert finding.row == row and words in finding.title


def test_the_link_is_read_while_copies_are_on_their_way(tmp_path: Path) -> None:
    address = "0000:03:00.0"
    folder = tmp_path / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    files = {"current_link_width": "16", "current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"}
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    (finding,) = found("bandwidth", ("slow", ""), address=address, root=str(tmp_path))
    assert finding.row == "bandwidth_low", "three times as long"
    assert "x16 at 16 GT/s at 0000:03:00.0" in finding.evidence[1]


# ---- arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPUTE)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_a_cpu_that_computes_right_passes(name: str, seed: int) -> None:
    for finding in found(name, seed=seed):
        assert finding.status == "ok", finding
        assert finding.sources and finding.evidence


@pytest.mark.long
@pytest.mark.parametrize("name", COMPUTE)
def test_the_long_form_passes_too(name: str) -> None:
    assert {finding.status for finding in found(name, full=True)} == {"ok"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("name", "kind"), RESULT_FAULTS)
def test_each_fault_is_found(name: str, kind: str) -> None:
    finding = found(name, (kind, ""))[0]
    assert finding.status == "fail" and finding.cure and finding.sources
    words = {"nan": "NaN", "zeros": "zero", "gradient": "gradient", "wrong": "elements wrong", "absmax": "dequantised"}
    assert words[kind] in finding.evidence[0], finding.evidence
    if kind != "absmax":
        assert " 1 of " in finding.text, "one fault, one wrong result"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(("gemm", where) for where in ("bfloat16 3x5", "batch", "linear layer", "as x.T @ x.T", "int8 33x")),
        *(("norm", where) for where in ("classes: output", "embedding: gradient", "LayerNorm")),
        ("gemm_repeat", "int8"),
    ],
)
def test_a_fault_is_named_where_it_is(name: str, where: str) -> None:
    (finding,) = found(name, ("wrong", where))
    assert finding.status == "fail" and where in finding.evidence[0]
    assert name != "gemm_repeat" or "int8, repeat 37" in finding.evidence[0]


@pytest.mark.usefixtures("small")
def test_a_product_that_varies_within_rounding_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, calls = torch.mm, []

    def other_order(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        calls.append(1)
        if len(calls) % 10:
            return multiply(left, right, out=out) if out is not None else multiply(left, right)
        order = torch.randperm(left.shape[1])
        result = multiply(left[:, order].float() * (1 + 2.0**-20), right[order].float()).to(left.dtype)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(torch, "mm", other_order)
    (finding,) = found("gemm_repeat")
    assert (finding.row, finding.status) == ("gemm_repeat_varies", "info")


def test_sums_and_factors_of_less_precision_are_found() -> None:
    """float32 sums are the promise: a library that adds in bfloat16, or cuts float32 to TensorFloat, breaks it."""
    with arithmetic.Comparison(CPU) as compare:
        left, right = (arithmetic.spread(size, torch.bfloat16, compare.generator) for size in ((8, 512), (512, 8)))
        total = torch.zeros(8, 8, dtype=torch.bfloat16)
        for k in range(512):
            total += left[:, k : k + 1] * right[k : k + 1]
        assert not compare.close("narrow sums", total, *arithmetic.product(left, right, torch.bfloat16))
        left, right = (arithmetic.spread(size, torch.float32, compare.generator) for size in ((16, 64), (64, 16)))
        cut = [(tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in (left, right)]
        assert not compare.close("TF32", cut[0] @ cut[1], *arithmetic.product(left, right, torch.float32))


@pytest.mark.parametrize("dtype", arithmetic.DTYPES)
@pytest.mark.parametrize("k", [1, 257, 4096])
def test_exact_factors_leave_nothing_to_round(dtype: torch.dtype, k: int) -> None:
    left, right = arithmetic.exact_factors(5, k, 3, dtype, torch.Generator().manual_seed(0))
    largest = float((left.double().abs() @ right.double().abs()).max())
    assert largest <= 2 / torch.finfo(dtype).eps, "every partial sum, in any order, is an integer that the format holds"
    assert bool((left != 0).any()) and bool((left @ right).isfinite().all())


class _Louder(torch.autograd.Function):
    """Nothing forward, half as much again backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_attention_whose_gradient_alone_is_wrong_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.scaled_dot_product_attention

    def wrong(*inputs: Tensor, **options: Any) -> Tensor:
        changed = list(inputs)
        changed[number] = _Louder.apply(inputs[number])
        return right(*changed, **options)

    monkeypatch.setattr(layers, "scaled_dot_product_attention", wrong)
    finding = found("attention")[0]
    assert finding.row == "attention_gradient_wrong"
    assert layers.LABELS[number] in finding.evidence[0]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("where", "told"), [("packed", "packed"), ("padded", "padded"), ("", "")])
def test_a_mask_that_sends_attention_through_the_math_path_is_told(where: str, told: str) -> None:
    right, *runs = found("attention", ("math", where))
    assert right.row == "attention_right", "slow, and not wrong"
    if not where:  # all of it: then the mask is not the cause
        assert [one.row for one in runs] == ["attention_unfused"]
        return
    masked, plain = runs
    assert (masked.row, masked.status, plain.row) == ("attention_masked_unfused", "warn", "attention_fused")
    assert f", {told} batches" in masked.text and masked.cure
    assert [line.partition(": ")[2] for line in masked.evidence if told in line] == ["math forward, math backward"] * 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("where", ["packed, lengths", "padded, length"])
def test_a_wrong_result_of_a_masked_batch_is_named(where: str) -> None:
    finding = found("attention", ("wrong", where))[0]
    assert finding.row == "attention_wrong" and where in finding.evidence[0]


@pytest.mark.usefixtures("small")
def test_a_query_that_sees_the_example_before_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backend does that takes the mask of a packed row for a causal one."""
    right = layers.scaled_dot_product_attention

    def wrong(*inputs: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        whole = attn_mask is not None and attn_mask.dim() == 2
        return right(
            *inputs, attn_mask=None if whole else attn_mask, **{**options, **({"is_causal": True} if whole else {})}
        )

    monkeypatch.setattr(layers, "scaled_dot_product_attention", wrong)
    finding = found("attention")[0]
    assert finding.status == "fail" and all("packed" in line for line in finding.evidence[:3])


@pytest.mark.usefixtures("small")
def test_a_value_of_another_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ROCm/pytorch#3230: right where tensors are contiguous, wrong where heads are the inner axis."""
    right = layers.scaled_dot_product_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return right(query, key, value if value.is_contiguous() else value.roll(1, dims=1), **options)

    monkeypatch.setattr(layers, "scaled_dot_product_attention", wrong)
    finding = found("attention")[0]
    assert finding.status == "fail" and all("heads last" in line for line in finding.evidence[:3])


@pytest.mark.usefixtures("small")
def test_nf4_levels_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as functional

    right = functional.dequantize_4bit
    monkeypatch.setattr(
        functional, "dequantize_4bit", lambda packed, state: right((packed << 4) | (packed >> 4), state)
    )
    (finding,) = found("nf4")
    assert finding.row == "nf4_wrong" and "dequantised" in finding.evidence[0]


def test_a_bitsandbytes_that_refuses_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as functional

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Method 'cquantize_blockwise' not available in CPU-only version of bitsandbytes.\nReinstall")

    monkeypatch.setattr(functional, "quantize_4bit", refuse)
    (finding,) = found("nf4")
    assert (finding.row, finding.status) == ("nf4_refused", "warn") and "not available" in finding.text
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: None)
    (finding,) = found("nf4")
    assert finding.status == "skipped" and "not installed" in finding.text


def test_the_nf4_levels_are_the_published_ones() -> None:
    """Quantiles of the normal distribution, as QLoRA's appendix E derives them, scaled to -1 and 1, and a zero."""
    from statistics import NormalDist

    top, normal = 0.9677083, NormalDist()
    positive = [normal.inv_cdf(top + (0.5 - top) * step / 8) for step in range(8)]
    negative = [-normal.inv_cdf(top + (0.5 - top) * step / 7) for step in range(7)]
    levels = torch.tensor(sorted([*positive, *negative, 0.0]), dtype=torch.float64) / positive[0]
    torch.testing.assert_close(layers.LEVELS, levels, rtol=0, atol=2e-7)


class _Unsteady(Tensor):
    """Reads back otherwise each time."""

    reads = 0

    def cpu(self) -> Tensor:  # type: ignore[override]
        _Unsteady.reads += 1
        return torch.full((4,), float(_Unsteady.reads))


def test_a_result_that_reads_back_otherwise_is_the_transfers_fault_and_not_arithmetics() -> None:
    with arithmetic.Comparison(CPU) as compare:
        assert not compare.exact("sum", torch.zeros(4).as_subclass(_Unsteady), torch.zeros(4))
        finding = compare.verdict("gemm_right", "gemm_wrong")
    assert finding.row == "arithmetic_read_back" and "it was different" in finding.evidence[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_bound_lets_nan_or_infinity_pass(value: float) -> None:
    with arithmetic.Comparison(CPU) as compare:
        bound = torch.full((3,), 1e30).double()
        assert not compare.close("sum", torch.tensor([0.0, value, 0.0]), torch.zeros(3).double(), bound)


@pytest.mark.usefixtures("small")
def test_a_computation_that_raises_is_told_from_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise RuntimeError("HIP error: invalid device function")

    monkeypatch.setattr(arithmetic.functional, "linear", refuse)
    (finding,) = found("gemm")
    assert finding.row == "arithmetic_refused" and "invalid device function" in finding.evidence[0]


# ---- what runs, and what is faster -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        ({"aten::_scaled_dot_product_flash_attention", "aten::mul.Tensor"}, "flash"),
        ({"ScaledDotProductEfficientAttentionBackward0"}, "efficient"),
        ({"ScaledDotProductFlashAttentionForCpuBackward0"}, "flash"),
        ({"aten::_scaled_dot_product_cudnn_attention_backward"}, "cudnn"),
        ({"aten::bmm", "BmmBackward0"}, "math"),
    ],
)
def test_operators_and_graph_nodes_are_told_by_their_names(names: set[str], backend: str) -> None:
    assert layers.backend_of(names) == backend


def backends(default: str, **refused: str) -> dict[str, Any]:
    ways: dict[str, Any] = {name: {"forward": name, "backward": name} for name in ("flash", "efficient", "math")}
    ways |= {name: {"refused": why} for name, why in refused.items()}
    whole = {"default": {"forward": default, "backward": default}, **ways}
    return {name: dict(whole) for name in ("bfloat16", "float16", "float32")}


def test_the_flag_is_advised_where_it_helps() -> None:
    slow = backends("math", flash="still experimental", efficient="no kernel")
    assert layers.default_backends("cuda:0", backends("flash")).row == "attention_fused"
    runs = layers.default_backends("cuda:0", slow)
    assert (runs.row, runs.status) == ("attention_unfused", "warn") and "bfloat16 and float16" in runs.text
    assert any("still experimental" in line for line in runs.evidence), "why flash refused"
    with_it = layers.with_flag([runs], backends("flash"), ["bfloat16", "float16"])[0]
    assert with_it.row == "attention_needs_flag" and layers.FLAG in with_it.cure and with_it.status == "warn"
    without = layers.with_flag([runs], slow, ["bfloat16"])[0]
    assert without.row == "attention_unfused" and without.evidence[-1].endswith("the same")
    none = backends("flash")
    none["float16"]["default"] = {"refused": "HIP error"}
    assert layers.default_backends("cuda:0", none).status == "unknown", "what no backend runs is not said to be fused"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("hip", "flag", "again"), [(True, "", True), (False, "", False), (True, "1", False)])
def test_the_flag_is_tried_once_and_on_rocm_only(
    hip: bool, flag: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(layers.FLAG, flag)
    monkeypatch.setattr(layers, "CASES", ())
    monkeypatch.setattr(layers, "backend_of", lambda names: "math")
    monkeypatch.setattr(layers, "DTYPES", (torch.bfloat16, torch.float16))
    answer = measure_here(MEASURED["attention"], {**CPU, "hip": hip})
    assert (answer["again"] is not None) == again
    if again:
        assert answer["again"]["environ"] == {layers.FLAG: "1"}


@pytest.mark.parametrize(
    ("card", "tflops", "row"),
    [
        ("7900 xt", 77, "gemm_rate"),
        ("7900 xt", 61, "gemm_rate"),
        ("7900 xt", 59, "gemm_slow"),
        ("7900 xtx", 67, "gemm_slow"),
    ],
)
def test_the_rate_of_products_is_judged_by_what_was_measured_on_such_cards(card: str, tflops: float, row: str) -> None:
    known = next(one for one in CARDS if one.key == card)
    assert [one.row for one in arithmetic.judge_rate("cuda:0", known, tflops)] == [row]


def test_no_rate_is_measured_of_a_device_without_a_known_one() -> None:
    assert found("gemm_rate")[0].status == "skipped"


# ---- on an accelerator -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, one in MEASURED.items() if not one.needs_cards])
def test_a_gpu_is_measured(name: str) -> None:
    request = {"device": "cuda:0", "hip": torch.version.hip is not None}
    if name.startswith("canaries"):
        request["cycles"] = 10
    for finding in run_measured(MEASURED[name], [request]):
        assert finding.status in ("ok", "info", "skipped") or name in ("bandwidth", "attention")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), RESULT_FAULTS)
def test_each_fault_is_found_on_an_accelerator(name: str, kind: str) -> None:
    assert found(name, (kind, ""), device="cuda:0")[0].status == "fail"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "where"), [("round_trip", " to cuda:0"), ("round_trip", "back"), ("casts", "from")])
def test_faulty_copies_of_a_gpu_are_found(name: str, where: str) -> None:
    request = {"device": "cuda:0", **SMALL[name]}
    findings = run_measured(MEASURED[name], [request], fault=DoctorFault(check=name, kind="flip", where=where))
    assert [finding.status for finding in findings] == ["warn", "fail"]
