"""LoRA and QLoRA on every architecture, through the command line: what was trained is what was saved."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.e2e.command import CommandServer
from tests.e2e.conftest import ADAPTER, assert_covered, done, flags, losses_of, report_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import small_versions

Trained = Callable[[str, str], Path]

METHODS = ("lora", "qlora")
CELLS = [(arch, method) for arch in tiny.ARCHITECTURES for method in METHODS]
SAMPLE = {
    ("llama3", "lora"),
    ("gemma3", "qlora"),
    ("gpt2", "lora"),
    ("gpt2", "qlora"),
    ("qwen3_moe", "qlora"),
    ("gpt_oss", "lora"),
}
"""Tied and untied, Linear and Conv1D, both kinds of experts."""
OTHERWISE = {("qwen3_moe", "qlora"), ("gpt_oss", "qlora")}
"""Experts are in 4 bit here, which plain transformers leaves as they are: other logits."""


@pytest.fixture(scope="module")
def trained(server: CommandServer, model_of: Callable[[str], Path], messages: Path, scratch: Path) -> Trained:
    """Trains an architecture with a method, when it is first asked for; the output directory."""

    def train(arch: str, method: str) -> Path:
        output = scratch / "architectures" / f"{arch}-{method}"
        if not output.exists():
            settings = {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 48, "learning_rate": 0.01}
            settings |= {"lora_dropout": 0.0, "save_strategy": "no", "disable_tqdm": True}
            files = {"model_name_or_path": model_of(arch), "dataset_name": messages, "output_dir": output}
            more = ["--load_in_4bit"] if method == "qlora" else []
            done(server.run(*flags(**files, **settings), *more, env={"DUMP_LOGITS": f"{output}.logits"}))
        return output

    return train


@pytest.mark.parametrize(
    "cells", [pytest.param(sorted(SAMPLE), id="sample"), pytest.param(CELLS, id="all", marks=pytest.mark.long)]
)
def test_plain_peft_gives_the_same_logits_bit_for_bit(
    cells: list[tuple[str, str]], trained: Trained, model_of: Callable[[str], Path]
) -> None:
    cells = [cell for cell in cells if cell not in OTHERWISE]
    jobs = [
        {
            "base": str(model_of(arch)),
            "adapter": str(trained(arch, method)),
            "logits": f"{trained(arch, method)}.logits",
            "four_bit": method == "qlora",
        }
        for arch, method in cells
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.plain_peft"],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    answers = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    for cell, answer in zip(cells, answers, strict=True):
        assert answer["our_modules"] == []
        assert answer["equal"], (cell, answer["difference"])


@pytest.mark.parametrize(
    ("arch", "method"), [pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.long) for cell in CELLS]
)
def test_every_byte_on_the_device_was_verified(
    trained: Trained, model_of: Callable[[str], Path], arch: str, method: str
) -> None:
    report = report_of(trained(arch, method))
    assert_covered(report)
    if method != "qlora":  # on a CPU a tensor that is quantised passes nothing: its file is read a second time
        in_file = sum(path.stat().st_size for path in model_of(arch).glob("*.safetensors"))
        assert report["weights"]["bytes"] > 0.95 * in_file
    assert report["batches"]["tensors"] > 0
    assert report["batches"]["mismatches"] == report["weights"]["mismatches"] == 0


def test_adapters_that_start_elsewhere_than_trls_are_told(
    server: CommandServer, base_flags: list[str], scratch: Path, tmp_path: Path
) -> None:
    """Loading Qwen3.5 draws random numbers; of the other architectures, which are as TRL's, nothing is said."""
    for arch, told in (("qwen3_5", True), ("llama3", False)):
        model = tiny.build(arch, scratch / "models")
        settings = flags(model_name_or_path=model, max_steps=1, output_dir=tmp_path / arch)
        said = done(server.run(*base_flags, *settings)).stdout
        assert ("the adapter starts from other values than TRL's" in said) is told, said


def test_what_stands_before_the_output_head_is_in_the_loss(server: CommandServer, tmp_path: Path) -> None:
    """ModernBERT's decoder has a layer and a norm there, which TRL's fused loss leaves out; dpo refuses it."""
    tokenizer = tiny.build_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ModernBertDecoderConfig(vocab_size=512, **size, **ids, cls_token_id=1, sep_token_id=3)
    torch.manual_seed(0)
    model = transformers.ModernBertDecoderForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.dense.weight.mul_(30)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "Two and two is four."}) + "\n")
    settings = flags(model_name_or_path=tmp_path / "model", dataset_name=tmp_path / "rows.jsonl", max_steps=1)
    settings += flags(per_device_train_batch_size=1, save_steps=1, dtype="float32", bf16=False, logging_steps=1)
    done(server.run(*settings, *flags(output_dir=tmp_path / "out", lora_dropout=0.0)))
    row = torch.tensor([[*tokenizer("Two and two is four.")["input_ids"], tokenizer.eos_token_id]])
    assert losses_of(tmp_path / "out") == pytest.approx([model(input_ids=row, labels=row).loss.item()], rel=1e-4)
    refused = server.run(*settings, *flags(output_dir=tmp_path / "dpo"), env={"METHOD": "kto"})
    assert refused.code == 2 and len(refused.error_lines) == 1


def test_a_table_that_a_models_own_code_casts_is_no_damage(server: CommandServer, tmp_path: Path) -> None:
    """CTRL puts its positions in the precision of its embeddings, which differ in a 4-bit model."""
    tokenizer = tiny.build_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = transformers.CTRLConfig(vocab_size=512, n_embd=64, dff=64, n_layer=2, n_head=2, n_positions=64, **ids)
    transformers.CTRLLMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "Two and two is four."}) + "\n")
    settings = flags(model_name_or_path=tmp_path / "model", dataset_name=tmp_path / "rows.jsonl", max_steps=2)
    done(server.run(*settings, *flags(output_dir=tmp_path / "out", load_in_4bit=True)))
    (row,) = report_of(tmp_path / "out")["rebaselined"]
    assert row["tensor"].endswith("pos_encoding")


# ---- architectures of which one thing is otherwise -----------------------------------------------------------------


def _trained_small(
    model_type: str, server: CommandServer, place: Path, messages: Path, *more: str
) -> tuple[Path, Any]:  # the small version, and what its training left
    model = small_versions.build(model_type, "causal", place / "model", tiny.build_tokenizer())
    words = flags(model_name_or_path=model, dataset_name=messages, max_steps=1, max_length=64)
    words += flags(per_device_train_batch_size=1, save_strategy="no", output_dir=place / "out")
    return model, server.run(*words, *more)


@pytest.mark.parametrize("model_type", ["inkling2", "nemotron_h_omni"])
def test_layers_that_no_adapter_fits_are_left_out_of_the_plan(
    model_type: str, server: CommandServer, tmp_path: Path
) -> None:
    """Inkling 2 has convolutions and norms beside experts that are called as the linear layers of its tower are: these
    are adapted by their paths. Only Nemotron H Omni's language model names its output head, on which PEFT would put an
    adapter."""
    architecture = small_versions.model_types("image-text")[model_type]
    small_versions.small_config(model_type, architecture, {}).save_pretrained(tmp_path)
    words = flags(model=tmp_path, gpu="rx7900xt", seq=64, method="lora")
    assert "fits" in done(server.run(*words, "--json", env={"VERB": "plan"})).stdout


def test_a_model_that_writes_into_its_embeddings_is_planned_without_recomputation(
    server: CommandServer, tmp_path: Path
) -> None:
    """GIT, as it is trained: `plan` names the flag that its refused training names."""
    small_versions.small_config("git", "GitForCausalLM", {}).save_pretrained(tmp_path)
    words = flags(model=tmp_path, gpu="rx7900xt", seq=64, method="lora")
    assert "--gradient_checkpointing false" in done(server.run(*words, env={"VERB": "plan"})).stdout
    refused = server.run(*words, "--checkpointing", "true", env={"VERB": "plan"})
    assert refused.code == 2 and "does not support checkpointing: leave it off" in refused.stderr


def test_an_adapter_whose_tensors_are_called_like_those_of_the_files_is_resumed_from_and_merged(
    server: CommandServer, messages: Path, tmp_path: Path
) -> None:
    """PEFT renames them as transformers renames a file's: Inkling 2's ``weight_proj`` once more."""
    model = small_versions.build("inkling2_text", "causal", tmp_path / "model", tiny.build_tokenizer())
    output = tmp_path / "out"
    words = flags(model_name_or_path=model, dataset_name=messages, output_dir=output, max_steps=3, max_length=64)
    words += flags(per_device_train_batch_size=1, save_strategy="steps", save_steps=2)
    assert server.run(*words, env={"HF_ROCM_TUNE_CRASH": "step=3,kind=kill"}).code < 0
    assert "continues" in done(server.run(*words)).stdout
    trained = {name for name in load_file(output / ADAPTER) if "weight_proj" in name}
    assert trained
    done(server.run(str(output), str(tmp_path / "merged"), env={"VERB": "merge"}))


def test_adapters_in_reversible_layers_are_trained(server: CommandServer, messages: Path, tmp_path: Path) -> None:
    """Reformer's compute their gradients themselves, and only where the embeddings' output requires one."""
    _, result = _trained_small("reformer", server, tmp_path, messages, "--max_steps", "2")
    done(result)
    weights = load_file(tmp_path / "out" / ADAPTER)
    assert all(bool(tensor.any()) for name, tensor in weights.items() if "lora_B" in name)


def test_a_dense_model_of_an_architecture_with_routers_has_no_balancing_loss(
    server: CommandServer, messages: Path, tmp_path: Path
) -> None:
    """Doge's default configuration is dense; transformers' balancing loss would read the first router's logits."""
    _, result = _trained_small("doge", server, tmp_path, messages)
    done(result)
    assert_covered(report_of(tmp_path / "out"))


def test_an_adapter_of_a_model_whose_configuration_has_no_end_token_is_merged(
    server: CommandServer, messages: Path, tmp_path: Path
) -> None:
    """CPM-Ant's."""
    _, result = _trained_small("cpmant", server, tmp_path, messages)
    done(result)
    done(server.run(str(tmp_path / "out"), str(tmp_path / "merged"), env={"VERB": "merge"}))
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_weights_that_files_have_in_one_are_quantised_each(
    server: CommandServer, messages: Path, tmp_path: Path
) -> None:
    """Sarvam's queries, keys and values, beside experts, which are packed by ours."""
    _, result = _trained_small("sarvam_moe", server, tmp_path, messages, "--load_in_4bit")
    done(result)
    assert_covered(report_of(tmp_path / "out"))


OWN_CODE = """from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel
from torch import nn


class OwnForCausalLM(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, **inputs):
        raise AssertionError("it is not trained")
"""


def test_what_is_no_causal_language_model_is_refused_before_it_is_trained(
    server: CommandServer, model_of: Callable[[str], Path], messages: Path, tmp_path: Path
) -> None:
    """A model whose own code is called so, and which cannot generate."""
    model = shutil.copytree(model_of("llama3"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(OWN_CODE)
    words = flags(model_name_or_path=model, dataset_name=messages, max_steps=1, max_length=64)
    words += flags(output_dir=tmp_path / "out")
    refused = server.run(*words, "--trust_remote_code")
    assert refused.code == 2 and len(refused.error_lines) == 1, refused.stderr[-2000:]
    assert "OwnForCausalLM is no causal language model: sft cannot train it" in refused.error_lines[0]


def test_attention_over_values_that_are_all_zero_is_no_fault(
    server: CommandServer, model_of: Callable[[str], Path], messages: Path, tmp_path: Path
) -> None:
    """As in a tower or a layer that has not been trained yet: nothing differs from nothing."""
    model = shutil.copytree(model_of("llama3"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    changed = {name: torch.zeros_like(each) if "v_proj" in name else each for name, each in weights.items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    words = flags(
        model_name_or_path=model, dataset_name=messages, max_steps=1, max_length=64, lora_target_modules="q_proj"
    )
    done(server.run(*words, *flags(output_dir=tmp_path / "out")))
    assert report_of(tmp_path / "out")["arithmetic"]["attention"] > 0
