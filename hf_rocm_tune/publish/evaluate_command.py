"""``hf-rocm-tune eval``: a table, and as the last line one JSON object."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.evaluate_settings import HarnessSettings, PerplexitySettings
from hf_rocm_tune.publish.generate_command import require_adapter, say
from hf_rocm_tune.publish.generate_flags import add_model_flags, load_settings

if TYPE_CHECKING:
    from hf_rocm_tune.publish.generate_model import Loaded

SCHEMA = 1
_VERSIONS = ("hf-rocm-tune", "torch", "transformers", "peft", "bitsandbytes", "lm-eval")


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
    settings, rows, tasks = load_settings(wanted), _rows(wanted), _tasks(wanted)
    if rows is None and tasks is None:
        raise UsageError("nothing to evaluate: give --dataset_name for perplexity, --tasks for benchmarks, or both")
    if wanted.json is not None and (wanted.json.is_dir() or not wanted.json.absolute().parent.is_dir()):
        raise UsageError(f"--json {wanted.json} is not a file in a directory that exists; choose another")
    prepare()
    from hf_rocm_tune.publish.evaluate import perplexity
    from hf_rocm_tune.publish.evaluate_harness import find_tasks, run_tasks
    from hf_rocm_tune.publish.generate_model import loaded_model

    manager = find_tasks(tasks) if tasks is not None else None
    with loaded_model(settings, say) as loaded:
        if wanted.compare:
            require_adapter(loaded)
        result = _about(loaded, wanted)
        if rows is not None:
            result["perplexity"] = perplexity(loaded, rows, compare=wanted.compare)
            print("\n".join(_table(result["perplexity"])), flush=True)
        if tasks is not None:
            result["tasks"] = run_tasks(loaded, tasks, manager, compare=wanted.compare)
            print("\n".join(_task_table(result["tasks"])), flush=True)
    text = json.dumps(result)
    print(text)
    if wanted.json is not None:
        try:
            wanted.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {wanted.json} cannot be written: {error.strerror}; choose another") from error
    return 0


def _rows(wanted: argparse.Namespace) -> PerplexitySettings | None:
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


def _tasks(wanted: argparse.Namespace) -> HarnessSettings | None:
    if wanted.tasks is None:
        return None
    return HarnessSettings(
        tasks=tuple(name.strip() for name in wanted.tasks.split(",")),
        limit=wanted.limit,
        num_fewshot=wanted.num_fewshot,
        include_path=wanted.include_path,
        batch_size=wanted.batch_size,
        chat_template=wanted.apply_chat_template,
    )


def _about(loaded: Loaded, wanted: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": loaded.name,
        "base": loaded.base if loaded.adapter else None,
        "load_in_4bit": wanted.load_in_4bit,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.mover.device),
        "verified": loaded.verified,
        "fault_injection": loaded.mover.fault_injection(),
        "versions": {name: _version(name) for name in _VERSIONS},
    }


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
        loss, value = (_number(score[key]) for key in ("loss", "perplexity"))
        lines.append(f"{name:<16}{loss:>10}{value:>14}")
    return lines


def _number(value: float | None) -> str:
    """Four significant decimals; what is not finite is said."""
    return "not finite" if value is None else f"{value:.4f}"


def _task_table(found: Mapping[str, Any]) -> list[str]:
    lines = []
    base = found.get("without_adapter", {}).get("results", {})
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            if not isinstance(value, float) or "stderr" in metric:
                continue
            beside = f"   base {base[task][metric]:.4f}" if task in base else ""
            lines.append(f"{task:<32}{metric:<24}{value:>10.4f}{beside}")
    return lines
