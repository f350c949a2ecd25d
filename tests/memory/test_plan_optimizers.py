"""What the planner says of an optimizer is what that optimizer keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan_optimizers import OPTIMIZERS, Trained, optimizer

SHAPES = ((128, 96), (64,), (256, 64))


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def _trained(dtype: torch.dtype) -> list[Trained]:
    return [Trained(elements=torch.Size(shape).numel(), itemsize=dtype.itemsize) for shape in SHAPES]


def _state_bytes(found: torch.optim.Optimizer) -> int:
    """Bytes of tensors that have a value for each element, and of their constants."""
    states = [value for state in found.state.values() for value in state.values() if torch.is_tensor(value)]
    tables = {"qmap1", "qmap2"}
    shared = [value for state in found.state.values() for key, value in state.items() if key in tables]
    nbytes = sum(value.numel() * value.element_size() for value in states if value.ndim)
    return nbytes - sum(value.numel() * value.element_size() for value in shared)


def _stepped(found: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in found.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    found.step()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_states_of_torch_have_the_parameters_dtype(name: str, dtype: torch.dtype) -> None:
    real = _stepped(torch.optim.AdamW(_parameters(dtype), fused=name.endswith("fused")))
    assert optimizer(name).kept(_trained(dtype)) == _state_bytes(real)


def test_states_of_8_bits() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()  # without what a training before has told it
    real = _stepped(bitsandbytes.optim.AdamW8bit(_parameters(torch.float32)))
    kept = optimizer("adamw_8bit").kept(_trained(torch.float32))
    assert kept == _state_bytes(real)
    assert kept < optimizer("adamw_torch").kept(_trained(torch.float32)) / 3


def test_an_unknown_optimizer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="adamw_torch_fused"):
        optimizer("adafactor")


def test_names_are_those_of_transformers() -> None:
    from transformers.training_args import OptimizerNames

    assert set(OPTIMIZERS) <= {each.value for each in OptimizerNames}


def test_only_the_loop_of_the_cpu_takes_copies_of_one_parameter() -> None:
    trained = _trained(torch.float32)
    everything = sum(each.nbytes for each in trained)
    assert optimizer("adamw_torch").taken(trained) == everything
    assert optimizer("adamw_torch", on_cpu=True).taken(trained) == 3 * max(each.nbytes for each in trained)
    assert optimizer("adamw_torch_fused", on_cpu=True).taken(trained) == 0
