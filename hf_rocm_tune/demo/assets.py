"""A small base model, its tokenizer and its data, created on this machine without a network.

The model is a Llama from the real config class. Its random weights are trained briefly on the plain answers, without
questions and without the chat template, so that it resembles a real base model: it knows the words, and fine-tuning
teaches it to answer. Pairs that are held back for evaluation are not used.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.survive.atomic import staged_directory

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
BLOCK = 128
_PAD, _START, _END = "<|pad|>", "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- message['content'] + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """How the base model is created. Saved beside it: with another recipe the assets are created again."""

    hidden: int = 192
    layers: int = 3
    steps: int = 250
    batch: int = 8
    learning_rate: float = 2e-3
    seed: int = 0


class Assets(NamedTuple):
    """Directories of the assets: ``model`` for from_pretrained, ``data`` with train.jsonl and test.jsonl."""

    model: Path
    data: Path


def prepare(
    folder: Path, *, recipe: BaseRecipe | None = None, fresh: bool = False, say: Callable[[str], None] = print
) -> Assets:
    """Create the assets unless they exist. The folder is renamed into place when it is complete."""
    recipe = recipe or BaseRecipe()
    assets = Assets(folder / "model", folder / "data")
    stamp = folder / "recipe.json"
    wanted = json.dumps(vars(recipe))
    if folder.exists() and not stamp.exists():
        raise UsageError(f"{folder} exists and was not created by the demo: choose another --output_dir")
    if not fresh and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        say(f"assets: found in {folder}")
        return assets
    with staged_directory(folder) as scratch:
        pairs = read_pairs()
        write_splits(scratch / "data", pairs)
        training = [pair for pair in pairs if not pair.held_back]
        say(
            f"data: {len(training)} question/answer pairs from the docstrings of Python's standard library, "
            f"{len(pairs) - len(training)} more for evaluation"
        )
        tokenizer = train_tokenizer([text for pair in training for text in pair])
        model = _new_model(tokenizer, recipe)
        say(
            f"base model: Llama, {model.num_parameters() / 1e6:.1f} million parameters with random weights, "
            f"{len(tokenizer)} tokens; now {recipe.steps} steps on the plain answers, to give it words"
        )
        loss = _pretrain(model, tokenizer, [pair.answer for pair in training], recipe)
        say(f"base model: trained, loss {loss:.2f}")
        model.save_pretrained(scratch / "model")
        tokenizer.save_pretrained(scratch / "model")
        (scratch / stamp.name).write_text(wanted, encoding="utf-8")
    return assets


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens, with a ChatML template that marks the assistant's turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=_PAD, bos_token=_START, eos_token=_END)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _new_model(tokenizer: PreTrainedTokenizerFast, recipe: BaseRecipe) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.hidden * 5 // 2 // 64 * 64,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // 64,
        num_key_value_heads=max(1, recipe.hidden // 128),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def _pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], recipe: BaseRecipe
) -> float:
    """Next-token training on the CPU, on one thread: the weights do not depend on the machine. Gives the loss."""
    import torch

    stream = [token for ids in tokenizer(texts)["input_ids"] for token in (*ids, tokenizer.eos_token_id)]
    blocks = torch.tensor(stream[: len(stream) // BLOCK * BLOCK]).view(-1, BLOCK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    order = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps)
    losses = []
    model.train()
    for _ in range(recipe.steps):
        batch = blocks[torch.randint(len(blocks), (recipe.batch,), generator=order)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    model.eval()
    return fmean(losses[-max(1, recipe.steps // 10) :])


# ---- text that is on every machine: questions and answers from the docstrings of Python's standard library ----------
#
# The sources are parsed, not imported, so none of their code runs. The pairs depend only on the Python version: modules
# and names have a fixed order. Private names and test packages are left out.

_SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
_SHORTEST, _LONGEST = 20, 400
_TEST_SHARE = 20  # one pair in this many is held back for evaluation

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Pair(NamedTuple):
    """A question about a name of the standard library, and the first paragraph of its docstring."""

    question: str
    answer: str

    @property
    def held_back(self) -> bool:
        """Whether it is for evaluation: decided by its answer, so that equal answers are never in both splits."""
        return int(hashlib.sha256(self.answer.encode()).hexdigest(), 16) % _TEST_SHARE == 0


def read_pairs(root: Path | None = None) -> list[Pair]:
    """All pairs, ordered by module name, without repeated questions."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[str, Pair] = {}
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.intersection(names) or any(name.startswith("_") and name != "__init__" for name in names):
            continue
        with suppress(SyntaxError, ValueError):  # templates and samples that are not valid Python
            module = ".".join(name for name in names if name != "__init__")
            for pair in _pairs(ast.parse(path.read_bytes()), module, f"What is the module {module} for?"):
                pairs.setdefault(pair.question, pair)
    return list(pairs.values())


def _pairs(node: ast.Module | Definition, name: str, question: str) -> Iterator[Pair]:
    text = ast.get_docstring(node) or ""
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0].split())
    if _SHORTEST <= len(paragraph) <= _LONGEST:
        yield Pair(question, paragraph)
    if not isinstance(node, ast.Module | ast.ClassDef):
        return
    for definition in node.body:
        if isinstance(definition, Definition) and not definition.name.startswith("_"):
            inner = f"{name}.{definition.name}"
            asked = f"What does {inner} do?"
            if isinstance(definition, ast.ClassDef):
                asked = f"What is {inner}?"
            yield from _pairs(definition, inner, asked)


def write_splits(folder: Path, pairs: list[Pair]) -> None:
    """Write ``train.jsonl`` and ``test.jsonl`` in TRL's ``messages`` format."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("train", False), ("test", True)):
        rows = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in (pair for pair in pairs if pair.held_back is wanted)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
