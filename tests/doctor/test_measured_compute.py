"""Checks of arithmetic: a machine that computes right passes, and each fault of their kind is found and named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured import MEASURED, attention, attention_child, blas, gemm_child, nf4
from hf_rocm_tune.doctor.measured.compute import COMPUTE
from hf_rocm_tune.doctor.measured.conduct import run_measured
from hf_rocm_tune.doctor.measured.faults import DoctorFault
from hf_rocm_tune.doctor.measured.rounding import Reference
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.hardware.child import Outcome
from tests.doctor.arithmetic import CHECKS, found, measured, shrink

FAULTS = [(one.name, kind) for one in COMPUTE if one.name in CHECKS for kind in one.faults]


@pytest.mark.parametrize("name", CHECKS)
def test_a_cpu_that_computes_right_passes(name: str) -> None:
    for finding in found(name):
        assert finding.status == "ok", finding
        assert finding.sources and finding.evidence


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 41))
@pytest.mark.parametrize("name", CHECKS)
def test_no_seed_raises_a_false_alarm(name: str, seed: int) -> None:
    result = measured(name, seed=seed)
    assert not result["wrong"], result["problems"]
    assert result["worst"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_the_long_form_passes_too(name: str) -> None:
    assert {finding.status for finding in found(name, full=True)} == {"ok"}


@pytest.mark.parametrize(("name", "kind"), FAULTS)
def test_each_fault_is_found(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    finding = found(name, fault={"kind": kind, "where": ""})[0]
    assert finding.status == "fail" and finding.cure and finding.sources
    words = {"nan": "NaN", "zeros": "zero", "gradient": "gradient", "wrong": "elements wrong", "absmax": "dequantised"}
    assert words[kind] in finding.evidence[0], finding.evidence
    if kind != "absmax":
        assert " 1 of " in finding.text, "one fault, one wrong result"


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(("gemm", where) for where in ("float32 3x5", "bfloat16 batch", "linear layer", "as x.T @ x.T", "int8 33x")),
        *(("norm", where) for where in ("cross entropy of 32003 classes: output", "embedding: gradient", "LayerNorm")),
    ],
)
def test_a_fault_is_named_where_it_is(name: str, where: str) -> None:
    (finding,) = found(name, fault={"kind": "wrong", "where": where})
    assert finding.status == "fail" and where in finding.evidence[0]


def test_a_repeat_that_is_wrong_once_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    (finding,) = found("gemm_repeat", fault={"kind": "wrong", "where": "int8"})
    assert finding.row == "gemm_repeat_wrong"
    assert "int8, repeat 37" in finding.evidence[0]


def test_a_product_that_varies_within_rounding_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
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


def test_sums_in_the_dtype_of_the_factors_are_found() -> None:
    """Exact factors and float32 sums are the promise: a library that adds in bfloat16 breaks it."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        gemm_child.spread((8, 512), torch.bfloat16, generator),
        gemm_child.spread((512, 8), torch.bfloat16, generator),
    )
    total = torch.zeros(8, 8, dtype=torch.bfloat16)
    for k in range(512):
        total += left[:, k : k + 1] * right[k : k + 1]
    tally = Tally({})
    assert not tally.close("narrow sums", total, gemm_child.product(left.double(), right.double(), torch.bfloat16))


def test_float32_that_is_rounded_to_tensorfloat_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (gemm_child.spread(size, torch.float32, generator) for size in ((16, 64), (64, 16)))
    cut = [(tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in (left, right)]
    tally = Tally({})
    assert not tally.close("TF32", cut[0] @ cut[1], gemm_child.product(left.double(), right.double(), torch.float32))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_attention_whose_gradient_alone_is_wrong_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    right = attention_child.scaled_dot_product_attention

    def wrong(*inputs: Tensor, **options: Any) -> Tensor:
        changed = list(inputs)
        changed[number] = _Louder.apply(inputs[number])
        return right(*changed, **options)

    monkeypatch.setattr(attention_child, "scaled_dot_product_attention", wrong)
    finding = found("attention")[0]
    assert finding.row == "attention_gradient_wrong"
    assert attention_child.NAMES[1 + number] in finding.evidence[0]


class _Louder(torch.autograd.Function):
    """Nothing forward, half as much again backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5


def test_a_value_of_another_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ROCm/pytorch#3230: right where tensors are contiguous, wrong where heads are the inner axis."""
    shrink(monkeypatch)
    right = attention_child.scaled_dot_product_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        taken = value if value.is_contiguous() else value.roll(1, dims=1)
        return right(query, key, taken, **options)

    monkeypatch.setattr(attention_child, "scaled_dot_product_attention", wrong)
    result = measured("attention")
    cases = {problem["case"] for problem in result["problems"]}
    assert result["wrong"] and all("heads last" in case for case in cases), cases


def test_nf4_levels_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    import bitsandbytes.functional as functional

    right = functional.dequantize_4bit

    def swapped(packed: Tensor, state: Any) -> Tensor:
        return right((packed << 4) | (packed >> 4), state)

    monkeypatch.setattr(functional, "dequantize_4bit", swapped)
    (finding,) = found("nf4")
    assert finding.row == "nf4_wrong" and "dequantised" in finding.evidence[0]


def test_a_bitsandbytes_that_refuses_is_told_from_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as functional

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Method 'cquantize_blockwise' not available in CPU-only version of bitsandbytes.\nReinstall")

    monkeypatch.setattr(functional, "quantize_4bit", refuse)
    (finding,) = found("nf4")
    assert (finding.row, finding.status) == ("nf4_refused", "warn") and "not available" in finding.text


def test_a_missing_bitsandbytes_is_skipped() -> None:
    result = {**Tally({}).result(), "missing": True, "unavailable": "", "error": {}}
    (finding,) = nf4.judge("nf4", result, {"device": "cuda:0"})
    assert finding.status == "skipped" and "not installed" in finding.text


class _Unsteady(Tensor):
    """Reads back otherwise each time."""

    reads = 0

    def cpu(self) -> Tensor:  # type: ignore[override]
        _Unsteady.reads += 1
        return torch.full((4,), float(_Unsteady.reads))


def test_a_result_that_reads_back_otherwise_is_the_transfers_fault_and_not_arithmetics() -> None:
    tally = Tally({})
    assert not tally.exact("sum", torch.zeros(4).as_subclass(_Unsteady), torch.zeros(4))
    (finding,) = blas_free_judge(tally.result(unavailable={}))
    assert finding.row == "arithmetic_read_back" and "it was different" in finding.evidence[0]


def blas_free_judge(result: dict[str, Any]) -> list[Any]:
    """Any judge will do; that of ``gemm`` takes nothing else."""
    from hf_rocm_tune.doctor.measured import gemm

    return gemm.judge("gemm", result, {"device": "cuda:0"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_bound_lets_nan_or_infinity_pass(value: float) -> None:
    tally = Tally({})
    reference = Reference(torch.zeros(3).double(), torch.full((3,), 1e30).double())
    assert not tally.close("sum", torch.tensor([0.0, value, 0.0]), reference)
    assert tally.result()["worst"] < float("inf"), "JSON has no infinity"


def test_a_computation_that_raises_is_told_from_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)

    def refuse(*_: Any) -> Tensor:
        raise RuntimeError("HIP error: invalid device function")

    monkeypatch.setattr(gemm_child.functional, "linear", refuse)
    (finding,) = found("gemm")
    assert finding.row == "arithmetic_refused" and "invalid device function" in finding.evidence[0]


# ---- which backend runs ------------------------------------------------------------------------------------------


def test_the_backend_that_is_asked_for_is_the_one_that_is_seen() -> None:
    backends = measured("attention", only_backends=True)["backends"]
    for ways in backends.values():
        assert ways["math"] == {"forward": "math", "backward": "math"}
        assert ways["flash"] == {"forward": "flash", "backward": "flash"}, "torch's CPU build has this one"
        assert "refused" in ways["cudnn"]


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        ({"aten::_scaled_dot_product_flash_attention", "aten::mul.Tensor"}, "flash"),
        ({"aten::_scaled_dot_product_efficient_attention"}, "efficient"),
        ({"ScaledDotProductEfficientAttentionBackward0"}, "efficient"),
        ({"ScaledDotProductFlashAttentionForCpuBackward0"}, "flash"),
        ({"aten::_scaled_dot_product_cudnn_attention_backward"}, "cudnn"),
        ({"aten::bmm", "BmmBackward0"}, "math"),
        (set(), "math"),
    ],
)
def test_operators_and_graph_nodes_are_told_by_their_names(names: set[str], backend: str) -> None:
    assert attention_child._ran(names) == backend


def _ways(default: str, **refused: str) -> dict[str, Any]:
    ways: dict[str, Any] = {name: {"forward": name, "backward": name} for name in ("flash", "efficient", "math")}
    ways |= {name: {"refused": why} for name, why in refused.items()}
    return {"default": {"forward": default, "backward": default}, **ways}


def _attention_result(default: str, **refused: str) -> dict[str, Any]:
    backends = {name: _ways(default, **refused) for name in ("bfloat16", "float16", "float32")}
    return Tally({}).result(backends=backends, apart={}, kernels={})


@dataclass
class _Asked:
    """Stands for the children: answers by whether AOTriton's flag is set, and notes how it was asked."""

    plain: Outcome
    flagged: Outcome
    measured = MEASURED["attention"]

    def __post_init__(self) -> None:
        self.environs: list[Mapping[str, str | None] | None] = []

    def __call__(self, *, environ: Mapping[str, str | None] | None = None, **more: Any) -> Outcome:
        self.environs.append(environ)
        assert bool(environ) == bool(more.get("only_backends"))
        return self.flagged if environ else self.plain


MATH = Outcome(status="done", result=_attention_result("math", flash="still experimental", efficient="no kernel"))
FUSED = Outcome(status="done", result=_attention_result("flash"))
DIED = Outcome(status="died", code=-11)


@pytest.mark.parametrize(
    ("plain", "flagged", "hip", "row", "asked"),
    [
        (FUSED, FUSED, True, "attention_fused", 1),
        (MATH, FUSED, True, "attention_needs_flag", 2),
        (MATH, MATH, True, "attention_unfused", 2),
        (MATH, DIED, True, "attention_unfused", 2),
        (MATH, FUSED, False, "attention_unfused", 1),
    ],
)
def test_the_flag_is_tried_where_it_may_help_and_advised_where_it_does(
    plain: Outcome, flagged: Outcome, hip: bool, row: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(attention.FLAG, raising=False)
    ask: Any = _Asked(plain, flagged)
    right, runs = attention.conduct(ask, {"device": "cuda:0", "hip": hip})
    assert right.status == "ok" and runs.row == row
    assert ask.environs == [None, {attention.FLAG: "1"}][:asked]
    if row != "attention_fused":
        assert runs.status == "warn" and "bfloat16 and float16" in runs.text
        assert any("still experimental" in line for line in runs.evidence), "why flash refused"
    if row == "attention_needs_flag":
        assert attention.FLAG in runs.cure


def test_attention_that_no_backend_runs_is_not_said_to_be_fused() -> None:
    result = _attention_result("flash")
    result["backends"]["float16"]["default"] = {"refused": "HIP error"}
    runs = attention.judge("attention", result, {"device": "cuda:0"})[1]
    assert runs.status == "unknown" and "HIP error" in runs.text


def test_a_flag_that_is_set_already_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attention.FLAG, "1")
    ask: Any = _Asked(MATH, FUSED)
    assert attention.conduct(ask, {"device": "cuda:0", "hip": True})[1].row == "attention_unfused"
    assert len(ask.environs) == 1


# ---- the libraries of ROCm ---------------------------------------------------------------------------------------


def _blas_result(rocblas: list[float], hipblaslt: list[float], **more: Any) -> dict[str, Any]:
    seconds = {"rocblas": rocblas, "hipblaslt": hipblaslt}
    shapes = [[2048, 4096, 4096]] * len(rocblas)
    return Tally({}).result(**{"seconds": seconds, "shapes": shapes, "unavailable": {}, "wrong_by": [], **more})


@pytest.mark.parametrize(
    ("result", "row"),
    [
        (_blas_result([2e-3, 2e-3], [1e-3, 1e-3]), "gemm_prefers_hipblaslt"),
        (_blas_result([1e-3, 1e-3], [1e-3, 3e-3]), "gemm_prefers_rocblas"),
        (_blas_result([1e-3, 1e-3], [1.05e-3, 1.05e-3]), "gemm_prefers_neither"),
        (_blas_result([1e-3], [2e-3], wrong_by=["rocblas"]), "gemm_library_wrong"),
        (_blas_result([1e-3], [2e-3], wrong_by=["rocblas", "hipblaslt"]), "gemm_libraries_wrong"),
        (
            {**_blas_result([1e-3], []), "seconds": {"rocblas": [1e-3]}, "unavailable": {"hipblaslt": "no"}},
            "gemm_one_library",
        ),
    ],
)
def test_the_preference_is_what_was_measured(result: dict[str, Any], row: str) -> None:
    (finding,) = blas.judge("blas", result, {"device": "cuda:0"})
    assert finding.row == row
    if row == "gemm_library_wrong":
        assert "TORCH_BLAS_PREFER_HIPBLASLT=1" in finding.cure, "the library that is right is named, not the fast one"


def test_a_library_that_is_wrong_is_named_before_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = found("blas", fault={"kind": "wrong", "where": "by hipblaslt"})
    assert finding.row == "gemm_library_wrong" and "TORCH_BLAS_PREFER_HIPBLASLT=0" in finding.cure


def test_without_rocm_there_is_nothing_to_choose() -> None:
    (finding,) = run_measured(MEASURED["blas"], [{"device": "cpu", "hip": False}])
    assert finding.status == "skipped"


# ---- in a child --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wrong", "kill"])
def test_in_a_child_a_fault_is_found_under_the_name_of_the_check(kind: str) -> None:
    check = MEASURED["gemm_repeat_long"]
    fault = DoctorFault(check=check.name, kind=kind)
    notice, finding = run_measured(check, [{"device": "cpu", "seconds": 0.01}], fault=fault)
    assert notice.row == "fault_on_purpose"
    assert (finding.check, finding.status) == ("gemm_repeat_long", "fail") and finding.cure


def test_the_parents_half_imports_no_torch() -> None:
    modules = ", ".join(f"hf_rocm_tune.doctor.measured.{one.module}" for one in COMPUTE)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_an_accelerator_computes_right(name: str) -> None:
    for finding in found(name, device="cuda:0", seconds=0.2):
        assert finding.status == "ok", finding


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), FAULTS)
def test_each_fault_is_found_on_an_accelerator(name: str, kind: str) -> None:
    assert found(name, device="cuda:0", fault={"kind": kind, "where": ""})[0].status == "fail"


@pytest.mark.gpu
def test_both_libraries_are_tried_on_an_accelerator() -> None:
    result = measured("blas", device="cuda:0")
    assert not result["wrong"] and all(len(times) == len(result["shapes"]) for times in result["seconds"].values())
