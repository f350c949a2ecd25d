"""Labels where TRL cannot tell by itself what counts in the loss: the assistant's turns, and text without thinking.

For chat templates without ``{% generation %}`` marks, and for messages that say themselves whether they are in the loss
(`formats.MARKS`): the text of a conversation up to an assistant's turn, with the
generation prompt, and the text with that turn must both be beginnings of the whole text. What lies between them is what
the model has to write, with its end-of-turn token. A row for which this does not hold is refused, not guessed.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.data.formats import MARKS, MASKED
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.data.formats import Rows

_FIX = "train on all tokens without --assistant_only_loss, or give a template with marks by --chat_template_path"


def template_is_marked(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether TRL can mask by the template: it has marks, or is one of those for which TRL has a marked copy."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        get_training_chat_template(tokenizer)
    except ValueError:
        return False
    return True


def with_labels(dataset: Rows, tokenizer: PreTrainedTokenizerBase, split: str, *, turns_only: bool = True) -> Rows:
    """Conversations as ``input_ids`` and ``labels``.

    Args:
        dataset: rows with ``messages``, or with ``prompt`` and ``completion`` of messages, in TRL's format.
        tokenizer: a fast one, with its chat template.
        split: for messages.
        turns_only: only the assistant's turns are in the loss, else all tokens; marks of messages (`MARKS`) come first.

    Raises:
        UsageError: a message cannot be told from the rest of its conversation; it names the row.
    """
    if not tokenizer.is_fast:
        raise UsageError(f"--assistant_only_loss needs marks in the chat template or a fast tokenizer: {_FIX}")
    arguments = {"tokenizer": tokenizer, "split": split, "turns_only": turns_only}
    columns = dataset.column_names or [*next(iter(dataset))]
    return dataset.map(_labelled, fn_kwargs=arguments, with_indices=True, remove_columns=columns)


def marked_as_learned(message: Mapping[str, Any]) -> bool | None:
    """Whether a message says that it is in the loss; None: it does not say."""
    marks = [bool(message[mark]) for mark in MARKS if message.get(mark) is not None]
    return all(marks) if marks else None


def _labelled(
    row: dict[str, Any], index: int, *, tokenizer: PreTrainedTokenizerBase, split: str, turns_only: bool
) -> dict[str, Any]:
    tools = row.get("tools")
    options = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }

    def text(turns: list[dict[str, Any]], *, prompt: bool = False) -> str:
        shown: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt, **options)
        return shown

    def beginning(turn: int) -> str:
        """What stands before a message: for an answer with the generation prompt."""
        answers = messages[turn]["role"] == "assistant"
        if turn:
            return text(messages[:turn], prompt=answers)
        if not answers:
            return ""
        # many templates cannot render a conversation of no messages: find the generation prompt in the first answer
        asked = [{"role": "user", "content": "q"}]
        opening = text(asked, prompt=True).removeprefix(text(asked))
        return text(messages[:1]).partition(opening)[0] + opening

    begun = row.get("prompt") or []
    messages = row["messages"] if "messages" in row else begun + row["completion"]
    whole = text(messages)
    encoded = tokenizer(whole, add_special_tokens=False)
    ids = encoded["input_ids"]
    labels = [MASKED] * len(ids) if turns_only else list(ids)
    if begun and not turns_only:
        first = encoded.char_to_token(len(beginning(len(begun)))) or 0
        labels[:first] = [MASKED] * first
    for turn, message in enumerate(messages):
        by_default = turn >= len(begun) and (message["role"] == "assistant" or not turns_only)
        learned = marked_as_learned(message)
        if learned is None or (learned and turn < len(begun)):  # a prompt is never learned
            learned = by_default
        if learned == by_default and not (turns_only and learned):
            continue
        before, after = beginning(turn), text(messages[: turn + 1])
        if not (after.startswith(before) and whole.startswith(after) and len(after) > len(before)):
            raise UsageError(
                f"row {index + 1} of the '{split}' split: message {turn + 1} does not stand in the whole conversation "
                f"as the model would write it, so that its tokens are not known; {_FIX}"
            )
        first, last = encoded.char_to_token(len(before)), encoded.char_to_token(len(after) - 1)
        if first is None or last is None:
            raise UsageError(
                f"row {index + 1} of the '{split}' split: the tokenizer leaves out part of message {turn + 1}; {_FIX}"
            )
        labels[first : last + 1] = ids[first : last + 1] if learned else [MASKED] * (last + 1 - first)
    return {"input_ids": ids, "labels": labels}


# ---- thinking that is left out of the loss --------------------------------------------------------------------------

_BEGIN, _END = "<think>", "</think>"


def without_thinking(dataset: Rows, tokenizer: PreTrainedTokenizerBase, split: str) -> tuple[Rows, int]:
    """Masks the labels from ``<think>`` to ``</think>``; returns the rows with other labels, and how many have none."""
    from datasets import Dataset

    masked = dataset.map(thinking_masked, fn_kwargs={"tokenizer": tokenizer})
    left = masked.filter(lambda row: any(label != MASKED for label in row["labels"]))
    if not isinstance(dataset, Dataset):
        return left, 0
    if not len(left):
        raise UsageError(
            f"--mask_thinking masks all labels of the '{split}' rows: within --max_length no answer has text after "
            f"{_END}"
        )
    return left, len(dataset) - len(left)


def thinking_masked(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The labels of one row, given with its ``input_ids``, without those of its thinking."""
    ids, labels, start = row["input_ids"], list(row["labels"]), 0
    for length in row.get("seq_lengths") or [len(ids)]:
        # Pieces of ASCII stand for themselves in the vocabularies of byte-level BPE and of SentencePiece.
        pieces = tokenizer.convert_ids_to_tokens(ids[start : start + length])
        ends = list(accumulate(map(len, pieces)))
        text, at = "".join(pieces), 0
        while (at := text.find(_BEGIN, at)) >= 0:
            first = bisect_right(ends, at)
            if labels[start + first] == MASKED:
                at += len(_BEGIN)
                continue
            end = text.find(_END, at)
            at = len(text) if end < 0 else end + len(_END)
            for token in range(start + first, start + bisect_left(ends, at) + 1):
                labels[min(token, start + length - 1)] = MASKED
        start += length
    return {"labels": labels}
