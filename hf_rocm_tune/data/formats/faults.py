"""What is wrong with one row of a split, in words that name column and message; None where nothing is."""

from __future__ import annotations

import json
import sys
from typing import Any

from hf_rocm_tune.data.formats.layout import FormatInfo
from hf_rocm_tune.data.formats.messages import is_call, is_call_role, standard_role, turns_of
from hf_rocm_tune.data.formats.names import (
    ASKED,
    CHATS,
    FUNCTIONS,
    HISTORY,
    MARGIN,
    MARKS,
    MASKED,
    MISSING,
    SYSTEMS,
    TEMPLATE_KWARGS,
)
from hf_rocm_tune.foreign import parse_json

_MARK_NAMES = frozenset(MARKS)


def fault_in(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """What is wrong with this row, or None."""
    if layout.kind == "tokenized":
        return _fault_in_tokens(row, layout)
    for column in layout.columns:
        fault = _fault_in_column(row.get(column), layout, column)
        if fault:
            return f"column '{column}' {fault}"
    return (
        _fault_in_system_prompts(row, layout)
        or _fault_in_last_message(row, layout)
        or _fault_in_common_prompt(row, layout)
    )


def _fault_in_column(value: Any, layout: FormatInfo, column: str) -> str | None:
    if column in layout.messages:
        return _fault_in_messages(turns_of(value) if isinstance(value, dict) else value, layout, column)
    if column in ("tools", FUNCTIONS):
        return _fault_in_tools(value)
    if layout.in_csv and column in layout.content.values() and value in MISSING:
        return (
            f"holds {value!r}, a word that stands for a missing value in CSV: leave the row out, or give the rows as "
            ".jsonl if the word is meant"
        )
    is_right, what = _expected(value, layout, column)
    if is_right:
        return None
    fault = f"holds {_named(value, layout)}, not {what}"
    if layout.in_csv and isinstance(value, int | float):
        fault += ": CSV tells no text from numbers, so give such rows as .jsonl"
    return fault


def _expected(value: Any, layout: FormatInfo, column: str) -> tuple[bool, str]:
    """Whether a value is of its column's kind, and that kind in words."""
    if column == layout.label:
        return value in (True, False), "true or false"
    if column == MARGIN:
        return isinstance(value, int | float), "a number"
    if column == TEMPLATE_KWARGS:
        return isinstance(value, dict | None), "an object"
    if column == HISTORY:
        return _is_history(value), "pairs of a question and an answer"
    return isinstance(value, str) or (value is None and column in layout.more), "text"


def _is_history(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(_is_pair(item) for item in value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == len(ASKED) and all(isinstance(text, str) for text in value)


# ---- between the columns of a row -----------------------------------------------------------------------------------


def _fault_in_system_prompts(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """Two system prompts of one row that differ: which is meant is not known."""
    for column in layout.more:
        if column not in SYSTEMS or not row.get(column):
            continue
        for name in layout.messages:
            first = turns_of(row[name])[0]
            is_system = standard_role(first[layout.role_key]) == "system"
            if is_system and first.get(layout.content_key) != row[column]:
                return f"column '{column}' and the first message of '{name}' are system prompts that differ: keep one"
    return None


def _fault_in_last_message(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """A conversation that does not end as it has to where its last message has a meaning of its own."""
    chat = layout.content.get("prompt", layout.content.get("chosen", ""))
    if chat not in CHATS or not (layout.splits or layout.kind == "prompt"):
        return None
    turns = turns_of(row[chat])
    answered = standard_role(turns[-1][layout.role_key]) == "assistant"
    if layout.kind == "prompt" and answered:
        return f"column '{chat}' ends with an answer, and GRPO writes the answers itself: leave it out"
    if layout.splits and not (answered and len(turns) > 1):
        return f"column '{chat}' does not end with a question and the assistant's answer"
    return None


def _fault_in_common_prompt(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """Two conversations of a pair that begin differently, where no column has their prompt."""
    if layout.kind != "preference" or layout.splits or not layout.messages or "prompt" in layout.content:
        return None
    chosen = turns_of(row[layout.content["chosen"]])
    rejected = turns_of(row[layout.content["rejected"]])
    if chosen[0] == rejected[0]:
        return None
    return "'chosen' and 'rejected' do not begin with the same prompt, and there is no column 'prompt'"


# ---- in messages ----------------------------------------------------------------------------------------------------


def _fault_in_messages(value: Any, layout: FormatInfo, column: str) -> str | None:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return "holds text that looks like JSON, not a list of messages: write the list itself, in a .jsonl file"
    if not isinstance(value, list) or not value:
        return f"holds {_named(value, layout)}, not a list of messages"
    for number, message in enumerate(value, start=1):
        fault = _fault_in_message(message, layout)
        if fault:
            return f"message {number} {fault}"
    if not layout.needs_assistant or column == layout.content.get("prompt"):
        return None
    if "assistant" in {standard_role(message[layout.role_key]) for message in value}:
        return None
    return "has no message of the role 'assistant', which --assistant_only_loss needs"


def _fault_in_message(message: Any, layout: FormatInfo) -> str | None:
    role_key, content_key = layout.role_key, layout.content_key
    if not isinstance(message, dict) or not isinstance(message.get(role_key), str):
        return f"is {_object_in_words(message, layout)}, not an object with '{role_key}' and '{content_key}'"
    role = message[role_key]
    content = message.get(content_key)
    calls = message.get("tool_calls")
    if not isinstance(content, str) and not _are_parts(content):
        is_only_call = content is None and (calls or message.get("function_call"))
        if not is_only_call:
            return f"has {_named(content, layout)} as '{content_key}', not text"
    if is_call_role(role) and not is_call(content):
        return f"is a {role}, and its '{content_key}' is no JSON object with 'name'"
    if calls:
        fault = _fault_in_calls(calls)
        if fault:
            return fault
    if _MARK_NAMES.isdisjoint(message):
        return None
    for mark in MARKS:
        if message.get(mark) not in (None, True, False):  # 0 and 1 are equal to them
            return f"has '{mark}': {message[mark]!r}, and a message is in the loss (1) or not (0)"
    return None


def _are_parts(content: Any) -> bool:
    return bool(
        isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content)
    )


def _object_in_words(value: Any, layout: FormatInfo) -> str:
    keys = []
    if isinstance(value, dict):
        keys = [f"'{key}'" for key in value if value[key] is not None]
    if not keys:
        return _named(value, layout)
    return f"an object with {', '.join(keys)}"


def _fault_in_calls(calls: Any) -> str | None:
    """What is wrong with the ``tool_calls`` of a message: a template would leave out what it cannot read."""
    if not isinstance(calls, list):
        return f"has {_named(calls)} as 'tool_calls', not a list of calls"
    for call in calls:
        function = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return "has a call in 'tool_calls' that names no function: {'function': {'name': ..., 'arguments': ...}}"
    return None


def _fault_in_tools(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            return f"is not valid JSON ({error.msg}, column {error.colno})"
        except ValueError as error:
            return f"is JSON that is not used: {error}"
    if isinstance(value, list | None):
        return None
    return f"holds {_named(value)}, not a list of tools or its JSON"


# ---- in tokens ------------------------------------------------------------------------------------------------------


def _fault_in_tokens(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """Of lists of token ids and masks: their types and lengths, and ids that the model does not have."""
    count = len(row.get("input_ids") or ())
    for column in layout.columns:
        value = row.get(column)
        is_mask = column not in ("input_ids", "labels")
        if not isinstance(value, list) or not value or {*map(type, value)} - {int, bool}:
            what = "zeros and ones" if is_mask else "token ids"
            return f"column '{column}' is {_named(value, layout)} and no list of {what}"
        if len(value) != count:
            return f"column '{column}' has {len(value)} entries for {count} 'input_ids'"
        if not is_mask:
            fault = _fault_in_ids({*value}, layout, column)
            if fault:
                return fault
    return None


def _fault_in_ids(ids: set[int], layout: FormatInfo, column: str) -> str | None:
    if column == "labels":
        ids = ids - {MASKED}
    end = layout.vocabulary or sys.maxsize
    wrong = next((bound for bound in (min(ids, default=0), max(ids, default=0)) if not 0 <= bound < end), None)
    if wrong is None:
        return None
    last = f" to {end - 1}, the vocabulary of the model" if layout.vocabulary else ""
    return f"column '{column}' has the token id {wrong}; ids are from 0{last}"


def _named(value: Any, layout: FormatInfo | None = None) -> str:
    """A value in words, by its type."""
    if value is None:
        if layout and layout.in_csv:
            return "nothing (an empty cell)"
        return "nothing (null)"
    if value == []:
        return "an empty list"
    kinds = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    kinds[bytes] = "bytes"
    return kinds.get(type(value), f"a {type(value).__name__}")
