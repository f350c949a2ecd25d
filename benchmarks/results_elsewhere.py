"""Runs on bases of many forms, and whether their results work in plain transformers, PEFT and llama.cpp.

    python benchmarks/results_elsewhere.py --out FILE [--llama_cpp DIR] [KIND ...]

Each kind is a small base with random weights in one of the forms in which models are published (files of the
tokenizer, end tokens, templates, vocabulary, weights). The real commands train an adapter on one conversation until it
is known by heart, merge it, answer with both, and verify the merged model. Then one process without this package loads
base and adapter by the lines of the model card, and the merged model by ``generate`` and by ``pipeline``. With
``--llama_cpp`` (a directory as `llama_cpp` takes it) the merged model is exported, and ``llama-server`` answers too.

In a result: ``tokens``: whether six texts and the conversation have the tokens that the base's tokenizer gives;
``stops``: by program, whether exactly the learnt answer came, ended by itself; ``logits``: the largest difference
between the merged model and base plus adapter in plain PEFT; ``verify``: the command's exit code; ``template ... in
llama.cpp``, of a model with several: whether llama-server renders the question (with a tool: ``tool_use``) as
transformers does, and what it renders.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import AddedToken

from benchmarks import llama_cpp
from tests.e2e.command import CommandServer, Result

QUESTION, ANSWER, LIMIT = "What is a lantern?", "A small light.", 24
ASKED = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "light", "description": "Lights a lantern.", "parameters": {}}}]
TALK = [*ASKED, {"role": "assistant", "content": ANSWER}]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.1}
TRAINED = {"max_steps": 80, "learning_rate": 0.01, "lr_scheduler_type": "constant", "per_device_train_batch_size": 2}
TRAINED |= {"warmup_steps": 0, "save_strategy": "no", "doctor": "off", "lora_target_modules": "all-linear"}
TRAINED |= {"lora_dropout": 0, "disable_tqdm": True}
TURNS, END = ("<|im_start|>", "<|im_end|>"), "<|endoftext|>"


class Made(NamedTuple):
    """A base, flags of its run, and the name of llama.cpp's rule for splitting text; None: it finds it itself."""

    base: Path
    flags: dict[str, Any]
    rule: str | None


def _byte_pairs(*more: str) -> Any:
    return llama_cpp.byte_pairs(END, TURNS, llama_cpp.QWEN, *more)


def _save(
    base: Path, tokenizer: Any, config: Any = None, *, ends: list[int] | None = None, rows: int | None = None
) -> Path:
    """A Qwen3, unless another configuration is given, and its tokenizer."""
    known = tokenizer.convert_tokens_to_ids(TURNS[1]) if ends is None else ends
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": known, "pad_token_id": tokenizer.pad_token_id}
    if config is None:
        config = transformers.Qwen3Config(**SIZES, vocab_size=rows or len(tokenizer), **ids, tie_word_embeddings=False)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    tokenizer.save_pretrained(base)
    return base


def _edit(file: Path, **changes: Any) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def tokenizer_json_alone(room: Path) -> Made:
    base = _save(room / "base", _byte_pairs())
    (base / "tokenizer_config.json").unlink()
    return Made(base, {}, "qwen2")


def pieces_alone(room: Path) -> Made:
    """Gemma's ``tokenizer.model`` without ``tokenizer.json``."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    turns = ("<start_of_turn>", "<end_of_turn>")
    tokenizer = llama_cpp.pieces(room / "source", "GemmaTokenizer", turns, names, llama_cpp.GEMMA_TEMPLATE)
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<end_of_turn>"])
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 2, "eos_token_id": ends, "pad_token_id": 0}
    config = transformers.Gemma3TextConfig(**SIZES, **ids, query_pre_attn_scalar=32, sliding_window=64)
    base = _save(room / "base", tokenizer, config)
    llama_cpp.save_as_published(tokenizer, room / "source", base)
    (base / "tokenizer.json").unlink()
    return Made(base, {}, None)


def pieces_of_llama_2(room: Path) -> Made:
    """A vocabulary that puts a space before a text, and a bos token."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    turns = ("<|end|>", "<|user|>", "<|assistant|>")
    tokenizer = llama_cpp.pieces(room / "source", "LlamaTokenizer", turns, names, llama_cpp.PHI_TEMPLATE)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    base = _save(room / "base", tokenizer, transformers.LlamaConfig(**SIZES, **ids))
    llama_cpp.save_as_published(tokenizer, room / "source", base)
    return Made(base, {}, None)


def added_tokens_that_strip(room: Path) -> Made:
    """As Phi's: spaces and line ends behind some tokens belong to them; some are not special."""
    tokenizer = _byte_pairs()
    tokenizer.add_tokens([AddedToken("<|note|>", rstrip=True, normalized=False), AddedToken("tool_call", lstrip=True)])
    return Made(_save(room / "base", tokenizer), {}, "qwen2")


def tied_and_trained(room: Path) -> Made:
    """Tied embeddings, which the run trains."""
    tokenizer = _byte_pairs()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3Config(**SIZES, **ids, tie_word_embeddings=True)
    flags = {"lora_modules_to_save": "embed_tokens"}
    return Made(_save(room / "base", tokenizer, config), flags, "qwen2")


def new_tokens(room: Path) -> Made:
    """The template of another model, whose turns are tokens that the base has not."""
    base = _save(room / "base", _byte_pairs())
    other = _byte_pairs("<turn>", "</turn>")
    other.chat_template = llama_cpp.byte_pairs(END, ("<turn>", "</turn>"), llama_cpp.QWEN).chat_template
    other.save_pretrained(room / "other")
    return Made(base, {"chat_template_path": str(room / "other")}, "qwen2")


def padded_vocabulary(room: Path) -> Made:
    """More rows of embeddings than tokens, and another end token of the run."""
    tokenizer = _byte_pairs("<|eot|>")
    rows = (len(tokenizer) // 64 + 1) * 64
    return Made(_save(room / "base", tokenizer, rows=rows), {"eos_token": "<|eot|>"}, "qwen2")


def several_ends(room: Path) -> Made:
    """Three end tokens in ``generation_config.json``, none of them the end of the template's turn."""
    tokenizer = _byte_pairs("<|a|>", "<|b|>")
    base = _save(room / "base", tokenizer, ends=tokenizer.convert_tokens_to_ids([END, "<|a|>", "<|b|>"]))
    return Made(base, {}, "qwen2")


def no_generation_config(room: Path) -> Made:
    tokenizer = _byte_pairs()
    base = _save(room / "base", tokenizer, ends=[tokenizer.eos_token_id])
    (base / "generation_config.json").unlink()
    return Made(base, {}, "qwen2")


def two_templates(room: Path) -> Made:
    """An old one in ``tokenizer_config.json`` beside the newer file, which counts."""
    base = _save(room / "base", _byte_pairs())
    _edit(base / "tokenizer_config.json", chat_template="{% for m in messages %}OLD {{ m['content'] }}{% endfor %}")
    return Made(base, {}, "qwen2")


def named_templates(room: Path) -> Made:
    """Several templates by name, as transformers 4 wrote them."""
    base = _save(room / "base", _byte_pairs())
    default = (base / "chat_template.jinja").read_text()
    rows = [
        {"name": "default", "template": default},
        {
            "name": "tool_use",
            "template": "{% for t in tools %}TOOL {{ t['function']['name'] }}\n{% endfor %}" + default,
        },
    ]
    (base / "chat_template.jinja").unlink()
    _edit(base / "tokenizer_config.json", chat_template=rows)
    return Made(base, {}, "qwen2")


def vocabulary_and_merges(room: Path) -> Made:
    """GPT-2's files, without ``tokenizer.json``; the template is given to the run."""
    trained = _byte_pairs()
    content = json.loads(trained.backend_tokenizer.to_str())["model"]
    words = content["vocab"] | {token: len(content["vocab"]) + at for at, token in enumerate((END, *TURNS))}
    tokenizer = transformers.GPT2Tokenizer(vocab=words, merges=[tuple(one) for one in content["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": list(TURNS)})
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=256, **ids)
    base = _save(room / "base", tokenizer, config)
    (base / "tokenizer.json").unlink()
    (base / "vocab.json").write_text(json.dumps(words, ensure_ascii=False))
    merges = [one if isinstance(one, str) else " ".join(one) for one in content["merges"]]
    (base / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (room / "template.jinja").write_text(trained.chat_template)
    return Made(base, {"chat_template_path": str(room / "template.jinja")}, "gpt-2")


def pickles(room: Path) -> Made:
    base = _save(room / "base", _byte_pairs())
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    return Made(base, {}, "qwen2")


def files_of_transformers_4(room: Path) -> Made:
    """``special_tokens_map.json``, ``added_tokens.json``, ``added_tokens_decoder`` and an old class."""
    base = _save(room / "base", tokenizer := _byte_pairs())
    decoder = {
        str(number): {"content": token.content, "special": token.special, "normalized": token.normalized}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    changes = {"tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": decoder}
    _edit(base / "tokenizer_config.json", **changes)
    (base / "special_tokens_map.json").write_text(json.dumps({"eos_token": END, "pad_token": END}))
    (base / "added_tokens.json").write_text(json.dumps(tokenizer.get_added_vocab()))
    return Made(base, {}, "qwen2")


KINDS: dict[str, Callable[[Path], Made]] = {
    one.__name__.replace("_", " "): one
    for one in (
        tokenizer_json_alone,
        pieces_alone,
        pieces_of_llama_2,
        added_tokens_that_strip,
        tied_and_trained,
        new_tokens,
        padded_vocabulary,
        several_ends,
        no_generation_config,
        two_templates,
        named_templates,
        vocabulary_and_merges,
        pickles,
        files_of_transformers_4,
    )
}

# ---- what plain libraries make of it ---------------------------------------------------------------------------------

PLAIN = f"""
import json, sys, torch
from pathlib import Path
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline
texts, talk, asked = {llama_cpp.TEXTS!r}, {TALK!r}, {ASKED!r}
for line in sys.stdin:
    base, adapter, merged = json.loads(line)
    row = {{}}
    try:
        trained, found = AutoTokenizer.from_pretrained(adapter), AutoTokenizer.from_pretrained(merged)
        wrong = [text for text in texts if found(text)["input_ids"] != trained(text)["input_ids"]]
        chat = [one.apply_chat_template(talk, tokenize=False) for one in (trained, found)]
        ids = [one(chat[0], add_special_tokens=False)["input_ids"] for one in (trained, found)]
        row["tokens"] = wrong or (True if chat[0] == chat[1] and ids[0] == ids[1] else chat)
        model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if plain.config.vocab_size != model.config.vocab_size:  # as the card of such a run says
            plain.resize_token_embeddings(model.config.vocab_size, mean_resizing=False)
        live = PeftModel.from_pretrained(plain, adapter)
        live.generation_config = GenerationConfig.from_pretrained(adapter)
        inputs = torch.tensor([ids[0]])
        with torch.no_grad():
            pair = [one.eval()(input_ids=inputs).logits.float() for one in (model, live)]
        row["logits"] = float((pair[0] - pair[1]).abs().max())
        prompt = found.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        for name, one in (("transformers", model), ("PEFT", live)):
            made = one.generate(**prompt, max_new_tokens={LIMIT}, do_sample=False)[0, prompt["input_ids"].shape[1]:]
            row[name] = [len(made), found.decode(made, skip_special_tokens=True).strip()]
        chatting = pipeline("text-generation", model=merged, device="cpu")
        said = chatting(asked, max_new_tokens={LIMIT}, do_sample=False)[0]["generated_text"][-1]["content"]
        row["pipeline"] = said.strip()
    except Exception as error:
        row["error"] = f"{{type(error).__name__}}: {{error}}"[:600]
    assert not any(name.startswith("hf_rocm_tune") for name in sys.modules)
    print("ROW " + json.dumps(row), flush=True)
"""


def plain(rows: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """What one process without this package finds: base, adapter and merged model of each kind."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    given = "".join(json.dumps(row) + "\n" for row in rows)
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", PLAIN], input=given, env=environ, cwd=empty, capture_output=True, text=True
        )
    found = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if len(found) != len(rows):
        raise RuntimeError(done.stderr[-2000:])
    return found


# ---- the way of a result ---------------------------------------------------------------------------------------------


def _flags(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def _failed(done: Result) -> str | None:
    return None if done.code == 0 else f"exit {done.code}: {' '.join(done.stderr.split())[-600:]}"


def make(kind: str, room: Path, server: CommandServer, sources: Path | None) -> dict[str, Any]:
    """Train, merge, answer and verify by the commands; what they said."""
    made = KINDS[kind](room)
    (room / "rows.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 2)
    place = {"model": made.base, "dataset": room / "rows.jsonl", "output_dir": room / "run"}
    row: dict[str, Any] = {"room": room}
    if row.setdefault("sft", _failed(server.run(*_flags(place | TRAINED | made.flags)))):
        return row
    argv = [str(room / "run"), str(room / "merged")]
    if sources is not None:
        argv += ["--gguf", "f32", "--llama_cpp", str(llama_cpp.tools_for(made.rule, sources, room / "llama.cpp"))]
    row["merge"] = _failed(server.run(*argv, env={"VERB": "merge"}))
    ask = ("--prompt", QUESTION, "--temperature", "0", "--max_new_tokens", str(LIMIT), "--json")
    for name, which in (("generate", "run"), ("generate, merged", "merged")):
        done = server.run(str(room / which), *ask, env={"VERB": "generate"})
        row[name] = _failed(done)
        if done.code == 0:
            said = json.loads(done.stdout.splitlines()[-1])
            row[name] = [said["tokens"], said["completion"].strip(), said["complete"]]
    checked = server.run(str(room / "merged"), "--base", str(made.base), env={"VERB": "verify"})
    row["verify"] = checked.code if checked.code == 0 else checked.stdout.splitlines() + checked.error_lines
    return row


def served(row: dict[str, Any], sources: Path) -> dict[str, Any]:
    """What llama-server makes of the merged model's GGUF file: its answer to the question, and its chat templates."""
    (file,) = (row["room"] / "merged" / "gguf").glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(row["room"] / "merged")
    with llama_cpp.served(sources / "build" / "bin", file, None) as ask:
        body = {"messages": ASKED, "temperature": 0, "max_tokens": LIMIT}
        said = ask("/v1/chat/completions", body)["choices"][0]
        found = {"llama.cpp": [said["message"]["content"].strip(), said["finish_reason"]]}
        if isinstance(tokenizer.chat_template, dict):
            for name, tools in (("default", None), ("tool_use", TOOLS)):
                there = ask("/apply-template", {"messages": ASKED, **({"tools": tools} if tools else {})})["prompt"]
                here = tokenizer.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True)
                found[f"template {name} in llama.cpp"] = [there == here, there]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--llama_cpp", type=Path, metavar="DIR", help="as benchmarks/llama_cpp.py takes it")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON; kinds already there are kept")
    wanted = parser.parse_args()
    sources = wanted.llama_cpp.absolute() if wanted.llama_cpp else None
    kinds = wanted.kinds or list(KINDS)
    found = json.loads(wanted.out.read_text()) if wanted.out.is_file() else {"kinds": {}}
    found["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-") as folder:
        server = CommandServer(Path(folder) / "commands")
        rows: dict[str, dict[str, Any]] = {}
        for kind in kinds:
            room = Path(folder) / kind.replace(" ", "-")
            room.mkdir()
            try:
                rows[kind] = make(kind, room, server, sources)
            except Exception as error:  # of the base: the others go on
                rows[kind] = {"room": room, "sft": f"{type(error).__name__}: {error}"}
        server.close()
        whole = [kind for kind in kinds if (rows[kind]["room"] / "merged" / "config.json").is_file()]
        places = [tuple(str(rows[kind]["room"] / part) for part in ("base", "run", "merged")) for kind in whole]
        for kind, row in zip(whole, plain(places), strict=True):  # type: ignore[arg-type]
            rows[kind] |= row
            if sources is not None and rows[kind]["merge"] is None:
                try:
                    rows[kind] |= served(rows[kind], sources)
                except (RuntimeError, OSError) as error:
                    rows[kind]["llama.cpp"] = f"{type(error).__name__}: {error}"[-600:]
        for kind, row in rows.items():
            shutil.rmtree(row.pop("room"))
            found["kinds"][kind] = row = {name: value for name, value in row.items() if value is not None}
            print(kind, json.dumps(row, ensure_ascii=False), flush=True)
    wanted.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
