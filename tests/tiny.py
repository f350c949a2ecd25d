"""Small random-weight models of real architectures, and small real data files, for every test.

The models come from the real config classes and are saved as safetensors beside a real byte-level BPE tokenizer,
so a test that loads one goes through the same code as with a full-size checkpoint. All linear layers have input
and output sizes that are multiples of 64, which is what bitsandbytes' 4-bit blocks need on the CPU.

Not covered: the numbers of a trained model. The weights are random with the architecture's own initialisation.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedTokenizerFast

HIDDEN = 64
LAYERS = 2
CONTEXT = 256
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|unk|>")

# The {% generation %} block is what assistant-only loss needs; the text is ChatML.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- (message['content'] or '') + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- (message['content'] or '') + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@cache
def training_text() -> tuple[str, ...]:
    """Real sentences that are on every machine: docstrings of a few standard library modules."""
    docs = [inspect.getdoc(member) for module in (json, random, shutil, tempfile) for member in vars(module).values()]
    return tuple(sorted({doc for doc in docs if doc}))


def build_tokenizer(*, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 512 tokens on `training_text`; pad, bos, eos and unk are set."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(training_text(), trainer=trainer)
    pad, bos, _, end, unk = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        bos_token=bos,
        eos_token=end,
        unk_token=unk,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


_DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_HEAD_DIM: dict[str, Any] = {**_DECODER, "head_dim": 32}  # 2 key/value heads of 32: each projection is a multiple of 64
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 8,
}
_GEMMA = {
    **_HEAD_DIM,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Phi-3 has no head_dim of its own (hidden 64 / 2 heads = 32); its fused qkv projection is 64 -> 192.
_PHI = {
    **_DECODER,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": CONTEXT,
}
_EXPERTS = {**_HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
_GPT_OSS = {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
#: The class of the configuration, of `transformers`, and its values.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {**_HEAD_DIM, "rope_parameters": _ROPE, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {**_HEAD_DIM, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_HEAD_DIM, "sliding_window": 64}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "phi3": ("Phi3Config", _PHI),
    "smollm3": ("SmolLM3Config", _HEAD_DIM),
    "olmo2": ("Olmo2Config", {**_DECODER, "num_key_value_heads": 4}),
    "gpt2": ("GPT2Config", {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "gpt_oss": ("GptOssConfig", {**_HEAD_DIM, "intermediate_size": HIDDEN, "num_local_experts": 4, **_GPT_OSS}),
}
ARCHITECTURES: tuple[str, ...] = tuple(_CONFIGS)
_LINEAR = {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
_LINEAR |= {f"linear_num_{name}_heads": 4 for name in ("key", "value")}
_LINEAR["layer_types"] = ["linear_attention", "full_attention"]
_CONFIGS["qwen3_5"] = ("Qwen3_5TextConfig", {**_HEAD_DIM, **_LINEAR})  # with layers that no other one has


def config_of(arch: str, tokenizer: PreTrainedTokenizerFast, **own: Any) -> PretrainedConfig:
    """The configuration of this architecture, with the tokenizer's special tokens and given values."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    name, values = _CONFIGS[arch]
    return getattr(transformers, name)(vocab_size=512, **ids, **values | own)


def build(
    arch: str,
    dest: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
    chat_template: bool = True,
    **values: Any,
) -> Path:
    """Write a model of this architecture with its tokenizer to ``dest/<name>``, unless it is there already.

    Args:
        arch: one of `ARCHITECTURES`.
        dest: folder that keeps the models, usually a session's temporary one. Safe to share between processes.
        dtype: of the weights in the file.
        shards: at least how many safetensors files (more are possible, since tensors are never split).
        seed: of the random weights; the same seed gives the same bytes.
        chat_template: whether the tokenizer has one.
        values: of the configuration, in place of ours.

    Returns:
        The model's folder, to be given to ``from_pretrained`` or ``--model_name_or_path``.
    """
    name = f"{arch}-{str(dtype).removeprefix('torch.')}-{shards}-{seed}{'' if chat_template else '-notemplate'}"
    name += "".join(f"-{each}" for each in values.values())
    folder = dest / name
    if folder.exists():
        return folder
    dest.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(chat_template=chat_template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_of(arch, tokenizer, **values)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    scratch = Path(tempfile.mkdtemp(dir=dest, prefix=".building-"))
    model.save_pretrained(scratch, max_shard_size=size if shards == 1 else size // shards)
    tokenizer.save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:  # another process was faster; its bytes are the same
        shutil.rmtree(scratch)
    return folder


def build_mxfp4(dest: Path) -> Path:
    """As `build`, a gpt-oss whose experts are in MXFP4 as in OpenAI's files: random bytes, small scales."""
    folder = dest / "gpt_oss-mxfp4"
    if folder.exists():
        return folder
    plain = build("gpt_oss", dest, dtype=torch.bfloat16)
    scratch = Path(shutil.copytree(plain, tempfile.mkdtemp(dir=dest, prefix=".building-"), dirs_exist_ok=True))
    random_bytes = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            shape = tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32
            of_bytes = {"dtype": torch.uint8, "generator": random_bytes}
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), **of_bytes)
            tensors[f"{name}_scales"] = torch.randint(118, 122, shape, **of_bytes)
        else:
            tensors[name] = tensor
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        scratch.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(scratch)
    return folder


def _pairs(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Question and answer about a real sentence, different for each seed."""
    chooser = random.Random(seed)
    for number in range(count):
        doc = " ".join(chooser.choice(training_text()).split())
        start = chooser.randrange(max(1, len(doc) - 120))
        yield f"Question {number}: what comes after '{doc[start : start + 24]}'?", doc[start + 24 : start + 120] or doc


def _write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + os.linesep for row in rows), encoding="utf-8")
    return path


def _conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_messages_jsonl(path: Path, n: int, seed: int = 0) -> Path:
    """Rows of ``{"messages": [user, assistant]}``."""
    return _write_rows(path, ({"messages": _conversation(q, a)} for q, a in _pairs(n, seed)))


def write_prompt_completion_jsonl(path: Path, n: int, seed: int = 0, *, conversational: bool = False) -> Path:
    """Rows of ``{"prompt", "completion"}``: strings, or lists of messages when conversational."""
    if not conversational:
        return _write_rows(path, ({"prompt": q, "completion": " " + a} for q, a in _pairs(n, seed)))
    turns = (_conversation(q, a) for q, a in _pairs(n, seed))
    return _write_rows(path, ({"prompt": turn[:1], "completion": turn[1:]} for turn in turns))


def write_text_jsonl(path: Path, n: int, seed: int = 0) -> Path:
    """Rows of ``{"text": str}``."""
    return _write_rows(path, ({"text": f"{q} {a}"} for q, a in _pairs(n, seed)))


def write_tools_jsonl(path: Path, n: int, seed: int = 0) -> Path:
    """Rows of ``{"messages", "tools"}``, where ``tools`` is a JSON string as TRL documents it."""
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find a sentence in the documentation.",
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
        },
    }
    rows = ({"messages": _conversation(q, a), "tools": json.dumps([tool])} for q, a in _pairs(n, seed))
    return _write_rows(path, rows)


def write_sharegpt_jsonl(path: Path, n: int, seed: int = 0) -> Path:
    """Rows of ``{"conversations": [{"from", "value"}]}``, which TRL converts to messages."""
    rows = ({"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in _pairs(n, seed))
    return _write_rows(path, rows)


def write_dataset_dir(path: Path, *, train: int = 16, test: int = 4, seed: int = 0) -> Path:
    """A folder with ``train.jsonl`` and ``test.jsonl`` in messages format, for ``--dataset_name FOLDER``."""
    write_messages_jsonl(path / "train.jsonl", train, seed)
    write_messages_jsonl(path / "test.jsonl", test, seed + 1)
    return path
