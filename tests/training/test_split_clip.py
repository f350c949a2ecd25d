"""Clipping over cards gives torch's own norm and gradients, bit for bit, and brings nothing over unverified."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.split import Split
from hf_rocm_tune.models.split_mover import SplitMover
from hf_rocm_tune.training.ranks import clip_over_cards
from hf_rocm_tune.transfer import FaultSpec

CPU = torch.device("cpu")


def mover(faults: str = "") -> SplitMover:
    return SplitMover(Split.of("layers", (2, 1, 3)), [CPU] * 3, faults=FaultSpec.parse(faults) if faults else None)


def parameters(dtype: torch.dtype, scale: float = 1.0) -> list[nn.Parameter]:
    torch.manual_seed(3)
    made = [nn.Parameter(torch.randn(size, 33).to(dtype)) for size in (5, 16, 1, 64, 7, 9)]
    for each in made:
        each.grad = (scale * torch.randn_like(each)).contiguous()
    made.insert(3, nn.Parameter(torch.randn(4).to(dtype)))  # has no gradient
    return made


def owners(made: list[nn.Parameter]) -> dict[int, int]:
    return {id(each): number % 3 for number, each in enumerate(made)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
def test_bit_for_bit_torchs_own(dtype: torch.dtype, max_norm: float) -> None:
    made = parameters(dtype)
    expected = copy.deepcopy(made)
    for theirs, ours in zip(expected, made, strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    norm = nn.utils.clip_grad_norm_(expected, max_norm)
    with mover() as cards:
        found = clip_over_cards(cards, owners(made), iter(made), max_norm)
        counted = cards.report.to_dict()["activations"]
    assert torch.equal(found, norm) and found.shape == norm.shape
    for theirs, ours in zip(expected, made, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or (theirs.grad is not None and torch.equal(ours.grad, theirs.grad))
    assert counted["tensors"] == 6 and counted["verified_bytes"] == counted["bytes"] > 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    made = parameters(torch.float32)
    assert made[-1].grad is not None
    made[-1].grad[0, 0] = value
    with mover() as cards:
        assert not math.isfinite(clip_over_cards(cards, owners(made), made, 1.0).item())


def test_without_any_gradient_it_is_zero() -> None:
    with mover() as cards:
        assert clip_over_cards(cards, {}, [nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


@pytest.mark.parametrize("leg", ["gradient_norms.from1", "gradient_norm.to2"])
def test_a_norm_that_arrives_wrong_is_found(leg: str) -> None:
    made = parameters(torch.float32)
    with mover(f"kind=zero,tensor={leg},count=1") as cards:
        found = clip_over_cards(cards, owners(made), made, 1.0)
        counted = cards.report.to_dict()["activations"]
    assert counted["mismatches"] == counted["recovered"] == 1
    assert torch.equal(
        found, nn.utils.get_total_norm([each.grad for each in parameters(torch.float32) if each.grad is not None])
    )
    with mover(f"kind=zero,tensor={leg},persist=1") as cards, pytest.raises(CorruptionError):
        clip_over_cards(cards, owners(made), made, 1.0)
