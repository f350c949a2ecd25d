"""Labels where TRL cannot tell by itself what counts in the loss: the assistant's turns, and text without thinking.

For chat templates without ``{% generation %}`` marks, and for messages that say themselves whether they are in the loss
(`formats.MARKS`): the text of a conversation up to an assistant's turn, with the
generation prompt, and the text with that turn must both be beginnings of the whole text. What lies between them is what
the model has to write, with its end-of-turn token. A row for which this does not hold is refused, not guessed.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_rocm_tune.data.formats import MARKS, MASKED
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.data.formats.layout import Rows

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


def has_marks(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message of a conversation says whether it is in the loss."""
    return any(marked_as_learned(message) is not None for message in messages)


def _labelled(
    row: dict[str, Any], index: int, *, tokenizer: PreTrainedTokenizerBase, split: str, turns_only: bool
) -> dict[str, Any]:
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools)
    options = {"tools": tools, **(row.get("chat_template_kwargs") or {})}

    def text(turns: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        shown: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt, **options)
        return shown

    begun = row.get("prompt") or []
    messages = row["messages"] if "messages" in row else begun + row["completion"]
    where = f"row {index + 1} of the '{split}' split"
    whole, spans = _spans(messages, text, where, turns_only=turns_only, begun=len(begun))
    encoded = tokenizer(whole, add_special_tokens=False)
    ids = encoded["input_ids"]
    labels = [MASKED] * len(ids) if turns_only else list(ids)
    if begun and not turns_only:
        answered = messages[len(begun)]["role"] == "assistant"
        prompt = text(begun, prompt=answered)
        first = encoded.char_to_token(len(prompt)) or 0
        labels[:first] = [MASKED] * first
    for span in spans:
        first = encoded.char_to_token(span.begin)
        last = encoded.char_to_token(span.end - 1)
        if first is None or last is None:
            raise UsageError(
                f"row {index + 1} of the '{split}' split: the tokenizer leaves out part of message {span.turn + 1}; "
                f"{_FIX}"
            )
        labels[first : last + 1] = ids[first : last + 1] if span.learned else [MASKED] * (last + 1 - first)
    return {"input_ids": ids, "labels": labels}


class _Span(NamedTuple):
    """A message in the text of its conversation that is in the loss, or is not, unlike the rest."""

    turn: int
    header: int  # where the message and its generation prompt begin, in characters
    begin: int  # where it begins without the generation prompt, if it is an answer
    end: int
    learned: bool


def _spans(
    messages: Sequence[Mapping[str, Any]], text: Callable[..., str], where: str, *, turns_only: bool, begun: int = 0
) -> tuple[str, list[_Span]]:
    """The text of a conversation, and the messages in it whose labels differ from the others'.

    ``text`` renders messages, with ``prompt=True`` and the generation prompt; ``where``: for messages;
    ``begun``: the first messages that are a prompt, which is never learned.

    UsageError: a message does not stand in the whole text as the model would write it.
    """

    def beginning(turn: int, *, prompt: bool) -> str:
        """What stands before a message: for an answer with the generation prompt."""
        if turn:
            return text(messages[:turn], prompt=prompt)
        if not prompt:
            return ""
        # many templates cannot render a conversation of no messages: find the generation prompt in the first answer
        question: Any = "q"
        if isinstance(messages[0].get("content"), list):
            question = [{"type": "text", "text": "q"}]
        asked = [{"role": "user", "content": question}]
        opening = text(asked, prompt=True).removeprefix(text(asked))
        return text(messages[:1]).partition(opening)[0] + opening

    whole = text(messages)
    spans = []
    for turn, message in enumerate(messages):
        answers = message["role"] == "assistant"
        by_default = turn >= begun and (answers or not turns_only)
        learned = marked_as_learned(message)
        if learned is None or (learned and turn < begun):
            learned = by_default
        if learned == by_default and not (turns_only and learned):
            continue
        before = beginning(turn, prompt=answers)
        after = text(messages[: turn + 1])
        if not (after.startswith(before) and whole.startswith(after) and len(after) > len(before)):
            raise UsageError(
                f"{where}: message {turn + 1} does not stand in the whole conversation as the model would write it, so "
                f"that its tokens are not known; {_FIX}"
            )
        spans.append(_Span(turn, len(beginning(turn, prompt=False)), len(before), len(after), learned))
    return whole, spans


def labels_among(
    ids: list[int],
    labels: list[int],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    text: Callable[..., str],
    *,
    turns_only: bool,
) -> list[int]:
    """The labels of a conversation with pictures, whose placeholders stand expanded in its token ids.

    A processor tells no place of a character. So each message is found in ``ids`` as its tokens with its header, which
    are the same in the text that has one placeholder for a picture; messages with pictures have no such tokens.

    Args:
        ids: of the whole row, placeholders expanded.
        labels: of the whole row, where everything is learned.
        messages: with a part for each picture.
        tokenizer: of the processor.
        text: as in `_spans`.
        turns_only: only the assistant's turns are in the loss.

    Raises:
        UsageError: a message is not found.
    """
    whole, spans = _spans(messages, text, "the row", turns_only=turns_only)
    encoded = tokenizer(whole, add_special_tokens=False)
    plain = encoded["input_ids"]
    new = [MASKED] * len(ids) if turns_only else list(labels)
    at = 0
    for span in spans:
        header = encoded.char_to_token(span.header)
        first = encoded.char_to_token(span.begin)
        last = encoded.char_to_token(span.end - 1)
        start = None
        if None not in (header, first, last):
            start = _place(plain[header : last + 1], ids, at)
        if start is None:
            raise UsageError(
                f"the tokens of message {span.turn + 1} are not found among those of the row, as where a picture "
                f"stands in it; {_FIX}"
            )
        begin = start + first - header
        at = start + last + 1 - header
        new[begin:at] = labels[begin:at] if span.learned else [MASKED] * (at - begin)
    return new


def _place(wanted: list[int], ids: list[int], begin: int) -> int | None:
    """Where a run of tokens begins; None: nowhere from ``begin`` on."""
    for at in range(begin, len(ids) - len(wanted) + 1):
        if ids[at] == wanted[0] and ids[at : at + len(wanted)] == wanted:
            return at
    return None


# ---- thinking that is left out of the loss --------------------------------------------------------------------------

_BEGIN = "<think>"
_END = "</think>"


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
    ids = row["input_ids"]
    labels = list(row["labels"])
    start = 0
    for length in row.get("seq_lengths") or [len(ids)]:
        # Pieces of ASCII stand for themselves in the vocabularies of byte-level BPE and of SentencePiece.
        pieces = tokenizer.convert_ids_to_tokens(ids[start : start + length])
        ends = list(accumulate(map(len, pieces)))
        text = "".join(pieces)
        at = text.find(_BEGIN)
        while at >= 0:
            first = bisect_right(ends, at)
            if labels[start + first] == MASKED:
                at = text.find(_BEGIN, at + len(_BEGIN))
                continue
            end = text.find(_END, at)
            end = len(text) if end < 0 else end + len(_END)
            for token in range(start + first, start + bisect_left(ends, end) + 1):
                labels[min(token, start + length - 1)] = MASKED
            at = text.find(_BEGIN, end)
        start += length
    return {"labels": labels}
