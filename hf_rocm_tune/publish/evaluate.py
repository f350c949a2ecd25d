"""``hf-rocm-tune eval``: perplexity on a split, and tasks of lm-evaluation-harness; a table, and one line of JSON.

Perplexity is exp of the mean negative log-likelihood of the counted tokens. A token counts once, whatever the length of
its row and the size of the batch; a mean of batch means, as trainers log it as ``eval_loss``, weighs tokens in short
rows more. Logits come in the model's dtype; the log-softmax is taken in float32 and the sum in float64. Batches pass
the mover as in training. Base and adapter see the same batches. Rows become token ids as TRL's SFT trainer prepares
them (read in TRL 1.16, ``SFTTrainer._prepare_dataset``): text and completions end with the end token; conversations go
through the chat template; of a prompt with its completion only the completion is counted; truncation keeps the
beginning.

The harness is a package of its own (the extra ``eval``, tried with lm-eval 0.4.13). It is handed the loaded model; what
it asks the model it puts on the device itself, which is not verified, and the result says so.

No torch is imported before the flags have been read: a wrong flag is refused at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import OutOfMemoryError, UsageError, device_shortage
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.generate_command import LoadSettings, add_model_flags

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.publish.generate import Loaded

_VERSIONS = ("hf-rocm-tune", "torch", "transformers", "peft", "bitsandbytes", "lm-eval")
_HARNESS_RESULTS = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")
_IGNORED = -100


# ---- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings:
    """Perplexity on a split: the flags of `add_flags`. A single file has one split, which `datasets` calls "train".

    Raises:
        UsageError: a value out of its bounds, naming it.
    """

    dataset: str
    config: str | None = None
    split: str = "test"
    text_field: str = "text"
    max_length: int = 1024
    max_rows: int | None = None
    batch_size: int = 4
    assistant_only: bool = False

    def __post_init__(self) -> None:
        _at_least(self.max_length, 2, "--max_length")
        _at_least(self.batch_size, 1, "--batch_size")
        _at_least(self.max_rows, 1, "--max_rows")
        if Path(self.dataset).expanduser().is_file():
            object.__setattr__(self, "split", "train")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add_model_flags(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file too")
    parser.add_argument("--batch_size", type=int, default=4, help="rows or requests at a time (default: 4)")
    rows = parser.add_argument_group("perplexity")
    rows.add_argument("--dataset_name", help="a file, a folder or a Hub id, in any format that sft takes")
    rows.add_argument("--dataset_config", help="of a dataset that has several")
    rows.add_argument("--split", default="test", help="of the dataset (default: test; a single file has one)")
    rows.add_argument("--dataset_text_field", default="text", help="column of plain text (default: text)")
    rows.add_argument("--max_length", type=int, default=1024, help="tokens of a row (default: 1024)")
    rows.add_argument("--max_rows", type=int, help="the first so many rows only")
    rows.add_argument("--assistant_only", action="store_true", help="count only what the assistant says")
    tasks = parser.add_argument_group("lm-evaluation-harness")
    tasks.add_argument("--tasks", help="names of tasks, separated by commas")
    tasks.add_argument("--limit", type=int, help="documents of each task")
    tasks.add_argument("--num_fewshot", type=int, help="examples before each question (default: as the task says)")
    tasks.add_argument("--include_path", type=Path, help="a folder with further task files")
    tasks.add_argument("--apply_chat_template", action="store_true", help="ask through the chat template")


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    """Measure as the flags say."""
    settings, rows = LoadSettings.of(wanted), _perplexity_settings(wanted)
    tasks = _checked_tasks(wanted)
    if rows is None and not tasks:
        raise UsageError("nothing to evaluate: give --dataset_name for perplexity, --tasks for benchmarks, or both")
    if wanted.json is not None and (wanted.json.is_dir() or not wanted.json.absolute().parent.is_dir()):
        raise UsageError(f"--json {wanted.json} is not a file in a directory that exists; choose another")
    prepare()
    from hf_rocm_tune.publish.generate import loaded_model

    manager = _find_tasks(tasks, wanted.include_path) if tasks else None
    with loaded_model(settings, say, compare=wanted.compare) as loaded:
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
        if rows is not None:
            result["perplexity"] = perplexity(loaded, rows, compare=wanted.compare)
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


def _perplexity_settings(wanted: argparse.Namespace) -> PerplexitySettings | None:
    if not wanted.dataset_name:
        return None
    return PerplexitySettings(
        dataset=wanted.dataset_name,
        config=wanted.dataset_config,
        split=wanted.split,
        text_field=wanted.dataset_text_field,
        max_length=wanted.max_length,
        max_rows=wanted.max_rows,
        batch_size=wanted.batch_size,
        assistant_only=wanted.assistant_only,
    )


def _checked_tasks(wanted: argparse.Namespace) -> list[str]:
    """Names of ``--tasks``, and the bounds of its flags."""
    if wanted.tasks is None:
        return []
    tasks = [name.strip() for name in wanted.tasks.split(",")]
    if not all(tasks):
        raise UsageError("--tasks: give names, separated by commas")
    _at_least(wanted.batch_size, 1, "--batch_size")
    _at_least(wanted.limit, 1, "--limit")
    _at_least(wanted.num_fewshot, 0, "--num_fewshot")
    if wanted.include_path is not None and not wanted.include_path.is_dir():
        raise UsageError(f"--include_path {wanted.include_path} is no folder: give one that holds task files (.yaml)")
    return tasks


def _at_least(value: int | None, least: int, flag: str) -> None:
    if value is not None and value < least:
        raise UsageError(f"{flag} must be {least} or more, got {value}")


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


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row: its token ids, which of them are predicted and counted (never the first), and whether it was cut."""

    ids: list[int]
    counted: list[bool]
    cut: bool


def perplexity(loaded: Loaded, settings: PerplexitySettings, *, compare: bool) -> dict[str, Any]:
    """Measure, on the model and where wanted on its base too.

    Returns:
        The result as plain values: rows, tokens, ``loss`` (nats a token) and ``perplexity``, of the base under
        ``without_adapter``; a value that is not finite is None.

    Raises:
        UsageError: the rows cannot be read, or none has a token to count.
        OutOfMemoryError: a batch does not fit.
        CorruptionError: a batch could not be brought over right.
    """
    rows = list(_rows(settings, loaded.tokenizer, loaded.name))
    kept = [row for row in rows if any(row.counted)]
    if not kept:
        raise UsageError("no row has a token to count: rows need at least two tokens, and something that is predicted")
    begun = time.perf_counter()
    mine, base = 0.0, 0.0
    # Rows of like length together, the longest first: whatever does not fit in memory shows at once.
    ordered = sorted(kept, key=lambda row: -len(row.ids))
    for start in range(0, len(ordered), settings.batch_size):
        batch = _padded(ordered[start : start + settings.batch_size], loaded.tokenizer.pad_token_id or 0)
        placed = loaded.place(batch)
        labels = placed.pop("labels")
        mine += _nll(loaded, placed, labels)
        if compare:
            with loaded.without_adapter():
                base += _nll(loaded, placed, labels)
    tokens = sum(sum(row.counted) for row in kept)
    what = "every token but the first" if all(all(row.counted[1:]) for row in kept) else "completions"
    sent = loaded.mover.report.to_dict()["batches"]
    return {
        "dataset": settings.dataset,
        "split": settings.split,
        "counted": "what the assistant says" if settings.assistant_only else what,
        "max_length": settings.max_length,
        "rows": len(kept),
        "rows_without_counted_tokens": len(rows) - len(kept),
        "rows_cut": sum(row.cut for row in kept),
        "tokens": tokens,
        **_score(mine, tokens),
        "without_adapter": _score(base, tokens) if compare else None,
        "seconds": round(time.perf_counter() - begun, 3),
        "batches": {name: sent[name] for name in ("tensors", "bytes", "mismatches", "recovered")},
    }


def _score(nll: float, tokens: int) -> dict[str, float | None]:
    loss = nll / tokens
    values = {"loss": loss, "perplexity": math.exp(loss) if loss < 709 else math.inf}  # beyond a double
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _nll(loaded: Loaded, inputs: dict[str, Tensor], labels: Tensor) -> float:
    """Negative log-likelihood of all counted tokens of a batch, in nats."""
    import torch
    from torch.nn.functional import cross_entropy

    try:
        with torch.inference_mode():
            logits = loaded.model(**inputs, use_cache=False).logits
            # Row by row: a float32 copy of all logits would be the largest tensor of the whole evaluation.
            sums = [
                cross_entropy(row[:-1].float(), wanted[1:], ignore_index=_IGNORED, reduction="none").sum(
                    dtype=torch.float64
                )
                for row, wanted in zip(logits, labels, strict=True)
            ]
            return float(torch.stack(sums).sum())
    except RuntimeError as error:
        if (said := device_shortage(error)) is None:
            raise
        raise OutOfMemoryError(f"{said}: lower --batch_size or --max_length, or add --load_in_4bit") from error


def _padded(batch: Sequence[_Row], padding: int) -> dict[str, Tensor]:
    """int64[batch, longest] ids and mask, padded on the right, and labels, -100 where a token is not counted."""
    import torch

    longest = max(len(row.ids) for row in batch)
    ids = torch.full((len(batch), longest), padding)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, _IGNORED)
    for at, row in enumerate(batch):
        size = len(row.ids)
        ids[at, :size] = torch.tensor(row.ids)
        mask[at, :size] = 1
        labels[at, :size] = torch.where(torch.tensor(row.counted), ids[at, :size], _IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _rows(settings: PerplexitySettings, tokenizer: PreTrainedTokenizerBase, model_name: str) -> Iterator[_Row]:
    """Load and tokenise a split."""
    from hf_rocm_tune.data.formats import check_format
    from hf_rocm_tune.data.sources import load_source

    try:
        rows = load_source(settings.dataset, config=settings.config, train_split=settings.split).train
    except UsageError as error:
        raise UsageError(str(error).replace("--dataset_train_split", "--split")) from error
    if settings.max_rows is not None:
        rows = rows.take(settings.max_rows)
    found = check_format(
        rows,
        assistant_only_loss=settings.assistant_only,
        dataset_text_field=settings.text_field,
        has_chat_template=True,  # looked at below, where the flags of this command are known
        model_name=model_name,
        split=settings.split,
    )
    if found.conversational and not tokenizer.chat_template:
        raise UsageError(f"the rows are conversations, but the tokenizer of {model_name} has no chat template")
    for number, row in enumerate(rows, start=1):
        try:
            ids, counted = _tokens(row, settings, tokenizer)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"row {number} cannot be tokenised: {str(error).splitlines()[0]}") from error
        cut = len(ids) > settings.max_length
        ids, counted = ids[: settings.max_length], counted[: settings.max_length]
        yield _Row(ids=ids, counted=[False, *counted[1:]] if counted else [], cut=cut)


def _tokens(
    row: dict[str, Any], settings: PerplexitySettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
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
            return _rendered(tokenizer, row["messages"], template, settings)
        begun, _ = _rendered(tokenizer, row["prompt"], {**template, "add_generation_prompt": True}, settings)
        ids, counted = _rendered(tokenizer, row["prompt"] + row["completion"], template, settings)
    else:
        text = row["prompt"] + row["completion"] if "prompt" in row else row[settings.text_field]
        end = tokenizer.eos_token
        text = text if not end or text.endswith(end) else text + end
        ids = [int(token) for token in tokenizer(text)["input_ids"]]
        counted = [True] * len(ids)
        begun = [int(token) for token in tokenizer(row["prompt"])["input_ids"]] if "prompt" in row else []
    start = common_prefix_length(begun, ids)  # from where prompt and whole differ, as TRL does
    return ids, [False] * start + counted[start:]


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Any, template: dict[str, Any], settings: PerplexitySettings
) -> tuple[list[int], list[bool]]:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=settings.assistant_only, **template
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
    ids = [int(token) for token in rendered["input_ids"]]
    if not settings.assistant_only or template.get("add_generation_prompt"):
        return ids, [True] * len(ids)
    mask = [bool(bit) for bit in rendered["assistant_masks"]]
    if not any(mask):
        raise ValueError("--assistant_only: the chat template marks no assistant tokens ({% generation %})")
    return ids, mask


# ---- the harness ----------------------------------------------------------------------------------------------------


def _find_tasks(tasks: Sequence[str], include_path: Path | None) -> Any:
    """The harness's own `TaskManager`, before a model is loaded.

    Raises:
        UsageError: the package is not installed, or a task is unknown.
    """
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
    """The harness's own results as plain values, of the base under ``without_adapter``.

    Raises:
        UsageError: the data of a task cannot be had.
    """
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
                f"the data of the task cannot be had: {first}; check the network and HF_HUB_OFFLINE"
            ) from error
        return {name: found[name] for name in _HARNESS_RESULTS if name in found}

    result = evaluate()
    if wanted.compare:
        with loaded.without_adapter():
            result["without_adapter"] = evaluate()
    return {**result, "inputs": "not verified: the harness puts them on the device itself"}
