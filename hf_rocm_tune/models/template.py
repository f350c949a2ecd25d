"""The chat template that ``--chat_template_path`` names, looked at before a model is loaded.

A path that ends in ``.jinja`` or ``.j2`` is a file; anything else is a model (directory or Hub id) whose tokenizer has
the template. That is TRL's reading (``SFTTrainer``, TRL 1.16).
"""

from __future__ import annotations

from pathlib import Path

from hf_rocm_tune.errors import UsageError

FLAG = "--chat_template_path"


def check_chat_template(path: str, *, trust_remote_code: bool = False) -> None:
    """Checks that there is a template. Whether it takes the rows shows when they are rendered.

    Raises:
        UsageError: there is no such file or model, or the model has no chat template.
    """
    if path.endswith((".jinja", ".j2")):
        _check_file(Path(path))
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{FLAG} {path}: no tokenizer can be loaded from there: give a file that ends in .jinja, or a model whose "
            "template to take"
        ) from error
    if not tokenizer.chat_template:
        raise UsageError(f"{FLAG} {path}: the tokenizer there has no chat template either: give a .jinja file")


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise UsageError(f"{FLAG}: {file} does not exist: give a file that ends in .jinja, or a model")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{FLAG}: {file} cannot be read as text ({error}): give a Jinja template") from error
    if not text.strip():
        raise UsageError(f"{FLAG}: {file} is empty: give a Jinja template")
