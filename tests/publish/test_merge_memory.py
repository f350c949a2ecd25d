"""What a merge holds in memory is bounded by the base's largest file, whatever the base's size. Counted, not timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hf_rocm_tune.publish import merge_layers, merge_names, merge_writer
from hf_rocm_tune.publish.merge import merge
from hf_rocm_tune.publish.merge_settings import MergeSettings
from tests.publish.counted_memory import CountedMemory
from tests.publish.merge_cases import EXPERTS, Case, lora, write_adapter

# Head and embedding are 2 MiB each of about 12; the experts of a layer are 2.25 MiB.
_COMMON = {"vocab_size": 8192, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
BASES = {
    "dense": LlamaConfig(**_COMMON, intermediate_size=1024, num_hidden_layers=8),
    "experts": Qwen3MoeConfig(
        **_COMMON,
        intermediate_size=128,
        num_hidden_layers=3,
        num_experts=24,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    ),
}
CASES: dict[str, tuple[str, Case]] = {
    "linear layers": ("dense", lora("", target_modules="all-linear")),
    "DoRA": ("dense", lora("", target_modules="all-linear", use_dora=True)),
    "embedding and head": ("dense", lora("", target_modules=["embed_tokens", "lm_head"])),
    "embedding, DoRA": ("dense", lora("", target_modules=["embed_tokens"], use_dora=True)),
    "whole modules": ("dense", lora("", target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "experts": ("experts", lora("", target_modules=["q_proj"], target_parameters=EXPERTS)),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in BASES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name], max_shard_size=3_000_000)
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_below_the_largest_file(
    name: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In proportion to these small files; the real ones stand beside files of gigabytes.
    monkeypatch.setattr(merge_layers, "SLAB_ELEMENTS", 16 << 10)
    monkeypatch.setattr(merge_names, "PART_BYTES", 128 << 10)
    monkeypatch.setattr(merge_writer, "_PIECE_BYTES", 64 << 10)
    kind, case = CASES[name]
    base = bases[kind]
    adapter = write_adapter(case, base, tmp_path / "adapter")
    files = [file.stat().st_size for file in base.glob("*.safetensors")]
    assert len(files) >= 4
    with CountedMemory() as counted:
        merge(MergeSettings(adapter=str(adapter), base=str(base), out=tmp_path / "out"), lambda _: None)
    assert 0 < counted.peak < max(files)
    assert counted.now == 0  # nothing is kept


def test_the_count_sees_a_model_that_is_loaded_whole(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could pass because nothing is counted."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a count sees its own thread only; a merge has but one
    with CountedMemory() as counted:
        model = AutoModelForCausalLM.from_pretrained(bases["dense"], dtype=torch.float32)
    assert counted.peak > 1.9 * sum(file.stat().st_size for file in bases["dense"].glob("*.safetensors"))
    del model
