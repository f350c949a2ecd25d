"""4-bit models keep training after an evaluation; a buffer that its own module writes stays verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FalconMambaConfig,
    Lfm2Config,
    Lfm2VlConfig,
    LongcatFlashConfig,
    MambaConfig,
    Siglip2VisionConfig,
    Trainer,
    TrainingArguments,
)

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.errors import MemoryFaultError, UsageError
from hf_rocm_tune.models.quantised import cast_targets, keep_trainable_on_cpu, require_bitsandbytes

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TOKENS = torch.arange(64).reshape(2, 32) + 7


@pytest.fixture
def make_model(model_of: Any, quantisation: Any) -> Callable[[], Any]:
    """A 4-bit model with an adapter that is not zero."""

    def make() -> Any:
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(
            model_of("llama3"), dtype=torch.bfloat16, quantization_config=quantisation(4)
        )
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(base, config)

    return make


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of the adapter for fixed tokens."""
    model.train()
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False)


def test_gradients_after_an_evaluation_equal_those_before_bit_for_bit(make_model: Any) -> None:
    model = make_model()
    keep_trainable_on_cpu(model)
    before = gradients(model)
    evaluate(model)
    after = gradients(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes repacks 4-bit weights only on a CPU with AVX512-BF16")
def test_without_the_switch_an_evaluation_changes_them(make_model: Any) -> None:
    """What the switch is for; once upstream has mended it, this fails and the switch can go."""
    model = make_model()
    before = gradients(model)
    evaluate(model)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        after = gradients(model)
    assert before.keys() != after.keys() or any(not torch.equal(before[name], after[name]) for name in before)


def test_layers_to_whose_dtype_pixels_are_cast_are_named() -> None:
    """LFM2-VL's patch embedding: in 4 bits its dtype would be that of bytes."""
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 64, "num_key_value_heads": 4, "layer_types": ["full_attention"]}
    config = Lfm2VlConfig(
        vision_config=Siglip2VisionConfig(**tower, patch_size=16, num_patches=16), text_config=Lfm2Config(**text)
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert cast_targets(model) == ["model.vision_tower.embeddings.patch_embedding"]


def test_layers_whose_weight_is_cast_are_named() -> None:
    """LongCat's router multiplies by its classifier's weight in float32: bytes of 4 bits are no weight."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 64, "num_attention_heads": 2}
    more = {"num_layers": 1, "n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LongcatFlashConfig(**sizes, **more))
    assert cast_targets(model) == ["model.layers.0.mlp.router.classifier"]


def test_what_stands_behind_a_decorator_is_read_too() -> None:
    """DeepSeek-like indexers compute without gradients."""

    class Indexer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)

        @torch.no_grad()
        def forward(self, hidden: Tensor) -> Tensor:
            scores: Tensor = self.proj(hidden.to(self.proj.weight.dtype))
            return scores

    assert cast_targets(Indexer()) == ["proj"]


def test_layers_whose_weight_is_multiplied_with_are_named_unless_the_class_asks_first() -> None:
    """Mamba's; Falcon's calls the layer instead where it is quantised."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MambaConfig(**sizes))
        asking = AutoModelForCausalLM.from_config(FalconMambaConfig(**sizes))
    assert "backbone.layers.0.mixer.dt_proj" in cast_targets(model)
    assert not any("dt_proj" in name for name in cast_targets(asking))


def test_layers_whose_weight_is_clamped_are_named() -> None:
    """Gemma 3n's, outside of forward."""
    from transformers import Gemma3nTextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    more = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "laurel_rank": 8}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma3nTextConfig(**sizes, **more, activation_sparsity_pattern=[0.0]))
    names = {name.rpartition(".")[2] for name in cast_targets(model)}
    assert {"prediction_coefs", "correction_coefs"} <= names


def test_bitsandbytes_without_a_library_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    require_bitsandbytes(torch.device("cpu"), "--load_in_4bit")
    from bitsandbytes import cextension

    broken = cextension.ErrorHandlerMockBNBNativeLibrary("no library for this device")
    monkeypatch.setattr(cextension, "lib", broken)
    with pytest.raises(UsageError, match=r"--optim adamw_8bit: bitsandbytes has no native library for cpu"):
        require_bitsandbytes(torch.device("cpu"), "--optim adamw_8bit")


# ---- buffers that a module writes ---------------------------------------------------------------------------------


class VerifiedPlain(VerifiedTransferMixin, Trainer):
    """In front of the plain trainer."""


class Counting(nn.Module):
    """Batch normalisation, and a buffer that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.head(self.norm(x * self.scale)).squeeze(-1)
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}


@pytest.fixture
def make(tmp_path: Any) -> Callable[[], Any]:
    """A trainer that saves after steps 2 and 4."""

    def build() -> Any:
        torch.manual_seed(1)
        rows = [{"x": torch.randn(4).tolist(), "labels": float(n)} for n in range(16)]
        options = {"save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True}
        args = TrainingArguments(output_dir=str(tmp_path), report_to="none", disable_tqdm=True, **options)
        return VerifiedPlain(Counting(), args, train_dataset=Dataset.from_list(rows), sentinel_every=1)

    return build


def test_running_statistics_are_saved_and_resumed_and_other_buffers_are_watched(make: Any, tmp_path: Any) -> None:
    trainer = make()
    trainer.train()
    assert trainer.model.norm.num_batches_tracked.item() == 4 and trainer.weight_coverage().complete
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(resumed.model.norm.running_mean, trainer.model.norm.running_mean)
    trainer.model.scale[0] += 1
    with pytest.raises(MemoryFaultError, match="scale"):
        trainer._save_checkpoint(trainer.model, trial=None)
