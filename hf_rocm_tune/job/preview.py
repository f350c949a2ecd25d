"""``--dry_run``: the rows as the model will read them, the tokens that count in the loss, and no weights loaded."""

from __future__ import annotations

import copy
import html
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import trl
from transformers import AutoConfig, AutoTokenizer
from trl import get_peft_config

from hf_rocm_tune.data.formats import MASKED
from hf_rocm_tune.data.summary import CountedSFTTrainer
from hf_rocm_tune.foreign import visible
from hf_rocm_tune.job.rows import is_plain_template
from hf_rocm_tune.models.classes import without_weights
from hf_rocm_tune.settings.verbs import VERBS
from hf_rocm_tune.train.refusals import as_usage_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.data.sources import Splits
    from hf_rocm_tune.models.factory import ModelSource
    from hf_rocm_tune.settings.arguments import Arguments
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

_BAR = 15
_LOOKED_AT = 100  # rows, for one with pictures and one without
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rows as the model reads them</title><style>
:root { color-scheme: light dark; }
body { margin: 1rem; background: light-dark(#fff, #161b22); color: light-dark(#1f2328, #e6edf3); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 30rem) { pre { font-size: .75rem; } }
b { color: light-dark(#1a7f37, #57c26e); }
</style></head><body><pre>ROWS</pre></body></html>"""


def prepared(arguments: Arguments, source: ModelSource, data: Splits, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A trainer that has prepared the rows as the run will, around a model without weights."""
    stock = CountedSFTTrainer if arguments.method == "sft" else getattr(trl, VERBS[arguments.method].trainer)
    stays = {"_move_model_to_device": lambda self, model, device: None}  # there is nothing to move
    trainer_class = type(stock.__name__, (stock,), stays)
    config = AutoConfig.from_pretrained(
        source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
    )
    model = without_weights(config, reward=source.reward, trust_remote_code=source.trust_remote_code)
    args = copy.copy(arguments.training)
    args.model_init_kwargs = None
    args.push_to_hub = False
    args.report_to = []
    if not is_plain_template(args):  # TRL would resize the embeddings, which a model without weights cannot
        tokenizer = _with_tokens_of(tokenizer, args.chat_template_path)
        args.chat_template_path = None
    peft_config = None
    if arguments.method != "sft":
        peft_config = get_peft_config(arguments.model)
    with as_usage_errors(), tempfile.TemporaryDirectory() as args.output_dir:  # it makes the directory
        trainer: VerifiedTransferMixin = trainer_class(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=tokenizer,
            peft_config=peft_config,
        )
    trainer.pictures = data.pictures
    if data.pictures is not None:
        data.pictures.attach(trainer)
    return trainer


def _with_tokens_of(tokenizer: PreTrainedTokenizerBase, path: str) -> PreTrainedTokenizerBase:
    """A copy with the chat template, the tokens and the end of sequence of another tokenizer, as TRL's trainer has."""
    other = AutoTokenizer.from_pretrained(path)
    extended = copy.deepcopy(tokenizer)
    extended.chat_template = other.get_chat_template()
    known = extended.get_vocab()
    extended.add_tokens([token for token in other.added_tokens_decoder.values() if token.content not in known])
    extended.eos_token = other.eos_token
    return extended


def rows_of(trainer: VerifiedTransferMixin, split: str) -> list[dict[str, Any]]:
    """The first row of a split, and the longest of the first hundred, as tokens with whether each counts."""
    dataset = getattr(trainer, f"{split}_dataset") or ()
    if trainer.pictures is not None:
        return _pictured_rows(trainer, dataset, split)
    rows = [_parts(row) for row in islice(dataset, 100)]
    rows = [parts for parts in rows if parts]
    if not rows:
        return []
    wanted = [rows[0]]
    longest = max(rows, key=lambda parts: sum(len(ids) for ids, _ in parts.values()))
    if longest != rows[0]:
        wanted.append(longest)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    shown = []
    for parts in wanted:
        pieces = {name: _pieces(tokenizer, *part) for name, part in parts.items()}
        shown.append({"split": split, "parts": pieces})
    return shown


def _pictured_rows(trainer: VerifiedTransferMixin, dataset: Any, split: str) -> list[dict[str, Any]]:
    """The first row with pictures and the first without, as the collator makes batches of them."""
    collator = trainer.data_collator
    tokenizer = trainer.processing_class.tokenizer
    chosen: dict[bool, dict[str, Any]] = {}
    for row in islice(dataset, _LOOKED_AT):
        _, sources = collator.pictures.arranged(row)
        if bool(sources) in chosen:
            continue
        batch = collator([row])
        if "labels" in batch:
            in_loss = batch["labels"] != MASKED
        else:
            in_loss = batch["completion_mask"].bool()
        names = ("row",) if len(in_loss) == 1 else ("chosen", "rejected")
        parts = {}
        for number, name in enumerate(names):
            kept = batch["attention_mask"][number].bool()
            ids = batch["input_ids"][number][kept].tolist()
            counts = in_loss[number][kept].tolist()
            parts[name] = _pieces(tokenizer, ids, counts)
        for pieces in parts.values():
            for piece in pieces:
                piece["text"] = _shortened(piece["text"])
        sizes = [list(collator.pictures.opened(source).size) for source in sources]
        chosen[bool(sources)] = {"split": split, "parts": parts, "pictures": sizes}
    return [chosen[key] for key in (True, False) if key in chosen]


def _shortened(text: str) -> str:
    """A text in which a token of a picture that is repeated stands once, with its count."""
    return re.sub(r"(<[^<>]{1,40}>|\[[A-Z_]{2,20}\])\1{3,}", lambda m: f"{m[1]} x {len(m[0]) // len(m[1])} ", text)


def _parts(row: Mapping[str, Any]) -> dict[str, tuple[list[int], list[bool]]]:
    """What the model reads of a row: one sequence, or one for each answer of a pair."""
    if "labels" in row and "input_ids" in row:
        return {"row": (list(row["input_ids"]), [label != MASKED for label in row["labels"]])}
    prompt = list(row.get("prompt_ids") or [])
    return {
        name.removesuffix("_ids"): (prompt + list(row[name]), [False] * len(prompt) + [True] * len(row[name]))
        for name in ("chosen_ids", "rejected_ids", "completion_ids")
        if name in row
    }


def _pieces(tokenizer: Any, ids: list[int], counts: list[bool]) -> list[dict[str, Any]]:
    """Runs of tokens that count or do not, as text with special tokens; whole runs, so that no character is split."""
    pieces = []
    for counted, run in groupby(zip(ids, counts, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append({"text": text, "tokens": len(tokens), "counts": counted})
    return pieces


def shown(trainer: VerifiedTransferMixin, form: str, *, colour: bool) -> str:
    """The preview as ``text``, ``html`` or ``json``. Tokens that count are green, else between double brackets."""
    rows = [*rows_of(trainer, "train"), *rows_of(trainer, "eval")]
    if form == "json":
        return _as_json(trainer, rows)
    escaped = html.escape if form == "html" else str
    if form == "html":
        marks = "<b>", "</b>"
    elif colour:
        marks = "\x1b[1;32m", "\x1b[0m"
    else:
        marks = "[[", "]]"
    lines = [escaped(line) for line in _summary_lines(trainer)]
    for row in rows:
        for name, pieces in row["parts"].items():
            lines += ["", _title(row, name, pieces), _marked(pieces, marks, escaped)]
    text = "\n".join(lines)
    return _PAGE.replace("ROWS", text) if form == "html" else text


def _as_json(trainer: VerifiedTransferMixin, rows: list[dict[str, Any]]) -> str:
    content = {"summaries": [summary.to_dict() for summary in trainer.data_summaries.values()], "rows": rows}
    if trainer.pictures is not None:
        content["pictures"] = [summary.to_dict() for summary in trainer.pictures.summaries.values()]
    return visible(json.dumps(content, indent=2, ensure_ascii=False), json_text=True)


def _summary_lines(trainer: VerifiedTransferMixin) -> list[str]:
    """What is said of the pictures and of each split, with a histogram of the rows' lengths."""
    lines: list[str] = []
    if trainer.pictures is not None:
        lines += trainer.pictures.lines()
    for summary in trainer.data_summaries.values():
        lines += [summary.line(), *summary.warnings()]
        most_rows = max(count for _, count in summary.histogram)
        for longest, count in summary.histogram:
            bar = "#" * math.ceil(_BAR * count / most_rows)
            lines.append(f"  up to {longest:>7,} tokens {count:>7,} rows {bar}".rstrip())
    return lines


def _title(row: dict[str, Any], name: str, pieces: list[dict[str, Any]]) -> str:
    """The line above a row, or above one ``name`` of a pair's answers."""
    total = sum(piece["tokens"] for piece in pieces)
    counted = sum(piece["tokens"] for piece in pieces if piece["counts"])
    what = f"a {row['split']} row"
    if name != "row":
        what += f", {name} answer"
    sizes = [f"{width} x {height} pixels" for width, height in row.get("pictures", ())]
    if sizes:
        what += f" with {', '.join(sizes)}"
    return f"{what}: {total} tokens, {counted} of them count in the loss"


def _marked(pieces: list[dict[str, Any]], marks: tuple[str, str], escaped: Callable[[str], str]) -> str:
    """The text of a row, with what counts in the loss between ``marks``."""
    text = ""
    for piece in pieces:
        shown_text = escaped(visible(piece["text"]))
        if piece["counts"]:
            shown_text = f"{marks[0]}{shown_text}{marks[1]}"
        text += shown_text
    return text
