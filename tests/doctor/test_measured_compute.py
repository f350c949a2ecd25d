"""Checks of arithmetic: a machine that computes right passes, and each fault of their kind is found and named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured import MEASURED, attention_child, gemm_child, nf4
from hf_rocm_tune.doctor.measured.compute import COMPUTE
from hf_rocm_tune.doctor.measured.conduct import run_measured
from hf_rocm_tune.doctor.measured.faults import DoctorFault
from hf_rocm_tune.doctor.measured.rounding import Reference
from hf_rocm_tune.doctor.measured.tally import Tally
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
