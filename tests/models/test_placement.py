"""Coverage counts each byte once and calls nothing verified that the mover does not know or that differs from its file.

What an accelerator makes of a model that was handed over is seen on the simulated card, in
tests/e2e/test_handed_over.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.file_comparison import IN_PLACE, attest
from hf_rocm_tune.models.placement import Coverage, coverage, mark_loaded, place
from hf_rocm_tune.models.tensors import file_name, tensors_of
from hf_rocm_tune.transfer import FaultSpec, TransferSettings, digest

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


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


def test_a_tie_is_moved_once_and_stays_a_tie(mover: Any) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    place(model, mover)
    assert model[1].weight is model[0].weight
    assert len(mover.moved) == 1
    assert coverage(model, mover).device_bytes == 4 * 28


def test_a_tensor_that_was_replaced_later_is_named(linear: nn.Module, mover: Any) -> None:
    place(linear, mover)
    linear[0].weight.data = linear[0].weight.data.clone()
    (row,) = coverage(linear, mover).unverified
    assert row["tensor"] == "0.weight"
    assert "without passing the mover" in row["reason"]


def test_what_was_moved_without_verification_does_not_count(linear: nn.Module, make_mover: Any) -> None:
    mover = make_mover(settings=TransferSettings(verify="off"))
    place(linear, mover)
    found = coverage(linear, mover)
    assert found.verified_bytes == 0
    assert all("verify off" in row["reason"] for row in found.unverified)
    mark_loaded(nn.ModuleDict({"quantised": (whole := nn.Linear(2, 2))}), "quantised.weight", mover)
    cast = mover.move(torch.ones(3), name="w", dtype=torch.bfloat16)
    assert mover.provenance(whole.weight) == mover.provenance(cast) == "unverified"


def test_all_is_said_only_of_all() -> None:
    assert [Coverage(verified_bytes=n, device_bytes=10**9).share for n in (10**9, 10**9 - 1, 0)] == [
        "100 %", "99.99 %", "0 %",
    ]  # fmt: skip


def test_a_buffer_that_cannot_be_brought_over_is_named(linear: nn.Module, make_mover: Any) -> None:
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
def test_the_quantisation_state_is_part_of_the_model(model_of: Any, quantisation: Any, mover: Any, bits: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"), quantization_config=quantisation(bits))
    names = {name for name, _ in tensors_of(model)}
    weight = "model.layers.0.mlp.up_proj.weight"
    if bits == 4:
        state = ("absmax", "code", "offset", "state2.absmax", "state2.code")
        assert {f"{weight}.quant_state.{part}" for part in state} <= names
    else:
        assert any(name.startswith(f"{weight}.") and name.endswith("SCB") for name in names)
    assert len(coverage(model, mover).unverified) == len(names)


# ---- a model that was made elsewhere ------------------------------------------------------------------------------


def unexplained(model: Any, mover: Any) -> set[str]:
    """Names of what equals neither a file nor what its configuration gives."""
    found = coverage(model, mover)
    assert found.complete and sum(found.verified_by.values()) == found.device_bytes
    return {name for name, tensor in tensors_of(model) if mover.reason(tensor) == IN_PLACE}


def none_attested(model: Any, mover: Any) -> bool:
    """Whether no weight was found equal; tables that the configuration gives may be."""
    attest(model, mover)
    return {name for name, _ in model.named_parameters()} <= unexplained(model, mover) | {"lm_head.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ["llama3", "qwen3", "gpt2"])
def test_weights_equal_to_their_files_are_attested(model_of: Any, mover: Any, arch: str, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of(arch, shards=2), dtype=dtype)
    attest(model, mover)
    assert unexplained(model, mover) == set()
    assert mover.moved == []


def test_a_rotary_table_that_was_changed_since_is_not_attested(model_of: Any, mover: Any, flip: Any) -> None:
    """No file holds it: it is compared with what the configuration gives."""
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    flip(model.model.rotary_emb.inv_freq)
    attest(model, mover)
    assert unexplained(model, mover) == {"model.rotary_emb.inv_freq"}


def test_a_weight_that_was_changed_since_is_not_attested(model_of: Any, mover: Any, flip: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()  # stock loading gives a view of the mapped file
    flip(weight)
    attest(model, mover)
    assert unexplained(model, mover) == {"model.layers.1.mlp.up_proj.weight"}


def test_a_model_with_an_adapter_is_attested_below_it(model_of: Any, mover: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    below = {file_name(name) for name, _ in tensors_of(base)}
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    attest(model, mover)
    assert (left := unexplained(model, mover)) and not below & {file_name(name) for name in left}


def test_tensors_without_files_are_digested_where_they_lie(model_of: Any, mover: Any) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_of("llama3")))
    model.config._name_or_path = ""
    assert none_attested(model, mover)
    assert all(mover.digest_of(tensor) == digest(tensor) for _, tensor in tensors_of(model))
    assert mover.moved == []


def test_damaged_files_are_a_reason_not_an_error(model_of: Any, mover: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_of("llama3"), tmp_path / "copy"))
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-5])
    assert none_attested(model, mover)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_and_fused_weights_are_not_attested(model_of: Any, mover: Any, quantisation: Any, bits: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"), quantization_config=quantisation(bits))
    attest(model, mover)
    left = unexplained(model, mover)
    packed = [name for name, tensor in tensors_of(model) if tensor.dtype in (torch.uint8, torch.int8)]
    assert packed and set(packed) <= left
    assert "model.norm.weight" not in left
