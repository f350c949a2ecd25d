"""What the tests of the checks of arithmetic share: measuring in this process, with small sizes."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.measured import PACKAGE
from hf_rocm_tune.doctor.measured import attention_child as attention
from hf_rocm_tune.doctor.measured import gemm_child as gemm
from hf_rocm_tune.doctor.measured import gemm_repeat_child as repeat
from hf_rocm_tune.doctor.measured import nf4_child as nf4
from hf_rocm_tune.doctor.measured import norm_child as norm

CHECKS = ("gemm", "gemm_repeat", "attention", "norm", "nf4")


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few dtypes and small sizes, for tests that only want to see one fault found."""
    for module in (gemm, norm, nf4):
        monkeypatch.setattr(module, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(attention, "DTYPES", (torch.bfloat16, torch.float16))
    monkeypatch.setattr(gemm, "SHAPES", ((3, 5, 7), (17, 31, 63)))
    monkeypatch.setattr(gemm, "LAYOUT_SHAPES", ((17, 31, 63),))
    monkeypatch.setattr(repeat, "HOST_SHAPE", (8, 16, 24))
    monkeypatch.setattr(norm, "SIZES", ((5, 63),))
    monkeypatch.setattr(norm, "CLASSES", 101)
    monkeypatch.setattr(nf4, "SHAPE", (64, 128))
    monkeypatch.setattr(nf4, "ROWS", (1, 9))


def measured(name: str, **request: Any) -> dict[str, Any]:
    """The result of a check's child, made in this process and taken through JSON as a child's is."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    result: dict[str, Any] = json.loads(json.dumps(module.measure({"device": "cpu", "seconds": 0.01, **request})))
    return result


def found(name: str, **request: Any) -> list[Finding]:
    """The findings on it."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    findings: list[Finding] = module.judge(name, measured(name, **request), {"device": "cpu", **request})
    return findings
