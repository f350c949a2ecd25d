"""Attacks on the optimizer's own arithmetic: torch's steps with a fault in them, and clean steps by the thousand."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.train.update import UpdateChecks
from hf_rocm_tune.transfer import TransferReport


def parameters(dtype: torch.dtype, scale: float = 0.1) -> list[nn.Parameter]:
    shapes = [(48, 16), (7,), (1,), (5, 3, 2), (400,)]
    return [nn.Parameter((torch.randn(shape) * scale).to(dtype)) for shape in shapes]


def watched(optimizer: torch.optim.Optimizer) -> UpdateChecks:
    checks = UpdateChecks(TransferReport(), on=True)
    checks.watch(optimizer, {}, scaled=False)
    return checks


def train(optimizer: Any, checks: UpdateChecks, steps: int, *, size: float = 1.0, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            for each in group["params"]:
                grad = torch.randn(each.shape, generator=generator) * size
                each.grad = (grad * 10 ** (step % 5 - 2)).to(each.dtype)
                if step % 7 == 3:
                    each.grad.zero_()
        optimizer.step()
        checks.settle()


OPTIONS: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True},
    {"foreach": False, "weight_decay": 0.3, "lr": 2e-2},
    {"fused": True, "maximize": True, "betas": (0.5, 0.9), "eps": 1e-3},
    {"foreach": True, "betas": (0.0, 0.999), "weight_decay": 0.0},
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("options", OPTIONS)
def test_clean_updates_raise_no_alarm(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any], seed: int
) -> None:
    torch.manual_seed(seed)
    for size in (1.0, 1e-8, 1e6):
        optimizer = kind(parameters(dtype), **{"lr": 1e-3, **options})
        checks = watched(optimizer)
        assert checks.refusal is None
        train(optimizer, checks, 40, size=size, seed=seed)
        assert checks._report.to_dict()["arithmetic"]["updates"] == 40 * 4


MODULE: Any = importlib.import_module("torch.optim.adam")
Tensors = list[torch.Tensor]


def sign(new: Tensors, old: Tensors, *_: Tensors) -> None:
    for each, before in zip(new, old, strict=True):
        each.copy_(2 * before - each)


def first_moment(_new: Tensors, _old: Tensors, first: Tensors, _second: Tensors) -> None:
    for each in first:
        each.neg_()


def second_moment(_new: Tensors, _old: Tensors, _first: Tensors, second: Tensors) -> None:
    for each in second:
        each.mul_(1.5)


def nothing(new: Tensors, old: Tensors, *_: Tensors) -> None:
    for each, before in zip(new, old, strict=True):
        each.copy_(before)


def too_far(new: Tensors, old: Tensors, *_: Tensors) -> None:
    for each, before in zip(new, old, strict=True):
        each.copy_(before + 3 * (each - before))


def not_a_number(new: Tensors, *_: Tensors) -> None:
    for each in new:
        each.fill_(float("nan"))


@pytest.mark.parametrize("fault", [sign, second_moment, first_moment, nothing, too_far, not_a_number])
@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("fused", [True, False])
def test_a_wrong_update_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], at: int, fused: bool
) -> None:
    """The fault is within torch's own step."""
    stock, calls = MODULE.adam, itertools.count()

    def wrong(new: Tensors, grads: Tensors, first: Tensors, second: Tensors, *rest: Any, **more: Any) -> None:
        old = [each.clone() for each in new]
        stock(new, grads, first, second, *rest, **more)
        if next(calls) == at:
            fault(new, old, first, second)

    monkeypatch.setattr(MODULE, "adam", wrong)
    torch.manual_seed(at)
    optimizer = torch.optim.AdamW(parameters(torch.float32), lr=1e-2, fused=fused)
    checks = watched(optimizer)
    with pytest.raises(CorruptionError, match=r"update of .* is wrong: .* instead of"):
        train(optimizer, checks, at + 1)
    assert checks._report.to_dict()["arithmetic"]["disagreements"] == 1


@pytest.mark.parametrize(
    ("made", "says"),
    [(lambda rows: torch.optim.SGD(rows, lr=0.1), "the optimizer is SGD"), (torch.optim.Adagrad, "Adagrad")],
)
def test_another_optimizer_is_named_as_unchecked(made: Callable[..., Any], says: str) -> None:
    checks = watched(made(parameters(torch.float32)))
    assert checks.refusal is not None and says in checks.refusal and checks.pending() == []
