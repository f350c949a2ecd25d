"""Rows in TRL's format: what has to change (`changes_in_words`), and the changes (`as_trl`, `in_trls_format`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.data.formats.messages import is_call_role, is_text, listed_tools, standard_role, turns_of
from hf_rocm_tune.data.formats.names import (
    ASKED,
    CALL_ROLES,
    FUNCTIONS,
    HISTORY,
    MARKS,
    MESSAGE_KEYS,
    REJECTED,
    SYSTEMS,
    TEMPLATE_KWARGS,
    TURNS,
)

if TYPE_CHECKING:
    from datasets import Features

    from hf_rocm_tune.data.formats.layout import FormatInfo, Rows
    from hf_rocm_tune.data.formats.traits import RowTraits


def as_trl(dataset: Rows, info: FormatInfo) -> Rows:
    """The rows with TRL's columns, in order, and no column of another format; the same object if TRL reads them as they
    are."""
    from datasets import Dataset

    if info.unused:
        dataset = dataset.remove_columns([*info.unused])
    if info.mapping is None:
        return dataset
    removed = _removed_columns(info)
    more: dict[str, Any] = {}
    if isinstance(dataset, Dataset) and info.conversational and (info.has_calls or info.uneven_kwargs):
        more["features"] = _features_with_json(dataset.features, info, removed)
    return dataset.map(in_trls_format, fn_kwargs={"layout": info}, remove_columns=sorted(removed), **more)


def _removed_columns(info: FormatInfo) -> set[str]:
    read = {*info.content.values(), *info.more, *info.dropped}
    for column in (FUNCTIONS, "attention_mask"):
        if column in info.beside:
            read.add(column)
    written = {*info.content} - {*info.dropped}
    return read - written


def _features_with_json(features: Features, info: FormatInfo, removed: set[str]) -> Features:
    """Arrow would give the arguments of each call, and of each template, the keys of all others."""
    from datasets import Features, Json, List, Value

    kept = {name: kind for name, kind in features.items() if name not in removed}
    for name in info.content:
        kept[name] = List(Json())
    if info.label is not None:
        kept["label"] = features[info.label]
    if info.has_tools:
        kept["tools"] = Value("string")
    if info.uneven_kwargs:
        kept[TEMPLATE_KWARGS] = Json()
    return Features(kept)


def with_decoded_calls(info: FormatInfo) -> FormatInfo:
    """For a chat template that writes arguments of calls as JSON, and text among them as a JSON string in quotes."""
    mapping = "arguments of calls, JSON as text, become objects"
    if info.mapping:
        mapping = f"{info.mapping}, {mapping}"
    return replace(info, decodes_calls=True, mapping=mapping)


# ---- one row --------------------------------------------------------------------------------------------------------


def in_trls_format(row: Mapping[str, Any], *, layout: FormatInfo) -> dict[str, Any]:
    """The columns of one row that TRL trains on, in its format.

    Raises:
        UsageError: a call in ShareGPT's form is no JSON.
    """
    if layout.kind == "tokenized":
        return _without_padding(row, layout)
    new: dict[str, Any] = {}
    begins = "messages" if "messages" in layout.content else "prompt"
    for name, column in layout.content.items():
        if name == "label":
            new[name] = row[column]
        elif column == REJECTED[0]:
            new[name] = [*new["chosen"][:-1], {"role": "assistant", "content": row[column]}]
        else:
            read = _text if isinstance(row[column], str) else _conversation
            value = read(row, name, column, layout)
            if name == begins or begins not in layout.content:
                value = _with_earlier(value, row, layout)
            new[name] = value
    if layout.has_tools:
        new["tools"] = _tools(row.get("tools") or row.get(FUNCTIONS))
    if layout.uneven_kwargs:
        new[TEMPLATE_KWARGS] = {key: value for key, value in (row[TEMPLATE_KWARGS] or {}).items() if value is not None}
    return new


def _without_padding(row: Mapping[str, Any], layout: FormatInfo) -> dict[str, Any]:
    mask = row["attention_mask"]
    real = {}
    for name in layout.columns:
        if name != "attention_mask":
            real[name] = [entry for entry, is_real in zip(row[name], mask, strict=True) if is_real]
    return real


def _text(row: Mapping[str, Any], name: str, column: str, layout: FormatInfo) -> str | list[dict[str, Any]]:
    """A training column that holds text: as it is, or as a message."""
    text: str = row[column]
    if name == "prompt" and column != name:
        added = [row[more] for more in layout.more if more not in TURNS and row[more]]
        text = "\n\n".join([text, *added])
        if not layout.conversational:
            text += "\n"
    if not layout.conversational:
        return text
    role = "user" if name == "prompt" else "assistant"
    return [{"role": role, "content": text}]


def _conversation(row: Mapping[str, Any], name: str, column: str, layout: FormatInfo) -> list[dict[str, Any]]:
    """A training column that holds messages: all, the prompt of them, or the answer."""
    messages = _messages(turns_of(row[column]), layout)
    if not layout.splits or name == "chosen":
        return messages
    return messages[:-1] if name == "prompt" else messages[-1:]


def _with_earlier(value: Any, row: Mapping[str, Any], layout: FormatInfo) -> Any:
    """Text or messages, after the system prompt and the earlier turns that have columns of their own."""
    system = next((row[name] for name in SYSTEMS if name in layout.more), None)
    history: Sequence[Any] = ()
    if HISTORY in layout.more:
        history = row.get(HISTORY) or ()
    if isinstance(value, str):
        texts = [system] if system else []
        for pair in history:
            texts += pair
        return "\n\n".join([*texts, value])
    earlier = []
    for pair in history:
        earlier += [{"role": role, "content": text} for role, text in zip(ASKED, pair, strict=True)]
    if value[0]["role"] == "system":
        return [value[0], *earlier, *value[1:]]
    if system:
        earlier.insert(0, {"role": "system", "content": system})
    return [*earlier, *value]


def _tools(given: Any) -> str | None:
    """JSON of the tools, each in OpenAI's ``function``; None without any."""
    wrapped = []
    for tool in listed_tools(given):
        if "function" not in tool:
            tool = {"type": "function", "function": tool}
        wrapped.append(tool)
    if not wrapped:
        return None
    return json.dumps(wrapped, ensure_ascii=False)


def _messages(turns: list[Any], layout: FormatInfo) -> list[dict[str, Any]]:
    """Messages in TRL's form; calls that are messages of their own become part of the answer that they follow."""
    new: list[dict[str, Any]] = []
    for turn in turns:
        message = _message(turn, layout)
        if new and is_call_role(turn[layout.role_key]) and _are_one_answer(new[-1], message):
            new[-1]["tool_calls"] = [*new[-1].get("tool_calls", ()), *message["tool_calls"]]
        else:
            new.append(message)
    return new


def _are_one_answer(message: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether a call belongs to the message before it: an answer that is in the loss as the call is, or is not."""
    return message["role"] == "assistant" and all(message.get(mark) == call.get(mark) for mark in MARKS)


def _message(message: Mapping[str, Any], layout: FormatInfo) -> dict[str, Any]:
    """A message in TRL's form: OpenAI's former ``function_call`` and ShareGPT's become ``tool_calls``."""
    role = message[layout.role_key]
    content = message.get(layout.content_key)
    if layout.joins_parts and isinstance(content, list) and is_text(content):
        content = "".join(part["text"] for part in content)
    own = (layout.role_key, layout.content_key, "function_call")
    rest = {key: value for key, value in message.items() if key not in own and value is not None}
    calls = message.get("function_call")
    if is_call_role(role):
        calls = json.loads(content or "")
        content = ""
    if calls:
        listed = calls if isinstance(calls, list) else [calls]
        rest["tool_calls"] = [{"type": "function", "function": call} for call in listed]
    if layout.decodes_calls and "tool_calls" in rest:
        rest["tool_calls"] = [_decoded(call) for call in rest["tool_calls"]]
    return {"role": standard_role(role), "content": content, **rest}


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object; text that is no JSON object stays."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else None
    except json.JSONDecodeError:
        decoded = None
    if not isinstance(decoded, dict):
        return dict(call)
    new = {**function, "arguments": decoded}
    return {**call, "function": new} if call.get("function") else new


# ---- in words -------------------------------------------------------------------------------------------------------


def changes_in_words(layout: FormatInfo, conversational: bool, seen: RowTraits) -> str:
    """What `as_trl` changes, in one phrase."""
    changes = _columns_in_words(layout)
    changes += [f"'{name}' is the system prompt" for name in layout.more if name in SYSTEMS]
    changes += [f"'{name}' goes into the prompt" for name in layout.more if name not in TURNS]
    if HISTORY in layout.more:
        changes.append(f"'{HISTORY}' stands before it, read and not learned")
    for name in layout.dropped:
        changes.append(f"'{name}' is not used")
    for role in sorted(seen.roles):
        if standard_role(role) != role:
            changes.append(f"{role} is {standard_role(role)}")
    keys = (layout.role_key, layout.content_key)
    if keys != MESSAGE_KEYS:
        changes.append(f"{'/'.join(keys)} are {'/'.join(MESSAGE_KEYS)}")
    if layout.joins_parts:
        changes.append("parts of a message become one text")
    for name in CALL_ROLES:
        if name in seen.kinds:
            changes.append(f"{name} becomes tool_calls")
    if FUNCTIONS in seen.kinds:
        changes.append(f"'{FUNCTIONS}' are the tools")
    if "padding" in seen.kinds:
        changes.append("positions with attention_mask 0 are removed")
    if layout.uneven_kwargs:
        changes.append(f"keys of '{TEMPLATE_KWARGS}' that a row lacks are not given to the template")
    if layout.texts and layout.kind != "tokenized":
        plain = "as plain text, because the tokenizer has no chat template"
        changes.append("text becomes chat messages" if conversational else plain)
    return ", ".join(changes)


def _columns_in_words(layout: FormatInfo) -> list[str]:
    if not layout.splits:
        return [f"'{column}' is the {name}" for name, column in layout.content.items() if name != column]
    (chat,) = layout.messages
    if layout.kind == "preference":
        return [f"'{chat}' is the chosen conversation, whose last answer '{REJECTED[0]}' replaces in the rejected"]
    changes = [f"the last message of '{chat}' is the completion and the others are the prompt"]
    if layout.label not in (None, "label"):
        changes.append(f"'{layout.label}' is the label")
    return changes
