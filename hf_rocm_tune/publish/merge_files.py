"""What stands beside the weights of a merged model: configuration, tokenizer, generation settings, a short card.

The configuration is the base's, changed only where the weights ask for it, so that nothing that a newer transformers
would add or drop changes what the base was. Tokenizer files are the adapter's where it has a tokenizer (training may
have added tokens or a chat template), else the base's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_rocm_tune.models.loading import SINGLE
from hf_rocm_tune.publish.merge_writer import INDEX_FILE

_TOKENIZER = re.compile(
    r"^(tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|.*\.tiktoken"
    r"|chat_template.*)$"
)
_BESIDE = re.compile(
    r"^(generation_config\.json|.*processor_config\.json|processor.*\.json|.*\.py|(LICENSE|NOTICE|USE_POLICY).*)$"
)
_MARKS = ("tokenizer.json", "tokenizer_config.json")


def write_beside(directory: Path, *, base: Path, adapter: Path, config: dict[str, Any], card: str) -> None:
    """Write ``config.json`` and the card, and copy what belongs to a model that transformers loads.

    Raises:
        OSError: as the operating system gave it.
    """
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(card, encoding="utf-8")
    has_own = any((adapter / name).is_file() for name in _MARKS)
    _copy(_named(base, _BESIDE), directory)
    _copy(_named(adapter if has_own else base, _TOKENIZER), directory)
    _copy(_named(adapter, re.compile(r"^chat_template.*$")), directory)


def merged_config(config: dict[str, Any], *, dtype: str | None, untied: bool, vocabulary: int | None) -> dict[str, Any]:
    """The base's configuration with what the merge changed.

    Args:
        config: content of the base's ``config.json``.
        dtype: torch's name of the dtype of the weights, where it was asked for.
        untied: input and output embeddings differ now.
        vocabulary: rows of the input embedding, where the adapter brings another number than the base has.
    """
    changed: dict[str, Any] = json.loads(json.dumps(config))
    parts = [changed, *(part for key in ("text_config", "llm_config") if isinstance(part := changed.get(key), dict))]
    for part in parts:
        if dtype is not None:
            part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part} or {"dtype": dtype})
        if untied:
            part["tie_word_embeddings"] = False
        if vocabulary is not None and "vocab_size" in part:
            part["vocab_size"] = vocabulary
    return changed


def card(*, base_id: str | None, method: str) -> str:
    """A short model card with valid metadata.

    Args:
        base_id: Hub id of the base, or None for one that is not on the Hub.
        method: by which the adapter was trained.
    """
    base = f"base_model: {base_id}\nbase_model_relation: finetune\n" if base_id else ""
    what = f"[{base_id}](https://huggingface.co/{base_id})" if base_id else "a local base model"
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base}"
        "tags:\n- hf-rocm-tune\n- merged\n---\n\n"
        f"# Merged model\n\n{what}, into which an adapter ({method}) was merged in float32 by hf-rocm-tune. Every "
        "tensor was read back from disk; `integrity.json` has each file's SHA-256 and each tensor's digest.\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")  # this directory, or its id on the Hub\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
    )


def _named(directory: Path, pattern: re.Pattern[str]) -> Iterable[Path]:
    return [path for path in sorted(directory.iterdir()) if path.is_file() and pattern.match(path.name)]


def _copy(files: Iterable[Path], directory: Path) -> None:
    for file in files:
        if file.name not in (SINGLE, INDEX_FILE):
            shutil.copyfile(file, directory / file.name)
