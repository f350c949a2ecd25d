"""Checks the format of the rows before a model is loaded, and converts it to TRL's.

Unchanged are the formats that TRL 1.16 reads; `as_trl` converts Alpaca's and other question-and-answer columns, and
ShareGPT's ``conversations``. Every row of a dataset is checked (about 30 seconds for a million conversations), of a
streamed one the first `STREAMED_ROWS`; not whether a chat template accepts the order of the roles.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Rows: TypeAlias = Dataset | IterableDataset

STREAMED_ROWS = 100
_BATCH = 1000
MASKED = -100  # the label of a token that does not count in the loss

Kind = Literal["messages", "prompt_completion", "text", "tokenized", "preference", "unpaired", "prompt"]
Method = Literal["sft", "dpo", "kto", "reward", "grpo", "orpo"]

# Names of columns of prompts and of answers: TRL's first, then Alpaca's and those of question-and-answer sets
_PROMPTS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("completion", "output", "answer", "response")
_MORE = ("input", "context")  # added to an instruction
_BESIDE_IDS = ("labels", "completion_mask", "assistant_masks")
_SYSTEM = "system"
_KWARGS = "chat_template_kwargs"
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # ShareGPT's
_ACCEPTED: dict[Method, str] = {
    "sft": "'messages' (also with 'tools'), 'prompt' and 'completion', '{text}', 'conversations' (ShareGPT), "
    "'instruction' and 'output' (Alpaca, also with 'input'), 'question' and 'answer', or 'input_ids'",
    "dpo": "'prompt', 'chosen' and 'rejected' (text or messages; 'prompt' may be part of both)",
    "orpo": "'prompt', 'chosen' and 'rejected' (text or messages; 'prompt' may be part of both)",
    "reward": "'chosen' and 'rejected' (text or messages), also with 'prompt'",
    "kto": "'prompt', 'completion' and 'label' (true or false), or 'prompt', 'chosen' and 'rejected'",
    "grpo": "'prompt' (text or messages) and the columns that the reward functions read",
}


@dataclass(frozen=True, kw_only=True)
class FormatInfo:
    """The format that all rows of a split must have, with the dataset's column names."""

    kind: Kind  # TRL's
    content: Mapping[str, str]  # TRL's name of each training column, and its name in the dataset
    messages: frozenset[str]  # those of them that hold lists of messages
    more: tuple[str, ...]  # optional text that is added to the prompt
    dropped: tuple[str, ...]  # columns that TRL would misread
    beside: tuple[str, ...]  # further columns that are checked
    vocabulary: int | None  # size of the model's; None: unknown
    needs_assistant: bool  # every row needs an assistant turn
    role_key: str
    content_key: str
    conversational: bool = False  # a chat template is applied
    mapping: str | None = None  # the changes that `as_trl` makes; None if TRL reads the rows as they are

    @property
    def columns(self) -> list[str]:
        """The columns that are checked."""
        return [*self.content.values(), *self.more, *self.beside]

    @property
    def description(self) -> str:
        """One phrase, such as ``messages (conversational, with tools)``."""
        traits = ["conversational"] * self.conversational + ["with tools"] * ("tools" in self.beside)
        return self.kind.replace("_", "/") + (f" ({', '.join(traits)})" if traits else "")


def check_format(
    dataset: Rows,
    *,
    method: Method = "sft",
    assistant_only_loss: bool = False,
    completion_only_loss: bool | None = None,
    dataset_text_field: str = "text",
    has_chat_template: bool,
    model_name: str,
    split: str = "train",
    vocabulary: int | None = None,
) -> FormatInfo:
    """Recognise the format of the rows and check them. Flags are TRL's; ``vocabulary``: number of token ids."""
    first = next(iter(dataset), None)
    if first is None:
        raise UsageError(f"the '{split}' split is empty: there are no rows to check or to train on")
    columns = list(dataset.column_names or first)
    layout = _layout(columns, first, method, dataset_text_field, split, assistant_only_loss, vocabulary)
    _check_flags(layout, columns, completion_only_loss, split)
    roles = set[str]()
    for number, row in enumerate(_rows(dataset, layout), start=1):
        if fault := _fault_in(row, layout):
            begins = repr({column: row[column] for column in layout.columns if column in row})[:120]
            raise UsageError(f"row {number} of the '{split}' split: {fault}; the row begins {begins}")
        roles.update(turn[layout.role_key] for column in layout.messages for turn in _turns(row[column]))
    if layout.messages and not has_chat_template:
        raise UsageError(
            f"the '{split}' rows are conversations, but the tokenizer of '{model_name}' has no chat template: name a "
            "template file, or a model whose template to take, with --chat_template_path"
        )
    renamed = any(name != column for name, column in layout.content.items()) and layout.kind != "text"
    mixed = bool(layout.messages) and len(layout.messages) < len(layout.content)
    foreign = layout.dropped or layout.role_key == "from" or roles & {*_ROLES}
    changed = renamed or mixed or foreign or any(isinstance(first[each], dict) for each in layout.messages)
    conversational = bool(layout.messages) or (renamed and has_chat_template)
    mapping = _in_words(layout, conversational, roles) if changed else None
    return replace(layout, conversational=conversational, mapping=mapping)


def as_trl(dataset: Rows, info: FormatInfo) -> Rows:
    """The rows with TRL's columns, in order; the same object if TRL reads them as they are."""
    if info.mapping is None:
        return dataset
    old = {*info.content.values(), *info.more, *info.dropped} - {*info.content}
    dropped = {*info.dropped} & {*info.content}
    return dataset.map(_converted, fn_kwargs={"layout": info}, remove_columns=sorted(old | dropped))


def _converted(row: dict[str, Any], *, layout: FormatInfo) -> dict[str, Any]:
    """One row in TRL's format."""
    new: dict[str, Any] = {}
    added = [row[name] for name in layout.more if name != _SYSTEM and row[name]]
    system = row[_SYSTEM] if _SYSTEM in layout.more else None
    for name, column in layout.content.items():
        value = row[column]
        if isinstance(value, str):
            if name == "prompt" and column != name:
                value = "\n\n".join([value, *added]) + ("" if layout.conversational else "\n")
            if layout.conversational:
                value = [{"role": "user" if name == "prompt" else "assistant", "content": value}]
        else:
            value = [_message(each, layout) for each in _turns(value)]
        if system and name in ("prompt", "messages"):
            if not layout.conversational:
                value = f"{system}\n\n{value}"
            elif value[0]["role"] != "system":
                value = [{"role": "system", "content": system}, *value]
        new[name] = value
    return new


def _message(message: dict[str, Any], layout: FormatInfo) -> dict[str, Any]:
    role, content = message[layout.role_key], message.get(layout.content_key)
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "role", "content")}
    return {"role": _ROLES.get(role, role), "content": content, **rest}


def _in_words(layout: FormatInfo, conversational: bool, roles: set[str]) -> str:
    said = [f"'{column}' is the {name}" for name, column in layout.content.items() if name != column]
    said += [f"'{name}' goes into it" for name in layout.more]
    said += [f"'{name}' is not used" for name in layout.dropped]
    said += [f"{role} is {_ROLES[role]}" for role in sorted(roles & {*_ROLES})]
    said += ["from/value are role/content"] if layout.role_key == "from" else []
    if len(layout.messages) < len(layout.content):
        plain = "as plain text, because the tokenizer has no chat template"
        said.append("text becomes chat messages" if conversational else plain)
    return ", ".join(said)


# ---- recognising the format -----------------------------------------------------------------------------------------


def _layout(
    columns: list[str],
    first: dict[str, Any],
    method: Method,
    text_field: str,
    split: str,
    needs_assistant: bool,
    vocabulary: int | None,
) -> FormatInfo:
    kind, content, dropped = recognise(columns, first, method, text_field, split)
    messages = {each for each in content.values() if isinstance(first[each], list | dict) or each in _CHATS}
    messages = set() if kind in ("text", "tokenized") else messages
    foreign = content.get("prompt", "prompt") != "prompt" or content.get("messages", "messages") != "messages"
    more = [name for name in columns if foreign and name in (*_MORE, _SYSTEM) and name not in content.values()]
    if content.get("prompt") not in {*content.values()} - messages or kind == "prompt":  # a reward function may read it
        more = [name for name in more if name == _SYSTEM]
    beside = _BESIDE_IDS if kind == "tokenized" else ("label",) if kind == "unpaired" else ()
    beside = (*beside, *(("tools", _KWARGS) if messages else ()))
    probe: Any = next((turn for column in messages for turn in _turns(first[column])), {})
    sharegpt = isinstance(probe, dict) and probe.get("role") is None and probe.get("from") is not None
    return FormatInfo(
        kind=kind,
        content=content,
        messages=frozenset(messages),
        more=tuple(more),
        dropped=dropped,
        beside=tuple(name for name in beside if name in columns),
        vocabulary=vocabulary if kind == "tokenized" else None,
        needs_assistant=needs_assistant,
        role_key="from" if sharegpt else "role",
        content_key="value" if sharegpt else "content",
    )


_CHATS = ("messages", "conversations")


def _turns(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def recognise(
    columns: list[str], first: dict[str, Any], method: Method, text_field: str, split: str
) -> tuple[Kind, dict[str, str], tuple[str, ...]]:
    """Kind, training columns, and dropped columns. TRL's own formats come first, in its order."""
    prompt, answer = _only(_PROMPTS, columns), _only(_ANSWERS, columns)
    chat = next((name for name in _CHATS if name in columns), None)
    if method == "sft":
        if "input_ids" in columns:
            return "tokenized", {"input_ids": "input_ids"}, ()
        if "prompt" in columns and "completion" in columns:
            return "prompt_completion", {"prompt": "prompt", "completion": "completion"}, ()
        if chat is not None:  # TRL would prefer a 'prompt' column
            return "messages", {"messages": chat}, ("prompt",) if "prompt" in columns else ()
        if text_field in columns and "prompt" not in columns:
            return "text", {text_field: text_field}, ()
        if prompt and answer:
            return "prompt_completion", {"prompt": prompt, "completion": answer}, ()
    if method in ("dpo", "orpo", "reward", "kto") and {"chosen", "rejected"} <= {*columns}:
        pair = {"chosen": "chosen", "rejected": "rejected"}
        begun = isinstance(first["chosen"], list) and _begins(first["chosen"])
        if prompt and isinstance(first[prompt], str) and begun:
            return "preference", pair, (prompt,)  # both begin with it
        prompt = prompt or (None if begun else chat)
        return "preference", {"prompt": prompt, **pair} if prompt else pair, ()
    if method == "kto" and "label" in columns and prompt and answer:
        return "unpaired", {"prompt": prompt, "completion": answer}, ()
    if method == "grpo" and prompt:
        return "prompt", {"prompt": prompt}, ()
    raise UsageError(_refusal(columns, method, text_field, split))


def _only(names: tuple[str, ...], columns: list[str]) -> str | None:
    """The one of these names among the columns: TRL's own, else the only one."""
    found = [name for name in names if name in columns]
    return found[0] if names[0] in columns or len(found) == 1 else None


def _begins(messages: list[Any]) -> bool:
    """Whether a list of messages begins with the prompt."""
    turn = messages[0] if messages else None
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return role in ("user", "human", "system", "developer")


def _refusal(columns: list[str], method: Method, text_field: str, split: str) -> str:
    found = ", ".join(f"'{column}'" for column in columns)
    accepted = _ACCEPTED[method].format(text=text_field)
    names = {*_PROMPTS, *_ANSWERS, *_CHATS, "chosen", "rejected", "label", text_field}
    missing = sorted(names - {*columns})
    near = {column: difflib.get_close_matches(column, missing, n=1) for column in columns if column not in names}
    hint = ", ".join(f"rename '{column}' to '{match[0]}'?" for column, match in near.items() if match)
    if not hint:
        text = ", or name the column of plain text with --dataset_text_field NAME" if method == "sft" else ""
        hint = f"rename the columns{text}"
    return f"the columns of the '{split}' split fit no format of {method}: found {found}; accepted {accepted}; {hint}"


def _check_flags(layout: FormatInfo, columns: list[str], completion_only_loss: bool | None, split: str) -> None:
    if layout.needs_assistant and not layout.messages:
        raise UsageError(
            f"--assistant_only_loss needs conversations, but the '{split}' rows are {layout.kind.replace('_', '/')}: "
            "drop the flag, or give rows with 'messages'"
        )
    masked = layout.kind == "prompt_completion" or (layout.kind == "tokenized" and "completion_mask" in columns)
    if completion_only_loss and not masked:
        raise UsageError(
            f"--completion_only_loss needs 'prompt' and 'completion', but the '{split}' rows are "
            f"{layout.kind}: drop the flag, or for conversations use --assistant_only_loss"
        )


def _rows(dataset: Rows, layout: FormatInfo) -> Iterator[dict[str, Any]]:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        yield from islice(dataset, STREAMED_ROWS)
        return
    for batch in dataset.select_columns(layout.columns).with_format(None).iter(batch_size=_BATCH):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


# ---- what is wrong with one row -------------------------------------------------------------------------------------


def _fault_in(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """What is wrong with this row, or None."""
    if layout.kind == "tokenized":
        return _fault_in_tokens(row, layout)
    for column in layout.columns:
        value = row.get(column)
        if column in layout.messages:
            fault = _fault_in_messages([value] if isinstance(value, dict) else value, layout, column)
        elif column == "tools":
            fault = _fault_in_tools(value)
        else:
            right, what = isinstance(value, str) or (value is None and column in layout.more), "text"
            if column == "label":
                right, what = value in (True, False), "true or false"
            elif column == _KWARGS:
                right, what = isinstance(value, dict | None), "an object"
            fault = None if right else f"holds {_named(value)}, not {what}"
        if fault:
            return f"column '{column}' {fault}"
    return None


def _fault_in_messages(value: Any, layout: FormatInfo, column: str) -> str | None:
    if not isinstance(value, list) or not value:
        return f"holds {_named(value)}, not a list of messages"
    role, content = layout.role_key, layout.content_key
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get(role), str):
            keys = [f"'{key}'" for key in message if message[key] is not None] if isinstance(message, dict) else []
            what = f"an object with {', '.join(keys)}" if keys else _named(message)
            return f"message {number} is {what}, not an object with '{role}' and '{content}'"
        said = message.get(content)
        parts = isinstance(said, list) and said and all(isinstance(each, dict) and "type" in each for each in said)
        if not (isinstance(said, str) or parts or (said is None and message.get("tool_calls"))):
            return f"message {number} has {_named(said)} as '{content}', not text"
    roles = {_ROLES.get(message[role], message[role]) for message in value}
    if layout.needs_assistant and layout.content.get("prompt") != column and "assistant" not in roles:
        return "has no message of the role 'assistant', which --assistant_only_loss needs"
    return None


def _fault_in_tokens(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """Of lists of token ids and masks: their types and lengths, and ids that the model does not have."""
    count, end = len(row.get("input_ids") or ()), layout.vocabulary or sys.maxsize
    for column in layout.columns:
        value, mask = row.get(column), column not in ("input_ids", "labels")
        what = "zeros and ones" if mask else "token ids"
        if not isinstance(value, list) or not value or {*map(type, value)} - {int, bool}:
            return f"column '{column}' is {_named(value)} and no list of {what}"
        if len(value) != count:
            return f"column '{column}' has {len(value)} entries for {count} 'input_ids'"
        tokens = {0} if mask else {*value} - ({MASKED} if column == "labels" else set()) or {0}
        if min(tokens) < 0 or max(tokens) >= end:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            last = f" to {end - 1}, the vocabulary of the model" if layout.vocabulary else ""
            return f"column '{column}' has the token id {wrong}; ids are from 0{last}"
    return None


def _fault_in_tools(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            return f"is not valid JSON ({error.msg}, column {error.colno})"
    return None if isinstance(value, list | None) else f"holds {_named(value)}, not a list of tools or its JSON"


def _named(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if value == []:
        return "an empty list"
    kinds = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
