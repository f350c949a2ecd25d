"""What ``eval`` is asked to do. No torch here: a wrong flag is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings:
    """Perplexity on a split.

    Args:
        dataset: a file, a folder, or a Hub id.
        config: of a dataset that has several.
        split: of the dataset; a single file has only one.
        text_field: column of plain text.
        max_length: tokens of a row; what is longer is cut at its end.
        max_rows: the first so many rows only; None for all.
        batch_size: rows at a time.
        assistant_only: count only what the assistant says, as the chat template marks it.

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
        if self.max_rows is not None:
            _at_least(self.max_rows, 1, "--max_rows")


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """Tasks of lm-evaluation-harness.

    Args:
        tasks: names.
        limit: documents of each task; None for all.
        num_fewshot: examples before each question; None is what the task says.
        include_path: a folder with further task files.
        batch_size: requests at a time.
        chat_template: ask through the tokenizer's chat template.
        seed: of whatever a task draws.

    Raises:
        UsageError: a value out of its bounds, naming it.
    """

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    batch_size: int = 4
    chat_template: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks):
            raise UsageError("--tasks: give names, separated by commas")
        _at_least(self.batch_size, 1, "--batch_size")
        if self.limit is not None:
            _at_least(self.limit, 1, "--limit")
        if self.num_fewshot is not None:
            _at_least(self.num_fewshot, 0, "--num_fewshot")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UsageError(f"--include_path {self.include_path} is no folder: give one that holds task files (.yaml)")


def _at_least(value: int, least: int, flag: str) -> None:
    if value < least:
        raise UsageError(f"{flag} must be {least} or more, got {value}")
