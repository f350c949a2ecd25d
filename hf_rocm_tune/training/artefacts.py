"""Which names in an output directory are ours or the Trainer's: what shows a run, and what overwriting may delete.

A name that is in neither list is the user's and is never touched. ``README.md`` is not deleted: it may be anybody's,
and the result's own card replaces it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hf_rocm_tune.training.rotation import CHECKPOINT_NAME

_WEIGHTS = re.compile(
    r"^(adapter_model\.(safetensors|bin)"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json)$"
)
_EVIDENCE = frozenset(["adapter_config.json", "trainer_state.json", "training_args.bin", "integrity.json"])
_BESIDE = frozenset(
    [
        "run.json",
        "transfer_report.json",
        "training_log.json",
        "loss.png",
        "survival.jsonl",
        "stall_report.txt",
        "stall_report.json",
        "_crashes.json",
        "_step_down.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "preprocessor_config.json",
        "processor_config.json",
        "train_results.json",
        "eval_results.json",
        "all_results.json",
    ]
)
_DAMAGED = re.compile(r"^damaged-checkpoint-\d+(\.\d+)?$")


def evidence_of_a_run(directory: Path) -> list[str]:
    """Names that only a training run leaves, sorted; empty if there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name in _EVIDENCE or _WEIGHTS.match(path.name) or (CHECKPOINT_NAME.match(path.name) and path.is_dir())
    )


def to_be_overwritten(directory: Path) -> list[Path]:
    """What ``--overwrite_output_dir`` deletes. The manifest comes first: what is half deleted must not look finished.

    The names of tokenizer and configuration files are common ones, so they count only beside evidence of a run.
    """
    if not evidence_of_a_run(directory) and not (directory / "run.json").exists():
        return []
    found = [path for path in directory.iterdir() if _is_ours(path)]
    return sorted(found, key=lambda path: (path.name != "integrity.json", path.name))


def _is_ours(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return bool(CHECKPOINT_NAME.match(path.name) or _DAMAGED.match(path.name)) or path.name == "_out_of_memory"
    return path.name in _EVIDENCE or path.name in _BESIDE or bool(_WEIGHTS.match(path.name))


def remove(path: Path) -> None:
    """Delete a file, a link (not what it points to), or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_checkpoint(directory: Path) -> bool:
    """Whether there is something to resume from: a trainer state, and weights in a form that the Trainer reads."""
    if not (directory / "trainer_state.json").is_file():
        return False
    for path in directory.iterdir():
        if _WEIGHTS.match(path.name) or path.name.startswith(("pytorch_model_fsdp", "global_step")):
            return True
        if path.is_dir() and any(_WEIGHTS.match(inner.name) for inner in path.iterdir()):
            return True
    return False
