"""Which format rows have, by their columns and the first row; what to do about columns that fit none."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hf_rocm_tune.data.formats.layout import FormatInfo, is_renamed
from hf_rocm_tune.data.formats.messages import begins_with_prompt, turns_of
from hf_rocm_tune.data.formats.names import (
    ANSWERS,
    BESIDE_IDS,
    CHATS,
    FUNCTIONS,
    HISTORY,
    KTO_TAG,
    MARGIN,
    MORE,
    OF_OPENAI,
    OF_TEMPLATE,
    PROMPTS,
    REJECTED,
    SYSTEMS,
    TURNS,
    Kind,
    Method,
)
from hf_rocm_tune.errors import UsageError

PAIRED = ("dpo", "orpo", "reward", "kto")
"""Methods that take a chosen and a rejected answer."""

_ACCEPTED: dict[Method, str] = {
    "sft": "'messages' (also with 'tools'), 'prompt' and 'completion', '{text}', 'conversations' (ShareGPT), "
    "'instruction' and 'output' (Alpaca, also with 'input'), 'question' and 'answer', or 'input_ids'",
    "dpo": "'prompt', 'chosen' and 'rejected' (text or messages; 'prompt' may be part of both)",
    "orpo": "'prompt', 'chosen' and 'rejected' (text or messages; 'prompt' may be part of both)",
    "reward": "'chosen' and 'rejected' (text or messages), also with 'prompt'",
    "kto": "'prompt', 'completion' and 'label' (true or false), or 'prompt', 'chosen' and 'rejected'",
    "grpo": "'prompt' (text or messages) and the columns that the reward functions read",
}
_ALIKE = 0.75  # of `difflib`: 'conversation' is like 'conversations', and 'version' is not
#: Columns that are likely to be meant as prompt or answer where no better ones are there.
_MEANT = {
    **dict.fromkeys(("input", "user", "human", "instructions", "questions", "article", "problem"), "prompt"),
    **dict.fromkeys(("assistant", "gpt", "bot", "target", "answers", "responses"), "completion"),
    **dict.fromkeys(("generation", "summary", "solution", "reply"), "completion"),
}


def layout_of(
    columns: list[str],
    first: dict[str, Any],
    *,
    method: Method,
    text_field: str,
    split: str,
    needs_assistant: bool,
    vocabulary: int | None,
    in_csv: bool,
) -> FormatInfo:
    """What the columns and the first row say of all rows; the arguments are those of `check.check_format`.

    Raises:
        UsageError: the columns fit no format of the method.
    """
    kind, content, dropped = recognise(columns, first, method, text_field, split)
    if kind != "tokenized":
        vocabulary = None
    messages: set[str] = set()
    more: list[str] = []
    if kind not in ("text", "tokenized"):
        for column in content.values():
            if isinstance(first[column], list | dict) or column in CHATS:
                messages.add(column)
        messages.discard(REJECTED[0])
        more = _columns_of_questions(columns, first, kind, content)
    role_key, content_key = _keys_of_messages(first, messages)
    return FormatInfo(
        kind=kind,
        content=content,
        messages=frozenset(messages),
        more=tuple(more),
        dropped=dropped,
        in_csv=in_csv,
        beside=tuple(_columns_beside(columns, kind, content, method, has_messages=bool(messages))),
        vocabulary=vocabulary,
        needs_assistant=needs_assistant,
        role_key=role_key,
        content_key=content_key,
    )


def recognise(
    columns: list[str], first: dict[str, Any], method: Method, text_field: str, split: str
) -> tuple[Kind, dict[str, str], tuple[str, ...]]:
    """Kind, training columns by TRL's names, and dropped columns. TRL's own formats come first, in its order."""
    format_of_method = None
    if method == "sft":
        format_of_method = _supervised(columns, text_field)
    elif method == "grpo":
        format_of_method = _prompts(columns)
    else:
        format_of_method = _pairs(columns, first)
        if format_of_method is None and method == "kto":
            format_of_method = _labelled(columns)
    if format_of_method is None:
        raise UsageError(_refusal(columns, first, method, text_field, split))
    return format_of_method


def _supervised(columns: list[str], text_field: str) -> tuple[Kind, dict[str, str], tuple[str, ...]] | None:
    if "input_ids" in columns:
        return "tokenized", {"input_ids": "input_ids"}, ()
    if "prompt" in columns and "completion" in columns:
        return "prompt_completion", {"prompt": "prompt", "completion": "completion"}, ()
    chat = _first_of(CHATS, columns)
    if chat is not None:
        dropped = ("prompt",) if "prompt" in columns else ()  # TRL would prefer it
        return "messages", {"messages": chat}, dropped
    if text_field in columns and "prompt" not in columns:
        return "text", {text_field: text_field}, ()
    prompt = _only(PROMPTS, columns)
    answer = _only(ANSWERS, columns)
    if prompt and answer:
        return "prompt_completion", {"prompt": prompt, "completion": answer}, ()
    return None


def _prompts(columns: list[str]) -> tuple[Kind, dict[str, str], tuple[str, ...]] | None:
    prompt = _only(PROMPTS, columns) or _first_of(CHATS, columns)
    return None if prompt is None else ("prompt", {"prompt": prompt}, ())


def _pairs(columns: list[str], first: dict[str, Any]) -> tuple[Kind, dict[str, str], tuple[str, ...]] | None:
    chat = _first_of(CHATS, columns)
    if "chosen" in columns and "rejected" in columns:
        pair = {"chosen": "chosen", "rejected": "rejected"}
        holds_prompt = isinstance(first["chosen"], list) and begins_with_prompt(first["chosen"])
        prompt = _only(PROMPTS, columns)
        if prompt and holds_prompt and isinstance(first[prompt], str):
            return "preference", pair, (prompt,)  # both begin with it
        if prompt is None and not holds_prompt:
            prompt = chat
        return "preference", {"prompt": prompt, **pair} if prompt else pair, ()
    rejected = _first_of(REJECTED, columns)
    if chat and rejected:
        return "preference", {"chosen": chat, "rejected": rejected}, ()
    return None


def _labelled(columns: list[str]) -> tuple[Kind, dict[str, str], tuple[str, ...]] | None:
    label = _first_of(("label", KTO_TAG), columns)
    if label is None:
        return None
    chat = _first_of(CHATS, columns)
    prompt = _only(PROMPTS, columns)
    answer = _only(ANSWERS, columns)
    if prompt and answer:
        return "unpaired", {"prompt": prompt, "completion": answer, "label": label}, ()
    if chat and not prompt and not answer:
        return "unpaired", {"prompt": chat, "completion": chat, "label": label}, ()
    return None


def _first_of(names: tuple[str, ...], columns: list[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _only(names: tuple[str, ...], columns: list[str]) -> str | None:
    """The one of these names among the columns: TRL's own, else the only one."""
    present = [name for name in names if name in columns]
    if names[0] in columns or len(present) == 1:
        return present[0]
    return None


def _columns_of_questions(
    columns: list[str], first: Mapping[str, Any], kind: Kind, content: Mapping[str, str]
) -> list[str]:
    """Columns that belong to a question beside it: Alpaca's input, a system message, the turns before."""
    question = content.get("prompt", "prompt")
    is_text = isinstance(first.get(content.get("prompt", "")), str)
    taken: list[str] = []
    if is_text and question != "prompt" and kind != "prompt":  # rewards may read columns beside a prompt
        taken += MORE
    taken += [name for name in SYSTEMS if name in columns][:1]
    if is_text:
        taken.append(HISTORY)
    return [name for name in columns if name in taken and name not in content.values()]


def _columns_beside(
    columns: list[str], kind: Kind, content: Mapping[str, str], method: Method, *, has_messages: bool
) -> Iterator[str]:
    """Columns that stay as they are: of tokens, a margin of rewards, and what a chat template reads."""
    names: list[str] = []
    if kind == "tokenized":
        names += BESIDE_IDS
    elif method == "reward":
        names.append(MARGIN)
    if kind != "prompt" and (has_messages or is_renamed(kind, content)):
        names += [name for name in OF_TEMPLATE if name != FUNCTIONS or "tools" not in columns]
    for name in names:
        if name in columns:
            yield name


def _keys_of_messages(first: Mapping[str, Any], messages: Collection[str]) -> tuple[str, str]:
    """The keys of a message that name its role and hold its text, by the first one of the first row."""
    message: Any = {}
    for column in messages:
        turns = turns_of(first[column])
        if turns:
            message = turns[0]
            break
    if not isinstance(message, dict):
        message = {}
    role_key = "role"
    if message.get("role") is None and message.get("from") is not None:
        role_key = "from"
    content_key = "content"
    if message.get("content") is None and (role_key == "from" or message.get("value") is not None):
        content_key = "value"
    return role_key, content_key


# ---- what to do about columns that fit no format --------------------------------------------------------------------


def _refusal(columns: list[str], first: dict[str, Any], method: Method, text_field: str, split: str) -> str:
    listed = ", ".join(f"'{column}'" for column in columns)
    accepted = _ACCEPTED[method].format(text=text_field)
    names = {
        "sft": {*PROMPTS, *ANSWERS, *CHATS, text_field},
        "kto": {*PROMPTS, *ANSWERS, "chosen", "rejected", "label"},
        "grpo": {*PROMPTS},
    }.get(method, {*PROMPTS, "chosen", "rejected"})
    advice = (
        _another_file(columns)
        or _rows_inside(columns, first, names)
        or _other_objects(columns, first)
        or _two_of_one(columns)
        or _answer_inside(columns, method)
        or _other_names(columns, first, names)
    )
    if not advice:
        advice = "rename the columns"
        if method == "sft":
            advice += ", or name the column of plain text with --dataset_text_field NAME"
    return (
        f"the columns of the '{split}' split fit no format of {method}: found {listed}; accepted {accepted}; {advice}"
    )


def _another_file(columns: list[str]) -> str:
    """For a file that is not what its suffix says."""
    separators = [mark for mark in (";", "\t", "|") if mark in columns[0]]
    if len(columns) == 1 and separators:
        return f"the file is separated by {separators[0]!r}: save it with commas"
    if columns[0].startswith(("{", "[")):
        return "the file holds JSON: give it the suffix .jsonl"
    return ""


def _rows_inside(columns: list[str], first: dict[str, Any], accepted: set[str]) -> str:
    """For an object, or several, in which the rows are."""
    inside = [name for name in columns if _holds_rows(first[name], accepted)]
    if not inside:
        return ""
    if len(inside) > 1 and not any(isinstance(first[name], list) for name in inside):
        return (
            f"the file seems to be one object of which each value ('{inside[0]}', ...) is a row: write them as a list"
        )
    return f"the rows seem to be inside '{inside[0]}': write that list, alone, to a file"


def _holds_rows(value: Any, accepted: set[str]) -> bool:
    """Whether a value of a column is itself a row, or a list of rows."""
    inner = value[0] if isinstance(value, list) and value else value
    return isinstance(inner, dict) and bool(accepted & {*inner}) and "role" not in inner and "from" not in inner


def _other_objects(columns: list[str], first: dict[str, Any]) -> str:
    """For a list of objects that are no messages."""
    for column in columns:
        value = first[column]
        inner = value[0] if isinstance(value, list) and value else None
        if not isinstance(inner, dict):
            continue
        keys = [key for key, value in inner.items() if value is not None]
        if keys and "role" not in keys and "from" not in keys:
            named = ", ".join(map(repr, keys))
            return f"'{column}' holds objects with {named}: write them as messages with 'role' and 'content'"
    return ""


def _two_of_one(columns: list[str]) -> str:
    """For two columns that could both be the prompt, or both the answer."""
    for names, what in ((PROMPTS, "the prompt"), (ANSWERS, "the answer")):
        several = [name for name in names if name in columns]
        if len(several) > 1 and names[0] not in columns:
            return f"{' and '.join(map(repr, several))} could both be {what}: keep one of them"
    return ""


def _answer_inside(columns: list[str], method: Method) -> str:
    """For rows of OpenAI's preferences, and for conversations where a pair of answers is needed."""
    if {*OF_OPENAI} <= {*columns}:
        best, worst = OF_OPENAI
        return f"write the messages of 'input' as 'prompt', '{best}' as 'chosen' and '{worst}' as 'rejected'"
    chat = _first_of(CHATS, columns)
    if chat is None or method not in PAIRED:
        return ""
    wanted = "'completion'" if method == "kto" else "'chosen' and 'rejected'"
    return f"split the last answer of '{chat}' off: its other messages are the 'prompt', and answers are {wanted}"


def _other_names(columns: list[str], first: dict[str, Any], accepted: set[str]) -> str:
    """For columns whose names are near those that are needed."""
    decided: set[str] = set()
    for group in (PROMPTS, ANSWERS):
        if _only(group, columns):
            decided |= {*group}
    missing = sorted(accepted - {*columns} - decided)
    renamed = []
    name: str | None
    for column in columns:
        if column in accepted or not isinstance(first[column], str | list):
            continue
        meant = _MEANT.get(column.lower())
        if meant in missing:
            name = meant
        elif column in (*MORE, *TURNS):
            continue
        else:
            name = next(iter(difflib.get_close_matches(column.lower(), missing, n=1, cutoff=_ALIKE)), None)
        if name:
            renamed.append(f"rename '{column}' to '{name}'?")
    return ", ".join(renamed)
