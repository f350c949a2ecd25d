"""Rows of a dataset as token ids, and which of them are counted: as TRL's SFT trainer prepares rows for training.

Read in TRL 1.16, ``SFTTrainer._prepare_dataset``: text and completions end with the end token; conversations go through
the chat template; of a prompt with its completion only the completion is counted; truncation keeps the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.data.formats import check_format
from hf_rocm_tune.data.sources import load_source
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.publish.evaluate_settings import PerplexitySettings


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row: its token ids, which of them are predicted and counted (never the first), and whether it was cut."""

    ids: list[int]
    counted: list[bool]
    cut: bool

    @property
    def count(self) -> int:
        """Tokens that are counted."""
        return sum(self.counted)


def token_rows(settings: PerplexitySettings, tokenizer: PreTrainedTokenizerBase, model_name: str) -> list[TokenRow]:
    """Load and tokenise a split.

    Raises:
        UsageError: the dataset cannot be read, or its rows do not fit.
    """
    split = split_of(settings)
    try:
        rows = load_source(settings.dataset, config=settings.config, train_split=split).train
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
        split=split,
    )
    if found.conversational and not tokenizer.chat_template:
        raise UsageError(f"the rows are conversations, but the tokenizer of {model_name} has no chat template")
    return list(_tokenised(iter(rows), settings, tokenizer))


def split_of(settings: PerplexitySettings) -> str:
    """The split that is measured: a single file has one, which `datasets` calls "train"."""
    return "train" if Path(settings.dataset).expanduser().is_file() else settings.split


def _tokenised(
    rows: Iterator[dict[str, Any]], settings: PerplexitySettings, tokenizer: PreTrainedTokenizerBase
) -> Iterator[TokenRow]:
    for number, row in enumerate(rows, start=1):
        try:
            ids, counted = _tokens(row, settings, tokenizer)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"row {number} cannot be tokenised: {str(error).splitlines()[0]}") from error
        cut = len(ids) > settings.max_length
        ids, counted = ids[: settings.max_length], counted[: settings.max_length]
        yield TokenRow(ids=ids, counted=[False, *counted[1:]] if counted else [], cut=cut)


def _tokens(
    row: dict[str, Any], settings: PerplexitySettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    from trl.data_utils import is_conversational, maybe_convert_to_chatml

    if "input_ids" in row:
        return _ready(row)
    row = maybe_convert_to_chatml(row)
    tools = row.get("tools")
    template: dict[str, Any] = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    template |= row.get("chat_template_kwargs") or {}
    if "prompt" in row and is_conversational(row):
        begun = _rendered(tokenizer, row["prompt"], {**template, "add_generation_prompt": True}, settings)[0]
        return _completion(begun, *_rendered(tokenizer, row["prompt"] + row["completion"], template, settings))
    if "prompt" in row:
        ids = _plain(tokenizer, _ended(row["prompt"] + row["completion"], tokenizer))
        return _completion(_plain(tokenizer, row["prompt"]), ids, [True] * len(ids))
    if is_conversational(row):
        return _rendered(tokenizer, row["messages"], template, settings)
    ids = _plain(tokenizer, _ended(row[settings.text_field], tokenizer))
    return ids, [True] * len(ids)


def _ready(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    ids = [int(token) for token in row["input_ids"]]
    if "labels" in row:
        return ids, [int(label) != -100 for label in row["labels"]]
    return ids, [bool(bit) for bit in row.get("completion_mask", [True] * len(ids))]


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


def _completion(begun: list[int], ids: list[int], counted: list[bool]) -> tuple[list[int], list[bool]]:
    """Counts from where prompt and whole part ways, as TRL does."""
    same = next((at for at, (one, other) in enumerate(zip(begun, ids, strict=False)) if one != other), None)
    start = min(len(begun), len(ids)) if same is None else same
    return ids, [False] * start + counted[start:]


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text)["input_ids"]]


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    end = tokenizer.eos_token
    return text if not end or text.endswith(end) else text + end


def batches(rows: list[TokenRow], size: int) -> Iterator[list[TokenRow]]:
    """Rows of like length together, the longest first: whatever does not fit in memory shows at once."""
    ordered = iter(sorted((row for row in rows if row.count), key=lambda row: -len(row.ids)))
    while batch := list(islice(ordered, size)):
        yield batch
