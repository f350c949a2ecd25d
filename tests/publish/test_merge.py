"""A merged model says what base plus adapter say by stock PEFT, loads with plain transformers, and is sealed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.publish.merge import merge, merged_readme
from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.publish.merge_cases import (
    EXPERTS,
    Case,
    build_base,
    config_of,
    load_base,
    logits,
    lora,
    merged,
    randomise,
    reference,
    stored_names,
    write_adapter,
)

EXACT = 1e-5  # float32 on both sides, computed in another order
LINEAR = ["k_proj", "v_proj", "down_proj"]
HEAD = {"lm_head.weight"}

SAME_FORM = {
    "DoRA": lora("llama3", use_dora=True),
    "lora_bias": lora("gpt2", target_modules=["c_attn", "c_fc"], lora_bias=True, fan_in_fan_out=True),
    "trained biases": lora("gpt2", target_modules=["c_attn"], bias="all", fan_in_fan_out=True),
    "fused projections, three files": lora("phi3", target_modules=["qkv_proj", "gate_up_proj"], shards=3),
    "whole modules": lora("llama3", modules_to_save=["lm_head", "embed_tokens"]),
    "trained tokens": lora("llama3", trainable_token_indices=[5, 17]),
    "tied embeddings kept tied": lora("qwen3", target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    "beside experts": lora("qwen3_moe", target_modules=["q_proj"]),
    "experts": lora("qwen3_moe", target_modules=["q_proj"], target_parameters=EXPERTS),
    "whole experts": lora("qwen3_moe", target_modules=["q_proj"], modules_to_save=["experts"]),
    "IA3": Case(
        arch="llama3",
        make=lambda: IA3Config(task_type="CAUSAL_LM", target_modules=LINEAR, feedforward_modules=["down_proj"]),
    ),
}
ALL_LINEAR = {f"all-linear {arch}": lora(arch, target_modules="all-linear") for arch in tiny.ARCHITECTURES}
UNTIED = {
    "input embedding": lora("qwen3", target_modules=["embed_tokens", "q_proj"]),
    "head": lora("qwen3", target_modules=["lm_head", "q_proj"]),
    "both, apart": lora("qwen3", target_modules=["lm_head", "embed_tokens"]),
    "both whole, apart": lora("qwen3", modules_to_save=["embed_tokens", "lm_head"]),
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge")


def furthest(base: Path, adapter: Path, out: Path) -> tuple[float, float]:
    """Largest difference of logits from base plus adapter, and by how much the adapter moved the base."""
    alone, wanted = reference(base, adapter)
    return float((logits(load_base(out)) - wanted).abs().max()), float((wanted - alone).abs().max())


@pytest.mark.parametrize("name", [*SAME_FORM, *(pytest.param(name, marks=pytest.mark.long) for name in ALL_LINEAR)])
def test_merged_logits_are_those_of_base_plus_adapter(name: str, scratch: Path) -> None:
    base, adapter, out, _ = merged({**SAME_FORM, **ALL_LINEAR}[name], scratch, name)
    difference, moved = furthest(base, adapter, out)
    assert difference < EXACT < 0.02 < moved
    assert stored_names(out) == stored_names(base)  # whatever reads the base reads it
    assert config_of(out)["tie_word_embeddings"] == config_of(base)["tie_word_embeddings"]
    text = "".join(file.read_text() for file in out.iterdir() if file.suffix in (".json", ".md", ".jinja"))
    assert str(scratch) not in text, "a local path is in the result"


@pytest.mark.parametrize("name", UNTIED)
def test_a_tie_that_the_adapter_breaks_is_undone(name: str, scratch: Path) -> None:
    base, adapter, out, lines = merged(UNTIED[name], scratch, f"untied {name}")
    difference, moved = furthest(base, adapter, out)
    assert difference < EXACT < 0.02 < moved
    assert stored_names(out) - stored_names(base) == HEAD
    assert config_of(out)["tie_word_embeddings"] is False
    assert any("lm_head.weight is no longer tied" in line for line in lines)


def test_the_base_keeps_its_dtype_and_is_right_to_its_precision(scratch: Path) -> None:
    case = lora("llama3", base_dtype=torch.bfloat16, shards=2)
    base, adapter, out, _ = merged(case, scratch, "bfloat16")
    difference, moved = furthest(base, adapter, out)
    assert difference < 8 * torch.finfo(torch.bfloat16).eps < 0.5 < moved
    assert {value.dtype for file in out.glob("*.safetensors") for value in load_file(file).values()} == {torch.bfloat16}


def test_another_dtype_is_rounded_once_from_float32(scratch: Path) -> None:
    case = lora("qwen3_moe", target_modules=["q_proj"])
    _, _, exact, _ = merged(case, scratch, "exact")
    _, _, out, _ = merged(case, scratch, "rounded", dtype="bfloat16")
    assert config_of(out)["dtype"] == "bfloat16"
    wanted, found = load_base(exact).state_dict(), load_base(out, torch.bfloat16).state_dict()
    assert all(torch.equal(wanted[name].to(torch.bfloat16), found[name]) for name in wanted)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_shards_are_as_large_as_asked_and_load(scratch: Path) -> None:
    base, adapter, out, _ = merged(lora("llama3"), scratch, "shards", max_shard_size=150_000)
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 3
    largest = max(tensor.nbytes for tensor in load_base(base).state_dict().values())
    assert all(file.stat().st_size < max(150_000, largest) + 5000 for file in files)
    assert furthest(base, adapter, out)[0] < EXACT


def test_the_directory_is_complete_and_sealed(scratch: Path) -> None:
    base = build_base(lora("llama3"), scratch)
    adapter = write_adapter(lora("llama3"), base, scratch / "adapters" / "sealed")
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = "adapter's own {{ messages[0]['content'] }}"
    tokenizer.save_pretrained(adapter)
    manifest.write(adapter, run_id="run-7", step=12, status="final")
    out = scratch / "merged" / "sealed"
    merge(str(adapter), out, base_name=str(base), say=lambda _: None)
    sealed = manifest.inspect(out)
    assert sealed.problems == []
    assert sealed.manifest is not None
    assert (sealed.manifest.run_id, sealed.manifest.step, sealed.manifest.status) == ("run-7", 12, "final")
    assert {name.split(":")[1] for name in sealed.manifest.tensors} == stored_names(out)
    assert sealed.manifest.extra["merged"]["adapter_sha256"] is not None
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "adapter's own x"
    assert (out / "generation_config.json").is_file()


def test_the_card_is_valid_on_the_hub() -> None:
    from huggingface_hub import ModelCard

    data = ModelCard(merged_readme("Qwen/Qwen3-0.6B", "LoRA, r=16")).data
    assert (data.base_model, data.library_name) == ("Qwen/Qwen3-0.6B", "transformers")


@pytest.mark.parametrize(("tied", "brought"), [(False, ["embed_tokens", "lm_head"]), (True, None)])
def test_a_vocabulary_that_training_resized_is_merged(tied: bool, brought: list[str] | None, scratch: Path) -> None:
    """As TRL does it for a chat template that brings tokens of its own."""
    base = tiny.build("qwen3" if tied else "llama3", scratch / "models")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_base(base)
        model.resize_token_embeddings(515, mean_resizing=False)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=brought)
        adapted = get_peft_model(model, config)
        randomise(adapted)
        adapter = scratch / "adapters" / f"resized {tied} {brought}"
        adapted.save_pretrained(adapter)
        wanted = logits(adapted.eval())
    out = scratch / "merged" / f"resized {tied} {brought}"
    merge(str(adapter), out, base_name=str(base), say=lambda _: None)
    found = load_base(out)
    assert float((logits(found) - wanted).abs().max()) < EXACT
    assert found.config.vocab_size == 515
    assert found.config.tie_word_embeddings == (tied and brought is None)


# ---- names and shapes that differ from the stored ones ------------------------------------------------------


_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_O_PROJ = {"target_modules": ["o_proj"]}
_EXPERTS = {"intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
_TEXT = {**_COMMON, "head_dim": 32, "intermediate_size": 128, "sliding_window": 64}
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _gemma3() -> Any:
    tokens = {"boi_token_index": 500, "eoi_token_index": 501, "image_token_index": 502}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=_TEXT, vision_config=_SIGHT, mm_tokens_per_image=4, **tokens)
    )


STORED_OTHERWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "renamed and stacked": (lambda: MixtralForCausalLM(MixtralConfig(**_COMMON, **_EXPERTS)), _O_PROJ),
    "a language model within another": (_gemma3, {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}),
    "its tied embedding": (_gemma3, {"target_modules": ["embed_tokens", "q_proj"]}),
}


@pytest.mark.parametrize("name", STORED_OTHERWISE)
def test_what_is_stored_under_other_names_is_merged(name: str, tmp_path: Path) -> None:
    build, targets = STORED_OTHERWISE[name]
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = logits(model)
        adapted = get_peft_model(
            type(model).from_pretrained(tmp_path / "base"),
            LoraConfig(task_type="CAUSAL_LM", r=4, **targets),
            autocast_adapter_dtype=False,
        )
        randomise(adapted)
        adapted.save_pretrained(tmp_path / "adapter")
        wanted = logits(adapted.eval())
    merge(str(tmp_path / "adapter"), tmp_path / "out", base_name=str(tmp_path / "base"), say=lambda _: None)
    found = type(model).from_pretrained(tmp_path / "out").eval()
    assert float((logits(found) - wanted).abs().max()) < 1e-5 < 0.02 < float((wanted - alone).abs().max())
    more = {"lm_head.weight"} if "tied" in name else set()
    assert stored_names(tmp_path / "out") - stored_names(tmp_path / "base") == more
    if more:
        config = config_of(tmp_path / "out")
        assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


# ---- tensors of the base that its loaded model has no place for ----------------------------------------------


@pytest.mark.parametrize("shard", ["5GB", 150_000])
def test_tensors_that_transformers_does_not_load_are_in_the_merged_files(shard: int | str, tmp_path: Path) -> None:
    """In bytes and dtype as in the base; the model itself is the one that is merged without them."""
    base = build_base(lora("qwen3"), tmp_path)
    embeddings = load_file(base / "model.safetensors")
    unknown = {
        "mtp.layers.0.proj.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "drafter.norm.weight": torch.full((5,), 0.25, dtype=torch.float16),
        "drafter.codes": torch.arange(7, dtype=torch.uint8),
        "drafter.lm_head.weight": torch.ones(2, 3),
    }
    tied = {"lm_head.weight": embeddings["model.embed_tokens.weight"].clone()}  # loaded, and tied: not a leftover
    save_file({**embeddings, **unknown, **tied}, base / "model.safetensors", metadata={"format": "pt"})
    save_file({"weight": torch.ones(1)}, base / "consolidated.safetensors")
    adapter = write_adapter(lora("qwen3"), base, tmp_path / "adapter")
    lines: list[str] = []
    merge(str(adapter), tmp_path / "out", base_name=str(base), max_shard_size=shard, say=lines.append)

    stored = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert stored_names(tmp_path / "out") == stored.keys() == embeddings.keys() | unknown.keys()
    for name, tensor in unknown.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    assert {*index["weight_map"].values()} == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert manifest.inspect(tmp_path / "out").problems == []
    assert furthest(base, adapter, tmp_path / "out")[0] < EXACT
    told = next(line for line in lines if "copied as they are" in line)
    assert "4 tensors" in told and "drafter.codes" in told
    assert any("consolidated.safetensors" in line for line in lines)


def test_a_copied_tensor_that_is_read_back_wrong_ends_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_rocm_tune.publish import leftovers

    def harmed(tensors: dict[str, Any], file: Path, **more: Any) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, **more)

    monkeypatch.setattr(leftovers, "save_file", harmed)
    base = build_base(lora("llama3"), tmp_path)
    content = load_file(base / "model.safetensors")
    save_file({**content, "mtp.fc.weight": torch.ones(4)}, base / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(lora("llama3"), base, tmp_path / "adapter")
    with pytest.raises(CorruptionError, match=r"mtp\.fc\.weight"):
        merge(str(adapter), tmp_path / "out", base_name=str(base), say=lambda _: None)
    assert not (tmp_path / "out").exists()
