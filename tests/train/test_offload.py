"""What others offload is named; what can be compared afterwards is compared."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.placement import Coverage
from hf_rocm_tune.train.refusals import OptimizerTablesCallback, check_compiled, with_offloads

COMPLETE = Coverage(verified_bytes=10, device_bytes=10)


def settings(device: str = "cuda", *, optim: str = "adamw_torch") -> Any:
    return SimpleNamespace(device=torch.device(device), optim=OptimizerNames(optim))


def named(args: Any) -> list[str]:
    return [row["tensor"] for row in with_offloads(COMPLETE, args).unverified]


def test_what_is_offloaded_past_the_mover_makes_the_coverage_incomplete() -> None:
    assert named(settings(optim="paged_adamw_8bit")) == ["paged optimizer state"]
    assert named(settings(optim="adafactor")) == ["new optimizer state"]
    assert not with_offloads(COMPLETE, settings(optim="paged_lion_32bit")).complete


def compiled(device: str = "cpu", **flags: Any) -> Any:
    given = {"use_liger_kernel": False, "torch_compile": False, "torch_compile_backend": None, **flags}
    return SimpleNamespace(device=torch.device(device), **given)


def test_kernels_that_cannot_be_compiled_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled(compiled())
    with pytest.raises(UsageError, match="--use_liger_kernel needs the package liger-kernel"):
        check_compiled(compiled(use_liger_kernel=True))
    monkeypatch.setitem(sys.modules, "liger_kernel", liger := ModuleType("liger_kernel"))
    liger.__spec__ = ModuleSpec("liger_kernel", None)
    with pytest.raises(
        UsageError, match=r"--use_liger_kernel needs Triton, which .* \(Triton has no kernels for cpu\)"
    ):
        check_compiled(compiled(use_liger_kernel=True))
    check_compiled(compiled(torch_compile=True))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    check_compiled(compiled(torch_compile=True, torch_compile_backend="eager"))
    with pytest.raises(UsageError, match="--torch_compile on a CPU needs a C\\+\\+ compiler"):
        check_compiled(compiled(torch_compile=True))


def trained() -> Any:
    from bitsandbytes.optim import AdamW8bit

    parameter = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = AdamW8bit([parameter], lr=1e-3)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_a_code_table_that_arrived_wrong_is_found() -> None:
    step: dict[str, Any] = {"args": None, "state": None, "control": None}
    OptimizerTablesCallback().on_step_end(**step, optimizer=trained())
    OptimizerTablesCallback().on_step_end(**step, optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
    for name in ("dynamic", "udynamic"):
        wrong = trained()
        wrong.name2qmap[name][100] = 0
        with pytest.raises(CorruptionError, match=f"the {name} code table"):
            OptimizerTablesCallback().on_step_end(**step, optimizer=SimpleNamespace(optimizer=wrong))
