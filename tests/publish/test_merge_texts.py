"""What other programs read of a merged model beside its weights: tokenizer files, special tokens, end tokens."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_rocm_tune.publish.generate import Settings, answer, loaded_model, render
from hf_rocm_tune.publish.merge import merge
from hf_rocm_tune.survive.saved_adapter import open_adapter
from tests import tiny
from tests.publish.merge_cases import load_base, lora, randomise, write_adapter

CONFIG = "tokenizer_config.json"
FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose tokenizer has the files of transformers 4, and one of its own that nothing of ours writes."""
    base = shutil.copytree(
        tiny.build("qwen3", tmp_path_factory.mktemp("models")), tmp_path_factory.mktemp("p") / "base"
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    content = json.loads((base / CONFIG).read_text())
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    content["added_tokens_decoder"] = {
        str(number): {field: getattr(token, field) for field in FIELDS}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    (base / CONFIG).write_text(json.dumps(content, indent=1))
    (base / "tokenizer.model").write_bytes(b"pieces")  # read by other programs only
    return base


def adapted(base: Path, out: Path, tokenizer: Any, rows: int | None = None) -> Path:
    """An adapter of a base beside the tokenizer that its run saved; ``rows`` of a larger vocabulary."""
    if rows is None:
        write_adapter(lora("qwen3"), base, out)
    else:
        model = load_base(base)
        model.resize_token_embeddings(rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = get_peft_model(model, lora("qwen3", modules_to_save=["embed_tokens"]).peft_config())
            randomise(peft)
            peft.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def done(adapter: Path, base: Path, out: Path) -> Path:
    merge(str(adapter), out, base_name=str(base), say=lambda _: None)
    return out


def test_the_bases_tokenizer_files_are_kept_where_the_run_changed_nothing(published: Path, tmp_path: Path) -> None:
    adapter = adapted(published, tmp_path / "adapter", AutoTokenizer.from_pretrained(published))
    assert not (adapter / "tokenizer.model").exists() and "added_tokens_decoder" not in (adapter / CONFIG).read_text()
    out = done(adapter, published, tmp_path / "out")
    names = ["tokenizer.json", CONFIG, "tokenizer.model", "chat_template.jinja"]
    assert {name: (out / name).read_bytes() for name in names} == {n: (published / n).read_bytes() for n in names}


def test_new_tokens_stand_in_every_file_that_other_programs_read(published: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(published)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|think|>"]}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(["quietharbour"])
    base = shutil.copytree(published, tmp_path / "base")
    (base / "added_tokens.json").write_text("{}")
    adapter = adapted(base, tmp_path / "adapter", tokenizer, rows=len(tokenizer))
    out = done(adapter, base, tmp_path / "out")
    assert (out / "tokenizer.model").read_bytes() == b"pieces"
    content = json.loads((out / CONFIG).read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"  # what older programs know
    added = {row["content"]: row["special"] for row in content["added_tokens_decoder"].values()}
    assert added["<|think|>"] is True and added["quietharbour"] is False
    assert {"<|think|>", "quietharbour"} <= json.loads((out / "added_tokens.json").read_text()).keys()
    again = AutoTokenizer.from_pretrained(out)
    text = "x<|think|>quietharbour y"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(tokenizer)


def test_a_template_of_the_run_replaces_every_other(published: Path, tmp_path: Path) -> None:
    base = shutil.copytree(published, tmp_path / "base")
    content = json.loads((base / CONFIG).read_text())
    content["chat_template"] = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    (base / CONFIG).write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    out = done(adapted(base, tmp_path / "adapter", tokenizer), base, tmp_path / "out")
    assert "chat_template" not in json.loads((out / CONFIG).read_text())
    assert (out / "chat_template.jinja").read_text() == tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    kept = json.loads((out / CONFIG).read_text())["added_tokens_decoder"]
    assert kept == json.loads((base / CONFIG).read_text())["added_tokens_decoder"]


@pytest.mark.parametrize("form", ["in tokenizer_config.json", "in a folder"])
def test_a_template_for_tools_beside_the_default_one_is_kept(form: str, published: Path, tmp_path: Path) -> None:
    base = shutil.copytree(published, tmp_path / "base")
    default = (base / "chat_template.jinja").read_text()
    templates = {"default": default, "tool_use": "TOOLS {{ tools | length }} " + default}
    if form == "in a folder":
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    else:
        (base / "chat_template.jinja").unlink()
        rows = [{"name": name, "template": template} for name, template in templates.items()]
        content = json.loads((base / CONFIG).read_text()) | {"chat_template": rows}
        (base / CONFIG).write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.chat_template == templates
    out = done(adapted(base, tmp_path / "adapter", tokenizer), base, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(out)
    assert found.chat_template == templates
    asked = [{"role": "user", "content": "x"}]
    assert found.apply_chat_template(asked, tools=[{"a": 1}], tokenize=False).startswith("TOOLS 1")


def test_further_templates_of_a_run_are_read_and_kept(published: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(published)
    default = tokenizer.chat_template
    tokenizer.chat_template = {"default": default, "tool_use": "TOOLS {{ tools | length }} " + default}
    adapter = adapted(published, tmp_path / "adapter", tokenizer)
    assert (adapter / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert AutoTokenizer.from_pretrained(open_adapter(str(adapter)).directory).chat_template == tokenizer.chat_template
    out = done(adapter, published, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


def test_an_older_template_in_the_settings_is_left_out_of_the_result(published: Path, tmp_path: Path) -> None:
    """transformers reads ``chat_template.jinja`` where there is one, llama.cpp's converter the settings."""
    base = shutil.copytree(published, tmp_path / "base")
    content = json.loads((base / CONFIG).read_text()) | {"chat_template": "OLD"}
    (base / CONFIG).write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(base)
    out = done(adapted(base, tmp_path / "adapter", tokenizer), base, tmp_path / "out")
    assert "chat_template" not in json.loads((out / CONFIG).read_text())
    assert (out / "chat_template.jinja").read_text() == tokenizer.chat_template != "OLD"


def test_settings_that_the_base_has_not_come_from_the_run(published: Path, tmp_path: Path) -> None:
    """llama.cpp's converter reads no chat template without ``tokenizer_config.json``."""
    base = shutil.copytree(published, tmp_path / "base")
    (base / CONFIG).unlink()
    (base / "tokenizer.model").unlink()
    tokenizer = AutoTokenizer.from_pretrained(base)
    out = done(adapted(base, tmp_path / "adapter", tokenizer), base, tmp_path / "out")
    there = json.loads((out / CONFIG).read_text())["added_tokens_decoder"]
    assert {int(number) for number in there} == set(tokenizer.added_tokens_decoder)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


# ---- where an answer ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["eos_token", "template"])
def test_a_merged_model_stops_where_generate_stops(changed: str, tmp_path: Path) -> None:
    """A base that knows another end than its run trained: by ``--eos_token``, or by a template's end of a turn."""
    base = shutil.copytree(tiny.build("llama3", tmp_path / "models"), tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    end, other = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.unk_token_id
    for name in ("config.json", "generation_config.json"):
        content = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(content | {"eos_token_id": other}))
    tokenizer.eos_token = tokenizer.unk_token
    tokenizer.save_pretrained(base)
    if changed == "eos_token":
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.chat_template = None
    adapter = adapted(base, tmp_path / "adapter", tokenizer)
    out = done(adapter, base, tmp_path / "out")
    given = GenerationConfig.from_pretrained(out).eos_token_id
    assert end in given and other in given
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.eos_token_id == end) == (changed == "eos_token")
    ids = torch.tensor([[1, 17, 300, 42]])
    # The end token is made by far the likeliest one, on both sides.
    bias = torch.nn.functional.one_hot(torch.tensor(end), model.config.vocab_size).float() * 1e4

    def push(_: Any, __: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs + bias

    model.lm_head.register_forward_hook(push)
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.shape[1] == ids.shape[1] + 1 and made[0, -1] == end
    settings = Settings(model=str(adapter), base=str(base), max_new_tokens=8, temperature=0, raw=True)
    with loaded_model(settings, lambda _: None) as loaded:
        loaded.model.get_base_model().lm_head.register_forward_hook(push)
        reply = answer(loaded, render(loaded, "What comes next?"))
    assert reply.complete and reply.tokens == 1
