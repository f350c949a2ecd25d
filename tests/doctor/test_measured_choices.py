"""What is measured decides: which attention backend runs, which library of ROCm is the faster one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from hf_rocm_tune.doctor.measured import MEASURED, attention, attention_child, blas
from hf_rocm_tune.doctor.measured.conduct import run_measured
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.machine.child import Outcome
from tests.doctor.arithmetic import found, measured

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
