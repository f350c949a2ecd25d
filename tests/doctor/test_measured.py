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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.doctor import arithmetic, diagnose, transfers
from hf_rocm_tune.doctor.diagnose import MEASURED, run_measured
from hf_rocm_tune.doctor.findings import Finding, failure
from hf_rocm_tune.doctor.links import LinkRate
from hf_rocm_tune.doctor.transfers import assess_bandwidth
from hf_rocm_tune.machine.child import Outcome, Task
from tests.doctor.harm import harm
from tests.doctor.together import together

LATE = 240.0
SMALL: dict[str, dict[str, Any]] = {
    "round_trip": {"largest": 65_536, "repeats": 4},
    "casts": {},
    "bandwidth": {"mib": 1},
    "canaries": {"cycles": 3, "seconds": 60},
    "gemm": {"seconds": 0.01},
    "model": {},
    "attention": {"length": 300},
    "nf4": {},
}
BY_NAME = {check.name: check for check in MEASURED}


def request(name: str, ending: str = "", **more: Any) -> dict[str, Any]:
    fault = {"fault": {"kind": ending}} if ending else {}
    return {"device": "cpu", **SMALL[name], **fault, **more}


def found(name: str, **more: Any) -> list[Finding]:
    """The findings of a check that measures in this process, taken through JSON as a child's are."""
    made = diagnose._call(BY_NAME[name], {**BY_NAME[name].options, **request(name, **more)})
    return [Finding(**json.loads(json.dumps(one.to_dict()))) for one in made]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few dtypes and small sizes, for tests that only want to see one fault found."""
    monkeypatch.setattr(arithmetic, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(arithmetic, "REPEATED_SHAPES", {"cpu": (8, 16, 24)})
    monkeypatch.setattr(arithmetic, "ROWS", (1, 9))
    monkeypatch.setattr(arithmetic, "LONGER", 2)


# ---- children ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, str], list[Finding]]:
    """Findings of children: of a sound machine, and of children that give no result."""

    def child(name: str, kind: str = "", deadline_s: float = LATE) -> list[Finding]:
        return run_measured(replace(BY_NAME[name], deadline_s=deadline_s), request(name, kind, hip=True))

    sound = {(name, ""): partial(child, name) for name in SOUND}
    bad = {("bandwidth", kind): partial(child, "bandwidth", kind, late) for kind, late in ENDINGS.items()}
    return together({**sound, **bad}, workers=2)


ENDINGS = {"hang": 1.0, "kill": LATE, "garbage": LATE}
SOUND = ("round_trip", "bandwidth")


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_machine_passes_in_a_child(name: str, ended: dict[tuple[str, str], list[Finding]]) -> None:
    for finding in ended[name, ""]:
        # What the link of a CPU gives cannot be compared with anything.
        assert finding.status == ("unknown" if name == "bandwidth" else "ok"), finding
        assert finding.subject == "cpu"


@pytest.mark.parametrize(
    ("kind", "said"), [("hang", "had not ended"), ("kill", "SIGKILL"), ("garbage", "cannot be read")]
)
def test_a_fault_in_a_child_is_a_finding(kind: str, said: str, ended: dict[tuple[str, str], list[Finding]]) -> None:
    (finding,) = ended["bandwidth", kind]
    assert finding.status == "fail" and finding.fix and finding.source
    assert said in " ".join((finding.text, *finding.read))


def test_a_check_that_fails_is_repeated_with_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def here(tasks: list[Task], *, deadline_s: float) -> list[Outcome]:
        asked.append(tasks[0].environ)
        return [Outcome(status="done", result={"findings": [one.to_dict() for one in found(*tasks[0].arguments)]})]

    monkeypatch.setattr(diagnose, "run_together", here)
    harm(monkeypatch, "round_trip", "zeros", "")
    (finding,) = run_measured(BY_NAME["round_trip"], request("round_trip", hip=True))
    assert asked == [{}, {"HSA_ENABLE_SDMA": "0"}]
    assert finding.status == "fail" and finding.read[-1] == "HSA_ENABLE_SDMA=0: the same"


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (Outcome(status="died", error="OutOfMemoryError: HIP out of memory", code=1), "unknown", "not enough memory"),
        (Outcome(status="died", error="RuntimeError: HIP error: invalid device function", code=1), "fail", "HIP error"),
        (Outcome(status="died", error="ImportError: libamdhip64.so.7", code=1), "unknown", "broken installation"),
        (Outcome(status="died", code=-11, step="casting"), "fail", "SIGSEGV while casting"),
        (Outcome(status="timeout", seconds=60, state="D (disk sleep), in amdgpu_x"), "fail", "could not be killed"),
    ],
)
def test_what_no_result_means_depends_on_how_the_child_ended(outcome: Outcome, status: str, words: str) -> None:
    finding = failure("casting", outcome, subject="cpu")
    assert finding.status == status and words in finding.text


def test_the_parents_half_imports_no_torch_and_a_wrong_name_is_refused() -> None:
    code = "import sys, hf_rocm_tune.doctor.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
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
        ("drop", "back", "disagree"),
        ("unstable", "back", "read_back"),
        ("zero_range", "65,536 bytes of uint8, page-locked, non_blocking to", "memory"),
        ("flip", "strided to", "memory"),
        ("drop", "reused to", "not_written"),
    ],
)
def test_a_faulty_copy_is_found_and_its_way_is_named(
    kind: str, where: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, "round_trip", kind, where)
    (finding,) = found("round_trip")
    assert (finding.status, finding.row) == ("fail", f"round_trip_{row}")
    assert "wrong, the first at offset" in finding.read[0] and "instead of" in finding.read[0]
    assert {"zeros": "100 % zeros", "drop": "poison (never written)"}.get(kind, "") in finding.read[0]


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


@pytest.mark.parametrize(("harm", "row"), [(once, "sending"), (source_too, "source"), (late, "disagree")])
def test_what_is_no_constant_fault_of_the_way_is_told_apart(
    harm: Any, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "Copies", lambda: Scripted(harm))
    (finding,) = found("round_trip")
    assert finding.row == f"round_trip_{row}"


@pytest.mark.parametrize("strided", [False, True])
def test_a_wrong_cast_is_found(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding that cuts instead, as of a kernel that looks at the upper half alone; where ``strided``, of a view."""

    def cut(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if (tensor.dtype, dtype) != (torch.float32, torch.bfloat16) or strided is tensor.is_contiguous():
            return tensor.to(dtype)
        return tensor.contiguous().view(torch.bfloat16).view(*tensor.shape, 2)[..., 1]

    monkeypatch.setattr(transfers, "cast", cut)
    (finding,) = found("casts")
    assert finding.row == "casts_wrong" and "torch.float32 to torch.bfloat16" in finding.read[1]


@pytest.mark.parametrize(("kind", "words"), [("zeros", "100 % zeros"), ("flip", "100 % differ in one bit")])
def test_a_canary_that_changes_is_found(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, "canaries", kind, "")
    (finding,) = found("canaries")
    assert (finding.status, finding.row) == ("fail", "canaries_changed")
    assert words in finding.read[0] and "cycle 2" in finding.read[0]
    (held,) = found("canaries", seconds=0)
    assert "stable for 0 cycles" in held.title, "no cycle begins after its time, and no more is claimed"


@pytest.mark.parametrize(
    ("rate", "links", "row", "words"),
    [
        (28.4, [(16, 16.0)], "bandwidth_right", "28.4 GB/s"),
        (6.5, [(16, 16.0), (4, 16.0)], "bandwidth_right", "6.5 GB/s"),
        (13.0, [(16, 8.0)], "bandwidth_right", "13.0 GB/s"),
        (6.5, [(16, 16.0)], "bandwidth_low", "21 %"),
        (3.0, [(4, 16.0)], "bandwidth_low", "38 %"),
        (6.5, [], "", "unknown"),
    ],
)
def test_a_link_is_called_by_its_name(rate: float, links: list[tuple[int, float]], row: str, words: str) -> None:
    states = [LinkRate(width, speed, "0000:03:00.0") for width, speed in links]
    finding = assess_bandwidth("cuda:0", rate, rate + 1, states)
    assert finding.row == row and words in finding.title


def test_the_link_is_read_while_copies_are_on_their_way(tmp_path: Path) -> None:
    place = tmp_path / "sys/bus/pci/devices/0000:03:00.0"
    place.mkdir(parents=True)
    (place / "current_link_width").write_text("4\n")
    (place / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (finding,) = found("bandwidth", root=str(tmp_path), address="0000:03:00.0")
    assert "x4 at 16 GT/s" in finding.text


# ---- arithmetic --------------------------------------------------------------------------------------------------

RESULT_FAULTS = [
    *(("gemm", kind, "") for kind in ("nan", "zeros")),
    ("gemm", "wrong", "float32"),
    ("model", "wrong", "padded, 128 tokens: gradient of key"),
    ("model", "zeros", "packed, 256 tokens: gradient of query"),
    ("model", "gradient", ""),
    ("attention", "wrong", "packed: gradient of the keys"),
    ("attention", "nan", ""),
    ("nf4", "nan", "9 rows without a gradient"),
    ("nf4", "gradient", ""),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("name", "kind", "where"), RESULT_FAULTS)
def test_each_fault_is_found_and_named_where_it_is(
    name: str, kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, name, kind, where)
    finding = found(name)[0]
    assert finding.status == "fail" and finding.row == f"{name}_wrong" and finding.fix and finding.source
    words = {"nan": "NaN", "zeros": "zero", "gradient": "gradient", "wrong": "elements wrong"}
    assert words[kind] in finding.read[0] and where in finding.read[0] and " 1 of " in finding.text
    assert name != "gemm" or "repeat 37" in finding.read[0]


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
    (finding,) = found("gemm")
    assert (finding.row, finding.status) == ("gemm_right", "ok") and "order of sums" in finding.read[-1]


def test_sums_and_factors_of_less_precision_are_found() -> None:
    """float32 sums are the promise: a library that adds in bfloat16, or cuts float32 to TensorFloat, breaks it."""
    with arithmetic.Comparison({"device": "cpu"}) as compare:
        left, right = (arithmetic.spread(size, torch.bfloat16, compare.generator) for size in ((8, 512), (512, 8)))
        total = torch.zeros(8, 8, dtype=torch.bfloat16)
        for k in range(512):
            total += left[:, k : k + 1] * right[k : k + 1]
        assert not compare.close("narrow sums", total, *arithmetic.product(left, right, torch.bfloat16))
        left, right = (arithmetic.spread(size, torch.float32, compare.generator) for size in ((16, 64), (64, 16)))
        cut = [(tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in (left, right)]
        assert not compare.close("TF32", cut[0] @ cut[1], *arithmetic.product(left, right, torch.float32))


def faulty(kind: str, right: Any) -> Any:
    """Attention with a fault of its own."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        length = query.shape[2]
        if query.dtype is torch.float64 or query.requires_grad is False:
            return right(query, key, value, **options)
        if kind == "sees the example before" and options.get("attn_mask") is not None:
            options |= {"attn_mask": None, "is_causal": True}
        elif kind == "not contiguous" and not value.is_contiguous():
            value = value.roll(1, dims=1)  # as ROCm/pytorch#3230: wrong where heads are the inner axis
        output = right(query, key, value, **options)
        if kind == "late rows" and length > 250:
            output = output * (torch.arange(length)[:, None] < 250)
        return output

    return attend


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("attention", "late rows", "output"),
        ("attention", "sees the example before", "packed: output"),
        ("model", "sees the example before", "packed"),
        ("model", "not contiguous", "plain"),
    ],
)
def test_an_attention_that_is_wrong_in_one_way_is_found(
    name: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    right = arithmetic.scaled_dot_product_attention
    attend = faulty(kind, right)

    def on_the_device_only(*inputs: Tensor, **options: Any) -> Tensor:
        # The device computes first; in ``model`` the CPU computes twice after it.
        calls.append(1)
        device = name == "attention" or len(calls) % 3 == 1
        return attend(*inputs, **options) if device else right(*inputs, **options)

    monkeypatch.setattr(arithmetic, "scaled_dot_product_attention", on_the_device_only)
    finding = found(name)[0]
    assert finding.row == f"{name}_wrong" and any(words in line for line in finding.read[:4]), finding


@pytest.mark.parametrize("where", ["packed", ""])
def test_a_mask_that_sends_attention_through_the_math_path_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, "attention", "math", where)
    right, backend = found("attention")
    assert right.row == "attention_right", "slow, and not wrong"
    assert (backend.row, backend.status) == ("attention_unfused", "warn")
    assert ("on cpu, packed batches" in backend.text) == (where == "packed")


def test_attention_is_checked_as_far_as_memory_and_time_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = BY_NAME["attention"].options["length"]
    assert planned >= 28_000, "as long as plans are"
    tried: list[tuple[int, bool]] = []
    clock = [0.0]

    def long(compare: Any, length: int, *, packed: bool) -> str:
        tried.append((length, packed))
        clock[0] += 8 * (length / 7168) ** 2 if packed else 0
        if length > 20_000:
            raise torch.OutOfMemoryError
        return "flash"

    monkeypatch.setattr(arithmetic, "_long", long)
    monkeypatch.setattr(arithmetic, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    text = found("attention", length=planned, seconds=20)[0].text
    assert max(tried) == (28_672, False) and max(one for one in tried if one[1]) == (7168, True)
    assert "at 14,336 tokens plain and 7,168 tokens packed" in text
    assert "28,672 tokens plain do not fit into its memory; 14,336 tokens packed would take 32 s" in text


@pytest.mark.usefixtures("small")
def test_nf4_levels_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as functional

    right = functional.dequantize_4bit
    monkeypatch.setattr(
        functional, "dequantize_4bit", lambda packed, state: right((packed << 4) | (packed >> 4), state)
    )
    (finding,) = found("nf4")
    assert finding.row == "nf4_wrong" and "NF4" in finding.read[0]
    assert "bitsandbytes has loaded libbitsandbytes" in finding.read[-1]


def test_a_bitsandbytes_that_refuses_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as functional

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Method 'cquantize_blockwise' not available in CPU-only version of bitsandbytes.\nReinstall")

    monkeypatch.setattr(functional, "quantize_4bit", refuse)
    (finding,) = found("nf4")
    assert (finding.row, finding.status) == ("nf4_refused", "warn") and "not available" in finding.text
    monkeypatch.setattr(arithmetic.importlib.util, "find_spec", lambda name: None)
    (finding,) = found("nf4")
    assert finding.status == "skipped" and "not installed" in finding.text


class _Unsteady(Tensor):
    """Reads back otherwise each time."""

    reads = 0

    def cpu(self) -> Tensor:  # type: ignore[override]
        _Unsteady.reads += 1
        return torch.full((4,), float(_Unsteady.reads))


def test_a_wrong_result_is_told_from_a_bad_readback() -> None:
    with arithmetic.Comparison({"device": "cpu"}) as compare:
        assert not compare.close("sum", torch.zeros(4).as_subclass(_Unsteady), torch.zeros(4), torch.zeros(4))
        finding = compare.verdict("x", ("", "", ""), ("", "", "", ""))
    assert finding.row == "arithmetic_read_back" and "it was different" in finding.read[0]


@pytest.mark.parametrize(
    ("rates", "row", "words"),
    [
        ({"rocBLAS": 60.0, "hipBLASLt": 55.0}, "gemm_speed", "60 TFLOPS"),
        ({"rocBLAS": 12.0, "hipBLASLt": 55.0}, "gemm_slow", "TORCH_BLAS_PREFER_HIPBLASLT=1"),
        ({"hipBLASLt": 12.0, "rocBLAS": 55.0}, "gemm_slow", "TORCH_BLAS_PREFER_HIPBLASLT=0"),
        ({"hipBLASLt": 55.0, "rocBLAS": 12.0}, "gemm_speed", "55 TFLOPS"),
    ],
)
def test_the_libraries_are_judged_by_each_other(rates: dict[str, float], row: str, words: str) -> None:
    """Not by a figure of another card, or one that was measured through ZLUDA."""
    gradient = "products of the loss gradient: hipBLASLt (TFLOP/s: rocBLAS 2, hipBLASLt 50)"
    finding = arithmetic.assess_speed("cuda:0", rates, 8192, gradient)
    assert finding.row == row and words in f"{finding.title} {finding.fix}" and gradient in finding.read


# ---- on an accelerator -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_a_gpu_is_measured(name: str) -> None:
    asked = {**BY_NAME[name].options, "device": "cuda:0", "hip": torch.version.hip is not None}
    for finding in run_measured(BY_NAME[name], asked):
        assert finding.status in ("ok", "info", "skipped") or name in ("bandwidth", "attention")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind", "where"), RESULT_FAULTS)
def test_each_fault_is_found_on_an_accelerator(
    name: str, kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, name, kind, where)
    assert found(name, device="cuda:0")[0].status == "fail"
