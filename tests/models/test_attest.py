"""What a model made elsewhere has on the device is compared with its files; on a CPU the rest is digested in place.

What an accelerator makes of the rest is seen on the simulated card, in tests/training/test_handed_over.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from hf_rocm_tune.models.attest import IN_PLACE, attest
from hf_rocm_tune.models.placement import coverage, place, tensors_of
from hf_rocm_tune.transfer import digest

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


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
def test_weights_equal_to_their_files_are_attested(
    model_of: Callable[..., Path], mover: Any, arch: str, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of(arch, shards=2), dtype=dtype)
    equal, looked_at = attest(model, mover)
    assert equal == looked_at == len(list(tensors_of(model)))
    assert unexplained(model, mover) == set()
    assert mover.moved == []


def test_a_weight_that_was_changed_since_is_not_attested(
    model_of: Callable[..., Path], mover: Any, flip: Callable[[Tensor], None]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()  # stock loading gives a view of the mapped file
    flip(weight)
    attest(model, mover)
    assert unexplained(model, mover) == {"model.layers.1.mlp.up_proj.weight"}


def test_a_rotary_table_that_was_changed_since_is_not_attested(
    model_of: Callable[..., Path], mover: Any, flip: Callable[[Tensor], None]
) -> None:
    """No file holds it: it is compared with what the configuration gives."""
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    flip(model.model.rotary_emb.inv_freq)
    attest(model, mover)
    assert unexplained(model, mover) == {"model.rotary_emb.inv_freq"}


def test_a_model_with_an_adapter_is_attested_below_it(model_of: Callable[..., Path], mover: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    known = len(list(tensors_of(base)))
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert attest(model, mover)[0] == known
    assert unexplained(model, mover)
    assert all("lora_" in name for name in unexplained(model, mover))


def test_tensors_without_files_are_digested_where_they_lie(model_of: Callable[..., Path], mover: Any) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_of("llama3")))
    model.config._name_or_path = ""
    assert none_attested(model, mover)
    assert all(mover.digest_of(tensor) == digest(tensor) for _, tensor in tensors_of(model))
    assert mover.moved == []


def test_a_name_that_nobody_has_is_a_reason_not_an_error(model_of: Callable[..., Path], mover: Any) -> None:
    for name in ("nobody/nothing", "a/b/c/d", "/no/such/directory", "..", "x" * 300):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_of("llama3")))
        model.config._name_or_path = name
        assert none_attested(model, mover)


def test_damaged_files_are_a_reason_not_an_error(model_of: Callable[..., Path], mover: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_of("llama3"), tmp_path / "copy"))
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-5])
    assert none_attested(model, mover)


def test_a_file_that_our_check_passes_and_safetensors_refuses_is_a_reason(
    model_of: Callable[..., Path], mover: Any, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model_of("llama3"), tmp_path / "copy"))
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    header = b'{"a":{"dtype":"nonsense","shape":[1],"data_offsets":[0,4]}}'
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    assert none_attested(model, mover)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_and_fused_weights_are_not_attested(
    model_of: Callable[..., Path], mover: Any, quantisation: Callable[[int], BitsAndBytesConfig], bits: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"), quantization_config=quantisation(bits))
    attest(model, mover)
    left = unexplained(model, mover)
    packed = [name for name, tensor in tensors_of(model) if tensor.dtype in (torch.uint8, torch.int8)]
    assert packed and set(packed) <= left
    assert "model.norm.weight" not in left


def test_fused_experts_are_not_attested(model_of: Callable[..., Path], mover: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("qwen3_moe"))
    attest(model, mover)
    assert any("experts" in name for name in unexplained(model, mover))


def test_what_the_mover_knows_is_left_alone(model_of: Callable[..., Path], mover: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    place(model, mover)
    assert attest(model, mover) == (0, 0)
    assert mover.provenance(model.lm_head.weight) == "transferred"
