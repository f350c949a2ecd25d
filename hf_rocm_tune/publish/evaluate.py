"""``hf-rocm-tune eval``: perplexity on a split, and tasks of lm-evaluation-harness; a table, and one line of JSON.

Perplexity is exp of the mean negative log-likelihood of the counted tokens, each of which has the same weight
(``eval_loss`` of trainers is a mean of batch means, which gives tokens in short rows more weight). Logits have the
model's dtype; the log-softmax is computed in float32 and the sum in float64. Base and adapter get the same batches.
Rows are tokenised as by TRL's SFT trainer (TRL 1.16, ``SFTTrainer._prepare_dataset``).

The harness is a separate package (the extra ``eval``, tested with lm-eval 0.4.13). It gets the loaded model and moves
its inputs to the device itself; those transfers are not verified, which the result reports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError, shortage_advice
from hf_rocm_tune.paths import can_be_file, expand_user
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.commands import add_model_flags, at_least, chosen

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.publish.generate import Loaded

_VERSIONS = ("hf-rocm-tune", "torch", "transformers", "peft", "bitsandbytes", "lm-eval")
_HARNESS_RESULTS = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")
_IGNORED = -100


# ---- the command ----------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file too")
    parser.add_argument("--batch_size", type=at_least(1), default=4, help="rows or requests at a time (default: 4)")
    rows = parser.add_argument_group("perplexity")
    rows.add_argument("--dataset_name", help="a file, a folder or a Hub id, in any format that sft takes")
    rows.add_argument("--dataset_config", help="of a dataset that has several")
    rows.add_argument("--split", default="test", help="of the dataset (default: test; a single file has one)")
    rows.add_argument("--dataset_text_field", default="text", help="column of plain text (default: text)")
    rows.add_argument("--max_length", type=at_least(2), default=1024, help="tokens of a row (default: 1024)")
    rows.add_argument("--max_rows", type=at_least(1), help="the first so many rows only")
    rows.add_argument("--assistant_only", action="store_true", help="count only tokens of the assistant")
    tasks = parser.add_argument_group("lm-evaluation-harness")
    tasks.add_argument("--tasks", help="names of tasks, separated by commas")
    tasks.add_argument("--limit", type=at_least(1), help="documents of each task")
    few = "examples before each question (default: the task's own)"
    tasks.add_argument("--num_fewshot", type=at_least(0), help=few)
    tasks.add_argument("--include_path", type=Path, help="a folder with further task files")
    tasks.add_argument("--apply_chat_template", action="store_true", help="ask through the chat template")


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    tasks = [name.strip() for name in wanted.tasks.split(",")] if wanted.tasks is not None else []
    if not all(tasks):
        raise UsageError("--tasks: give names, separated by commas")
    if tasks and wanted.include_path is not None and not os.path.isdir(wanted.include_path):
        raise UsageError(f"--include_path {wanted.include_path} is not a folder: give one with task files (.yaml)")
    if not wanted.dataset_name and not tasks:
        raise UsageError("nothing to evaluate: give --dataset_name for perplexity, --tasks for benchmarks, or both")
    if wanted.json is not None and not can_be_file(wanted.json):
        raise UsageError(f"--json {wanted.json} is not a file in a directory that exists; choose another")
    prepare()
    from hf_rocm_tune.publish.generate import LoadSettings, loaded_model

    manager = _find_tasks(tasks, wanted.include_path) if tasks else None
    with loaded_model(chosen(LoadSettings, wanted), say, compare=wanted.compare) as loaded:
        result: dict[str, Any] = {
            "schema": 1,
            "model": loaded.name,
            "base": loaded.base if loaded.adapter else None,
            "load_in_4bit": wanted.load_in_4bit,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": str(loaded.mover.device),
            "verified": loaded.verified,
            "fault_injection": loaded.mover.fault_injection(),
            "versions": {name: _version(name) for name in _VERSIONS},
        }
        if wanted.dataset_name:
            names = ("split", "max_length", "max_rows", "batch_size", "assistant_only", "compare")
            asked = {name: getattr(wanted, name) for name in names}
            asked |= {"config": wanted.dataset_config, "text_field": wanted.dataset_text_field}
            result["perplexity"] = perplexity(loaded, wanted.dataset_name, **asked)
            print("\n".join(_table(result["perplexity"])), flush=True)
        if tasks:
            result["tasks"] = _run_tasks(loaded, tasks, manager, wanted)
            print("\n".join(_task_table(result["tasks"])), flush=True)
    text = json.dumps(result)
    print(text)
    if wanted.json is not None:
        try:
            wanted.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {wanted.json} cannot be written: {error.strerror}; choose another") from error
    return 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _table(found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{found['dataset']}: {found['rows']} rows, {found['tokens']} tokens counted ({found['counted']}), "
        f"{found['rows_cut']} rows cut at {found['max_length']} tokens",
        f"{'':<16}{'loss':>10}{'perplexity':>14}",
    ]
    base = found["without_adapter"]
    for name, score in ((("base", base),) if base else ()) + (("adapter" if base else "model", found),):
        shown = ["not finite" if score[key] is None else f"{score[key]:.4f}" for key in ("loss", "perplexity")]
        lines.append(f"{name:<16}{shown[0]:>10}{shown[1]:>14}")
    return lines


def _task_table(found: Mapping[str, Any]) -> list[str]:
    lines = []
    base = found.get("without_adapter", {}).get("results", {})
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "stderr" not in metric:
                beside = f"   base {base[task][metric]:.4f}" if task in base else ""
                lines.append(f"{task:<32}{metric:<24}{value:>10.4f}{beside}")
    return lines


# ---- perplexity -----------------------------------------------------------------------------------------------------


def perplexity(
    loaded: Loaded,
    dataset: str,
    *,
    config: str | None = None,
    split: str = "test",
    text_field: str = "text",
    max_length: int = 1024,
    max_rows: int | None = None,
    batch_size: int = 4,
    assistant_only: bool = False,
    compare: bool = False,
) -> dict[str, Any]:
    """Measure the model, and its base on request. A single file has one split, whatever ``split`` says.

    Returns:
        The result as plain values: rows, tokens, ``loss`` (nats a token) and ``perplexity``, of the base under
        ``without_adapter``; a value that is not finite is None.

    Raises:
        UsageError: the rows cannot be read, or none has a token to count.
        OutOfMemoryError: a batch does not fit.
        CorruptionError: a batch could not be transferred correctly.
    """
    split = "train" if os.path.isfile(expand_user(dataset)) else split
    if (positions := _learned_positions(loaded.model)) is not None and positions < max_length:
        say(f"rows are cut at {positions} tokens: the model has no positions beyond them")
        max_length = positions
    source = _source(dataset, config, split, text_field, assistant_only, loaded)
    rows = []
    for number, row in enumerate(source if max_rows is None else source.take(max_rows), start=1):
        try:
            ids, counted = _tokens(row, loaded.tokenizer, text_field=text_field, assistant_only=assistant_only)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"row {number} cannot be tokenised: {str(error).splitlines()[0]}") from error
        rows.append((ids, [False, *counted[1:]]))  # the first token is never predicted
    counting = [(ids, counted) for ids, counted in rows if any(counted[:max_length])]
    kept = [(ids[:max_length], counted[:max_length]) for ids, counted in counting]
    if not kept:
        raise UsageError("no row has a token to count: rows need at least two tokens, and something that is predicted")
    begun = time.perf_counter()
    own, base = 0.0, 0.0
    # Rows of similar length together, the longest first: running out of memory shows at once.
    ordered = sorted(kept, key=lambda row: -len(row[0]))
    for start in range(0, len(ordered), batch_size):
        placed = loaded.place(_padded(ordered[start : start + batch_size], loaded.tokenizer.pad_token_id or 0))
        labels = placed.pop("labels")
        own += _nll(loaded, placed, labels)
        if compare:
            with loaded.without_adapter():
                base += _nll(loaded, placed, labels)
    tokens = sum(sum(counted) for _, counted in kept)
    what = "every token but the first" if all(all(counted[1:]) for _, counted in kept) else "completions"
    sent = loaded.mover.report.to_dict()["batches"]
    return {
        "dataset": dataset,
        "split": split,
        "counted": "tokens of the assistant" if assistant_only else what,
        "max_length": max_length,
        "rows": len(kept),
        "rows_without_counted_tokens": len(rows) - len(kept),
        "rows_cut": sum(len(ids) > max_length for ids, _ in counting),
        "tokens": tokens,
        **_score(own, tokens),
        "without_adapter": _score(base, tokens) if compare else None,
        "seconds": round(time.perf_counter() - begun, 3),
        "batches": {name: sent[name] for name in ("tensors", "bytes", "mismatches", "recovered")},
    }


def _learned_positions(model: Any) -> int | None:
    """The number of positions of a model that has an embedding of them; None where they are computed."""
    from torch.nn import Embedding

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    words = len(model.get_input_embeddings().weight)
    sizes = {len(module.weight) for module in model.modules() if isinstance(module, Embedding)} - {words}
    return limit if limit is not None and any(limit <= size <= limit + 2 for size in sizes) else None  # OPT has 2 more


def _score(nll: float, tokens: int) -> dict[str, float | None]:
    loss = nll / tokens
    values = {"loss": loss, "perplexity": math.exp(loss) if loss < 709 else math.inf}  # beyond a double
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _nll(loaded: Loaded, inputs: dict[str, Tensor], labels: Tensor) -> float:
    """Negative log-likelihood of all counted tokens of a batch, in nats."""
    import torch
    from torch.nn.functional import cross_entropy

    with shortage_advice("lower --batch_size or --max_length, or add --load_in_4bit"), torch.inference_mode():
        logits = loaded.model(**inputs, use_cache=False).logits
        # Row by row: a float32 copy of all logits would be the largest tensor of the whole evaluation.
        sums = [
            cross_entropy(row[:-1].float(), wanted[1:], ignore_index=_IGNORED, reduction="none").sum(
                dtype=torch.float64
            )
            for row, wanted in zip(logits, labels, strict=True)
        ]
        return float(torch.stack(sums).sum())


def _padded(batch: Sequence[tuple[list[int], list[bool]]], padding: int) -> dict[str, Tensor]:
    """int64[batch, longest] ids and mask, padded on the right, and labels, -100 where a token is not counted."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(ids) for ids, _ in batch]
    labels = [torch.where(torch.tensor(counted), ids, _IGNORED) for ids, (_, counted) in zip(rows, batch, strict=True)]
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=padding),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in rows], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
    }


def _source(
    dataset: str, config: str | None, split: str, text_field: str, assistant_only: bool, loaded: Loaded
) -> Dataset | IterableDataset:
    from hf_rocm_tune.data.formats import as_trl, check_format
    from hf_rocm_tune.data.sources import load_source

    try:
        rows = load_source(dataset, config=config, train_split=split).train
        found = check_format(
            rows,
            assistant_only_loss=assistant_only,
            dataset_text_field=text_field,
            has_chat_template=bool(loaded.tokenizer.chat_template),
            model_name=loaded.name,
            split=split,
            vocabulary=len(loaded.model.get_input_embeddings().weight),
        )
    except UsageError as error:  # the flags of this command
        message = (
            str(error).replace("--dataset_train_split", "--split").replace("--assistant_only_loss", "--assistant_only")
        )
        raise UsageError(message.partition(": name a template file")[0]) from error
    return as_trl(rows, found)


def _tokens(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, text_field: str, assistant_only: bool
) -> tuple[list[int], list[bool]]:
    """Token ids of a row, and which of them are counted."""
    from trl.data_utils import common_prefix_length, is_conversational, maybe_convert_to_chatml

    if "input_ids" in row:
        ids = [int(token) for token in row["input_ids"]]
        if "labels" in row:
            return ids, [int(label) != _IGNORED for label in row["labels"]]
        return ids, [bool(bit) for bit in row.get("completion_mask", [True] * len(ids))]
    row = maybe_convert_to_chatml(row)
    if is_conversational(row):
        tools = row.get("tools")
        template: dict[str, Any] = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        template |= row.get("chat_template_kwargs") or {}
        if "prompt" not in row:
            return _rendered(tokenizer, row["messages"], template, assistant_only=assistant_only)
        begun, _ = _rendered(tokenizer, row["prompt"], {**template, "add_generation_prompt": True})
        ids, counted = _rendered(tokenizer, row["prompt"] + row["completion"], template, assistant_only=assistant_only)
    else:
        text = row["prompt"] + row["completion"] if "prompt" in row else row[text_field]
        end = tokenizer.eos_token
        text = text if not end or text.endswith(end) else text + end
        ids = [int(token) for token in tokenizer(text)["input_ids"]]
        counted = [True] * len(ids)
        begun = [int(token) for token in tokenizer(row["prompt"])["input_ids"]] if "prompt" in row else []
    start = common_prefix_length(begun, ids)  # from where prompt and whole differ, as TRL does
    return ids, [False] * start + counted[start:]


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Any, template: dict[str, Any], *, assistant_only: bool = False
) -> tuple[list[int], list[bool]]:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=assistant_only, **template
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
    ids = [int(token) for token in rendered["input_ids"]]
    if not assistant_only:
        return ids, [True] * len(ids)
    mask = [bool(bit) for bit in rendered["assistant_masks"]]
    if not any(mask):
        raise ValueError("--assistant_only: the chat template marks no assistant tokens ({% generation %})")
    return ids, mask


# ---- the harness ----------------------------------------------------------------------------------------------------


def _find_tasks(tasks: Sequence[str], include_path: Path | None) -> Any:
    """The harness's own `TaskManager`, before a model is loaded."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--tasks needs lm-evaluation-harness, which is not installed: pip install 'hf-rocm-tune[eval]'"
        )
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(include_path) if include_path else None)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise UsageError(
            f"--tasks: lm-evaluation-harness has no task {unknown[0]!r}: `lm-eval ls tasks` lists them, and "
            "--include_path names a folder with more"
        )
    return manager


def _run_tasks(loaded: Loaded, tasks: Sequence[str], manager: Any, wanted: argparse.Namespace) -> dict[str, Any]:
    """The harness's own results as plain values, of the base under ``without_adapter``."""
    import lm_eval
    from datasets.exceptions import DatasetsError
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns about a model that is loaded
    wrapped = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=wanted.batch_size)
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 0)

    def evaluate() -> dict[str, Any]:
        try:
            found = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=wanted.num_fewshot,
                limit=wanted.limit,
                apply_chat_template=wanted.apply_chat_template,
                log_samples=False,
                **seeds,
            )
        except (OSError, DatasetsError) as error:  # ConnectionError is an OSError
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"the data of the task cannot be loaded: {first}; check the network and HF_HUB_OFFLINE"
            ) from error
        return {name: found[name] for name in _HARNESS_RESULTS if name in found}

    result = evaluate()
    if wanted.compare:
        with loaded.without_adapter():
            result["without_adapter"] = evaluate()
    return {**result, "inputs": "not verified: the harness puts them on the device itself"}
