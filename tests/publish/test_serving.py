"""An adapter beside its base in other programs: as GGUF, what is said of vLLM and llama.cpp; encoders; pickles.

The converter of adapters is not in the development environment: a stand-in writes what it would. With ``LLAMA_CPP``,
the directory of llama.cpp, it is the real one.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_rocm_tune import cli
from hf_rocm_tune.publish import export, ollama, readback, serving
from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.publish.merge_cases import lora, write_adapter

LLAMA_CPP = os.environ.get("LLAMA_CPP")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not here")

# ---- what is said of an adapter --------------------------------------------------------------------------------------

PLAIN = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
SAID: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": ({}, ["--enable-lora --lora-modules NAME=me/a.", "--keep_base"], ["--max-lora-rank", "must be merged"]),
    "a rank above 16": ({"r": 48}, ["--max-lora-rank 64"], ["must be merged"]),
    "a rank of 512": ({"r": 512}, ["--max-lora-rank 512"], []),
    "a rank of 513": ({"r": 513}, ["vLLM cannot take it", "(a rank above 512)", "--keep_base"], ["--enable-lora"]),
    "DoRA": ({"use_dora": True}, ["vLLM cannot take it", "llama.cpp and Ollama cannot", "(DoRA)"], ["--enable-lora"]),
    "modules to save": ({"modules_to_save": ["lm_head"]}, ["(modules_to_save: lm_head)"], ["--enable-lora"]),
    "new tokens": ({"trainable_token_indices": {"embed_tokens": [7]}}, ["(trained tokens)"], ["--enable-lora"]),
    "experts": (
        {"target_parameters": ["experts.down_proj"]},
        ["Ollama cannot take it beside its base (experts, which PEFT stores", "0.33 on (adapters of experts, of some"],
        ["vLLM cannot", "as it is: --enable"],
    ),
    "the head": ({"target_modules": ["lm_head"]}, ["(an adapter of lm_head)", "--keep_base"], ["Ollama cannot"]),
    "ranks": (
        {"rank_pattern": {"q_proj": 40}},
        ["from version 0.33 on (other ranks or alphas", "--max-lora-rank 64", "--keep_base"],
        ["as it is: --enable", "Ollama cannot"],
    ),
    "another start": (
        {"init_lora_weights": "gaussian"},
        ["vLLM serves it as it is", "--keep_base"],
        ["must be merged"],
    ),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, ["(init_lora_weights=pissa_niter_4, which"], ["--keep"]),
    "biases": ({"bias": "all"}, ["(biases)"], ["--enable-lora", "--keep_base"]),
    "another method": ({"peft_type": "LOHA"}, ["(LOHA instead of LoRA)"], ["--enable-lora", "--keep_base"]),
    "a reward model": ({"task_type": "SEQ_CLS"}, ["(a reward model)"], ["--enable-lora", "--keep_base"]),
}


@pytest.mark.parametrize("kind", SAID)
def test_it_is_said_where_an_adapter_can_be_used_and_where_it_must_be_merged(kind: str) -> None:
    changed, there, not_there = SAID[kind]
    text = ". ".join([*serving.lines(PLAIN | changed, "me/a"), ""])
    assert all(part in text for part in there) and not any(part in text for part in not_there), text
    assert serving.lines({}, "a whole model") == []


# ---- an adapter as GGUF ----------------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys
from pathlib import Path
import gguf
import torch
from safetensors.torch import load_file
given = Path(sys.argv[1])
out, kind = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--outfile", "--outtype"))
assert (Path(sys.argv[sys.argv.index("--base") + 1]) / "config.json").is_file()
config = json.loads((given / "adapter_config.json").read_text())
harm = os.environ.get("HARM", "")
if harm == "fails":
    raise SystemExit("NotImplementedError: Architecture 'X' not supported!")
writer = gguf.GGUFWriter(out, "llama")
writer.add_type("adapter")
writer.add_string("adapter.type", "lora")
writer.add_float32("adapter.lora.alpha", 7.0 if harm == "alpha" else config["lora_alpha"])
for name, tensor in load_file(given / "adapter_model.safetensors").items():
    if harm == "lost" and name.endswith("layers.1.mlp.up_proj.lora_A.weight"):
        continue
    values = tensor.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]).float().numpy()
    if harm == "one value" and name.endswith("layers.0.self_attn.q_proj.lora_B.weight"):
        values = values.copy()
        values[3, 1] *= -1
    writer.add_tensor(name[-60:], values)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.fixture
def convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str], Path]]:
    """Writes an adapter and converts it: exit code, lines said, the output directory."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / export.ADAPTER_CONVERTER).write_text(STAND_IN)
    base = tiny.build("llama3", tmp_path / "models")

    def run(*flags: str, harm: str = "", **config: Any) -> tuple[int, list[str], Path]:
        monkeypatch.setenv("HARM", harm)
        adapter = write_adapter(lora("", **config), base, tmp_path / "adapter")
        capsys.readouterr()
        tools = str(folder) if harm or LLAMA_CPP is None else LLAMA_CPP
        line = ["merge", str(adapter), str(tmp_path / "out"), "--base", str(base), "--llama_cpp", tools]
        code = cli.main([*line, *(flags or ("--gguf", "f32", "--keep_base"))])
        printed = capsys.readouterr()
        return code, [*printed.out.splitlines(), *printed.err.splitlines()], tmp_path / "out"

    return run


@needs_gguf
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"k_proj": 2}},
    ],
)
def test_an_adapter_as_gguf_scales_every_module_as_peft_does(
    config: dict[str, Any], convert: Callable[..., tuple[int, list[str], Path]], tmp_path: Path
) -> None:
    code, said, out = convert(**config)
    assert code == 0, said
    (file,) = out.glob("*.gguf")
    fields, there = readback.fields_of(file), export.tensors_of(file)
    alpha, stored = fields["adapter.lora.alpha"], load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    from peft import PeftModel

    base = next((tmp_path / "models").iterdir())
    model = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    layer = model.base_model.model.model.layers[0].self_attn
    for name, module in (("q_proj", layer.q_proj), ("k_proj", layer.k_proj), ("v_proj", layer.v_proj)):
        before = stored[f"base_model.model.model.layers.0.self_attn.{name}.lora_B.weight"]
        rank = before.shape[1]
        wanted = (before * module.scaling["default"]).reshape(-1).sort().values
        b = next(
            v
            for n, v in there.items()
            if n.endswith((f"layers.0.self_attn.{name}.lora_B.weight", f"0.attn_{name[0]}.weight.lora_b"))
        )
        found = torch.from_numpy(b() * (alpha / rank)).sort().values  # as llama.cpp scales
        assert torch.allclose(found, wanted, rtol=1e-5), name
    assert "tensors hold the adapter's values" in "\n".join(said) and manifest.verify(out) == []
    text = (out / "Modelfile").read_text()
    assert "\nFROM ./BASE.gguf\nADAPTER ./out-lora-F32.gguf\n" in text and "PARAMETER stop" in text


@needs_gguf
@pytest.mark.parametrize(
    ("harm", "code", "named"),
    [
        ("one value", 3, "layers.0.self_attn.q_proj.lora_B.weight is not in it"),
        pytest.param("lost", 3, "layers.1.mlp.up_proj.lora_A.weight is not in it", marks=pytest.mark.long),
        ("alpha", 3, "not that it is a LoRA of alpha 8"),
        ("fails", 2, "a newer llama.cpp, named with --llama_cpp, may"),
    ],
)
def test_a_wrong_file_of_an_adapter_is_not_kept(
    harm: str, code: int, named: str, convert: Callable[..., tuple[int, list[str], Path]]
) -> None:
    found, said, out = convert(harm=harm)
    assert found == code and named in said[-1] and not out.exists(), said


@pytest.mark.parametrize(
    ("flags", "config", "named"),
    [
        (["--keep_base"], {}, "give --gguf f16, bf16 or f32 with it"),
        (["--gguf", "q8_0", "--keep_base"], {}, "an adapter is small and is not quantised"),
        (["--gguf", "f16", "--keep_base", "--dtype", "float16"], {}, "--dtype has no meaning"),
        (
            ["--gguf", "f16", "--keep_base"],
            {"use_dora": True},
            "cannot be used beside its base by llama.cpp (DoRA): merge it",
        ),
        (["--gguf", "f16", "--keep_base"], {"modules_to_save": ["lm_head"]}, "(modules_to_save: lm_head): merge it"),
    ],
)
def test_what_cannot_be_an_adapter_there_is_refused(
    flags: list[str], config: dict[str, Any], named: str, convert: Callable[..., tuple[int, list[str], Path]]
) -> None:
    code, said, out = convert(*flags, **config)
    assert code == 2 and named in said[-1] and not out.exists(), said


# ---- models of other kinds -------------------------------------------------------------------------------------------


@pytest.fixture
def encoder_decoder(tmp_path: Path) -> Path:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = None
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def test_the_answer_of_an_encoder_decoder_is_printed_as_transformers_gives_it(
    encoder_decoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(encoder_decoder), "--prompt", "Reverse the words of this.", "--max_new_tokens", "5"]
    assert cli.main([*argv, "--temperature", "0", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_decoder)
    model = transformers.T5ForConditionalGeneration.from_pretrained(encoder_decoder)
    inputs = tokenizer(row["prompt"], return_tensors="pt")
    wanted = model.generate(input_ids=inputs["input_ids"], max_new_tokens=5, do_sample=False)[0, 1:]
    assert row["tokens"] == len(wanted) == 5
    assert row["completion"] == tokenizer.decode(wanted, skip_special_tokens=True)


# ---- Ollama's Modelfile ----------------------------------------------------------------------------------------------


def test_a_modelfile_holds_braces_and_marks_as_ollama_reads_them() -> None:
    """Its parser takes no escapes; two braces, or one before an action, would begin another action of its template."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '{' + m['role'] + '|{' + m['content'] + '}}' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '{assistant|{' }}{% endif %}"
    )
    pieces = ollama.pieces_of(tokenizer, adds_bos=False)
    assert pieces is not None
    text = ollama.modelfile(
        "./x.gguf", pieces, ["<|im_end|>", 'a"b', "a\\b", "un\u00a0printable", ""], has_template=True
    )
    assert '{{ "{" }}user|{{ "{" }}{{ .Content }}}}' in text and text.count("{{ .Content }}}}") == 2
    stops = [line.removeprefix("PARAMETER stop ") for line in text.splitlines() if line.startswith("PARAMETER")]
    assert stops == ['"<|im_end|>"', '"""a"b"""', '"a\\b"']
    tokenizer.chat_template = tokenizer.chat_template.replace("}}'", "}}\u00a0'")
    assert ollama.pieces_of(tokenizer, adds_bos=False) is None
