"""Coverage counts each byte once and calls nothing verified that the mover does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.placement import coverage, mark_loaded, place, tensors_of
from hf_rocm_tune.transfer import FaultSpec, TransferSettings, digest


def test_parameters_keep_their_identity_and_everything_gets_a_provenance(linear: nn.Module, mover: Any) -> None:
    parameters = list(linear.parameters())
    before = {name: digest(tensor) for name, tensor in tensors_of(linear)}
    assert not coverage(linear, mover).complete
    place(linear, mover)
    assert all(now is then for now, then in zip(linear.parameters(), parameters, strict=True))
    assert {name: digest(tensor) for name, tensor in tensors_of(linear)} == before
    found = coverage(linear, mover)
    assert found.complete
    assert found.verified_bytes == found.device_bytes == 4 * (64 + 8 + 32 + 4 + 12)
    stages = {name: stage for stage, name in mover.moved}
    assert stages == {
        "0.weight": "weights",
        "0.bias": "weights",
        "1.weight": "adapter",
        "1.bias": "adapter",
        "table": "weights",
    }


def test_placing_twice_moves_nothing_twice(linear: nn.Module, mover: Any) -> None:
    place(linear, mover)
    moved = len(mover.moved)
    place(linear, mover)
    assert len(mover.moved) == moved


def test_a_tie_is_moved_once_and_stays_a_tie(mover: Any) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    place(model, mover)
    assert model[1].weight is model[0].weight
    assert len(mover.moved) == 1
    assert coverage(model, mover).device_bytes == 4 * 28


def test_an_optimizer_made_before_still_steps_the_model(linear: nn.Module, mover: Any) -> None:
    optimizer = torch.optim.SGD([p for p in linear.parameters() if p.requires_grad], lr=0.1)
    place(linear, mover)
    before = linear[1].weight.clone()
    linear(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(linear[1].weight, before)
    assert coverage(linear, mover).complete  # a step in place does not change where it came from


def test_a_tensor_that_was_replaced_later_is_named(linear: nn.Module, mover: Any) -> None:
    place(linear, mover)
    linear[0].weight.data = linear[0].weight.data.clone()
    (row,) = coverage(linear, mover).unverified
    assert row["tensor"] == "0.weight"
    assert "another way" in row["reason"]


def test_what_was_moved_without_verification_does_not_count(linear: nn.Module, make_mover: Callable[..., Any]) -> None:
    mover = make_mover(settings=TransferSettings(verify="off"))
    place(linear, mover)
    found = coverage(linear, mover)
    assert found.verified_bytes == 0
    assert all("verify off" in row["reason"] for row in found.unverified)


def test_a_buffer_that_cannot_be_brought_over_is_named(linear: nn.Module, make_mover: Callable[..., Any]) -> None:
    mover = make_mover(faults=FaultSpec(kind="flip", tensor="table", persist=True))
    with pytest.raises(CorruptionError, match="'table'"):
        place(linear, mover)


def test_only_what_the_checkpoint_filled_is_marked(linear: nn.Module, mover: Any) -> None:
    mark_loaded(linear, "0.weight", mover)
    mark_loaded(linear, "table", mover)
    assert [name for name, tensor in tensors_of(linear) if mover.was_verified(tensor)] == ["0.weight", "table"]
    mover.mark_unverified(linear[0].bias, "known to be bad")
    mark_loaded(linear, "0.bias", mover)
    assert not mover.was_verified(linear[0].bias), "a verdict must not be overwritten"


@pytest.mark.parametrize("bits", [4, 8])
def test_the_quantisation_state_is_part_of_the_model(
    model_of: Callable[..., Path], quantisation: Callable[[int], BitsAndBytesConfig], mover: Any, bits: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"), quantization_config=quantisation(bits))
    names = {name for name, _ in tensors_of(model)}
    weight = "model.layers.0.mlp.up_proj.weight"
    if bits == 4:
        state = ("absmax", "code", "offset", "state2.absmax", "state2.code")
        assert {f"{weight}.quant_state.{part}" for part in state} <= names
    else:
        assert any(name.startswith(f"{weight}.") and name.endswith("SCB") for name in names)
    assert len(coverage(model, mover).unverified) == len(names)
