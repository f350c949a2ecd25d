"""Whether the rows have a shape that TRL's SFTTrainer can train on, before any model is loaded.

The shapes are those of TRL 1.16 (``SFTTrainer._prepare_dataset``, ``trl.data_utils``): ``messages``, ``prompt`` and
``completion`` (text or messages), a text column, ``conversations`` with from/value, or ready ``input_ids``; ``tools``
may stand beside messages. A row that does not fit would otherwise end in a traceback in the midst of tokenizing.

Covered: every row of a dataset with plain columns, by Arrow, without making Python objects. Rows that Arrow cannot
judge (differing fields, tools, messages with empty content) are read in Python, at most `PYTHON_ROWS` of them; of a
streamed dataset the first `STREAMED_ROWS`. Not covered: whether a chat template accepts the order of the roles.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

    Rows: TypeAlias = Dataset | IterableDataset

STREAMED_ROWS = 100
PYTHON_ROWS = 20_000
_BATCH = 1000
_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

Kind = Literal["messages", "prompt_completion", "text", "conversations", "tokenized"]


@dataclass(frozen=True, kw_only=True)
class FormatInfo:
    """What the rows are, for a line at start and for the settings that depend on it.

    Attributes:
        kind: which of TRL's shapes.
        conversational: whether a chat template is applied.
        has_tools: whether there is a ``tools`` column.
        checked_rows: how many rows were looked at.
        unusual_roles: roles other than system, developer, user, assistant, tool in the first rows. TRL hands them
            to the chat template unchanged ("human" and "gpt" too), which may not know them.
    """

    kind: Kind
    conversational: bool
    has_tools: bool
    checked_rows: int
    unusual_roles: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """One phrase, such as ``messages (conversational, with tools)``."""
        traits = ["conversational"] * self.conversational + ["with tools"] * self.has_tools
        return self.kind.replace("_", "/") + (f" ({', '.join(traits)})" if traits else "")


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The shape that all rows of a split must have."""

    kind: Kind
    text_field: str  # name of the column of plain text
    conversational: bool  # the columns hold lists of messages
    has_tools: bool  # there is a ``tools`` column
    needs_assistant: bool  # every row must have an assistant turn

    @property
    def content_columns(self) -> list[str]:
        """The columns that are trained on."""
        if self.kind == "prompt_completion":
            return ["prompt", "completion"]
        return [{"text": self.text_field, "tokenized": "input_ids"}.get(self.kind, self.kind)]

    @property
    def columns(self) -> list[str]:
        """The columns that are checked."""
        return self.content_columns + ["tools"] * (self.has_tools and self.conversational)

    @property
    def message_columns(self) -> list[str]:
        """The columns that hold lists of messages."""
        return self.content_columns if self.conversational else []

    @property
    def role_key(self) -> str:
        """Name of the role in a message."""
        return "from" if self.kind == "conversations" else "role"

    @property
    def content_key(self) -> str:
        """Name of the content in a message."""
        return "value" if self.kind == "conversations" else "content"


def check_format(
    dataset: Rows,
    *,
    assistant_only_loss: bool = False,
    completion_only_loss: bool | None = None,
    dataset_text_field: str = "text",
    has_chat_template: bool,
    model_name: str,
    split: str = "train",
) -> FormatInfo:
    """Recognise the shape of the rows and check them. The first flags are TRL's; ``model_name`` and ``split`` are for
    messages.

    Raises:
        UsageError: wrong columns (with those found and those accepted), a row of a wrong type (with its number,
            from 1), or a flag or a missing chat template that does not go with the shape.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise UsageError(f"the '{split}' split is empty: there are no rows to check or to train on")
    columns = list(dataset.column_names or first)
    kind = _recognise(columns, dataset_text_field, split)
    conversational = _is_conversational(kind, first)
    layout = _Layout(
        kind=kind,
        text_field=dataset_text_field,
        conversational=conversational,
        has_tools="tools" in columns,
        needs_assistant=assistant_only_loss,
    )
    _check_flags(layout, columns, completion_only_loss, split)
    checked = _check_rows(dataset, layout, split)
    if conversational and not has_chat_template:
        raise UsageError(
            f"the '{split}' rows are conversations, but the tokenizer of '{model_name}' has no chat template: name a "
            "template file, or a model whose template to take, with --chat_template_path"
        )
    return FormatInfo(
        kind=kind,
        conversational=conversational,
        has_tools=layout.has_tools,
        checked_rows=checked,
        unusual_roles=_unusual_roles(dataset, layout),
    )


def _recognise(columns: list[str], text_field: str, split: str) -> Kind:
    """The order of the tests is TRL's: a ``prompt`` column wins over ``messages``, and that over text."""
    if "input_ids" in columns:
        return "tokenized"
    if "prompt" in columns and "completion" in columns:
        return "prompt_completion"
    if "prompt" not in columns and "messages" in columns:
        return "messages"
    if "prompt" not in columns and "conversations" in columns:
        return "conversations"
    if "prompt" not in columns and text_field in columns:
        return "text"
    raise UsageError(_refusal(columns, text_field, split))


def _refusal(columns: list[str], text_field: str, split: str) -> str:
    found = ", ".join(f"'{column}'" for column in columns)
    accepted = (
        f"'messages' (also with 'tools'), 'prompt' and 'completion', '{text_field}', 'conversations' (from/value), "
        "or 'input_ids'"
    )
    if "prompt" in columns:
        hint = "'prompt' without 'completion' cannot be trained on"
    else:
        known = ["messages", "completion", "conversations", "prompt", text_field]
        near = [(column, match[0]) for column in columns if (match := difflib.get_close_matches(column, known, n=1))]
        hint = ", ".join(f"rename '{column}' to '{match}'?" for column, match in near)
        hint = hint or "rename the columns, or name the column of plain text with --dataset_text_field NAME"
    return f"the columns of the '{split}' split fit no format: found {found}; accepted {accepted}; {hint}"


def _is_conversational(kind: Kind, first: dict[str, Any]) -> bool:
    if kind == "prompt_completion":
        return isinstance(first["prompt"], list) or isinstance(first["completion"], list)
    return kind in ("messages", "conversations")


def _check_flags(layout: _Layout, columns: list[str], completion_only_loss: bool | None, split: str) -> None:
    if layout.needs_assistant and not layout.conversational:
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


def _check_rows(dataset: Rows, layout: _Layout, split: str) -> int:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return _check_in_python(islice(dataset, STREAMED_ROWS), layout, split, start=0)
    arrow = dataset.select_columns(layout.columns).with_format("arrow")
    plain = dataset.select_columns(layout.columns).with_format(None)
    checked = read = 0
    for start in range(0, len(dataset), _BATCH):
        table = arrow[start : start + _BATCH]
        if not _is_clean(table, layout):
            if read >= PYTHON_ROWS:
                continue
            rows = (plain[number] for number in range(start, start + table.num_rows))
            read += _check_in_python(rows, layout, split, start=start)
        checked += table.num_rows
    return checked


def _check_in_python(rows: Iterator[dict[str, Any]], layout: _Layout, split: str, *, start: int) -> int:
    number = start
    for number, row in enumerate(rows, start=start + 1):
        if fault := _fault_in(row, layout):
            raise UsageError(f"row {number} of the '{split}' split: {fault}; the row begins {_beginning(row, layout)}")
    return number - start


def _beginning(row: dict[str, Any], layout: _Layout) -> str:
    text = repr({column: row[column] for column in layout.columns if column in row})
    return text if len(text) <= 120 else text[:117] + "..."


def _unusual_roles(dataset: Rows, layout: _Layout) -> tuple[str, ...]:
    if not layout.conversational:
        return ()
    roles = {
        message[layout.role_key]
        for row in islice(iter(dataset), STREAMED_ROWS)
        for column in layout.message_columns
        for message in row[column]
    }
    return tuple(sorted(roles - _KNOWN_ROLES))


# ---- one batch of rows: by Arrow without Python objects, and in Python with words for what is wrong -----------------


def _is_clean(table: pa.Table, layout: _Layout) -> bool:
    """Whether Arrow alone can tell that all these rows are right. False means: look closer."""
    if "tools" in layout.columns:
        return False
    if not layout.conversational:
        check = _are_token_lists if layout.kind == "tokenized" else _are_strings
        return all(check(table.column(column)) for column in layout.content_columns)
    return all(_are_messages(table.column(column), layout, column) for column in layout.message_columns)


def _are_strings(column: pa.ChunkedArray) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(column.type) or types.is_large_string(column.type)) and int(column.null_count) == 0


def _are_lists(column: pa.ChunkedArray) -> bool:
    """Whether all of them are lists with at least one entry."""
    import pyarrow.compute as pc
    import pyarrow.types as types

    if not (types.is_list(column.type) or types.is_large_list(column.type)) or column.null_count:
        return False
    return bool(pc.min(pc.list_value_length(column)).as_py())


def _are_token_lists(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc
    import pyarrow.types as types

    if not _are_lists(column) or not types.is_integer(column.type.value_type):
        return False
    return int(pc.list_flatten(column).null_count) == 0


def _are_messages(column: pa.ChunkedArray, layout: _Layout, name: str) -> bool:
    import pyarrow.compute as pc
    import pyarrow.types as types

    if not _are_lists(column) or not types.is_struct(column.type.value_type):
        return False
    messages = pc.list_flatten(column)
    names = {messages.type.field(index).name for index in range(messages.type.num_fields)}
    if messages.null_count or not {layout.role_key, layout.content_key} <= names:
        return False
    roles = pc.struct_field(messages, layout.role_key)
    if not (_are_strings(roles) and _are_strings(pc.struct_field(messages, layout.content_key))):
        return False
    if not layout.needs_assistant or name == "prompt":
        return True
    with_assistant = pc.filter(pc.list_parent_indices(column), pc.equal(roles, "assistant"))
    return len(pc.unique(with_assistant)) == len(column)


def _fault_in(row: dict[str, Any], layout: _Layout) -> str | None:
    """What is wrong with this row, or None."""
    for column in layout.content_columns:
        value = row.get(column)
        if layout.conversational:
            fault = _fault_in_messages(value, layout, column)
        elif layout.kind == "tokenized":
            fault = _fault_in_tokens(value)
        else:
            fault = None if isinstance(value, str) else f"column '{column}' holds {_named(value)}, not text"
        if fault:
            return fault
    return _fault_in_tools(row["tools"]) if "tools" in layout.columns else None


def _fault_in_messages(value: Any, layout: _Layout, column: str) -> str | None:
    if not isinstance(value, list):
        return f"column '{column}' holds {_named(value)}, not a list of messages"
    if not value:
        return f"column '{column}' holds an empty list, not messages"
    role, content = layout.role_key, layout.content_key
    for number, message in enumerate(value, start=1):
        place = f"column '{column}', message {number}"
        if not isinstance(message, dict):
            return f"{place} is {_named(message)}, not an object with '{role}' and '{content}'"
        if not isinstance(message.get(role), str):
            keys = ", ".join(f"'{key}'" for key, entry in message.items() if entry is not None) or "nothing"
            return f"{place} has no '{role}' of type text (it has {keys}){_renaming(message, layout)}"
        if fault := _fault_in_content(message, content):
            return f"{place} {fault}"
    if layout.needs_assistant and column != "prompt" and all(message[role] != "assistant" for message in value):
        return f"column '{column}' has no message of the role 'assistant', which --assistant_only_loss needs"
    return None


def _fault_in_content(message: dict[str, Any], key: str) -> str | None:
    content = message.get(key)
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content):
        return None
    return f"has {_named(content)} as '{key}', not text"


def _renaming(message: dict[str, Any], layout: _Layout) -> str:
    if layout.kind != "conversations" and message.get("from") is not None:
        return "; rename the column to 'conversations', which TRL reads with 'from' and 'value'"
    if layout.kind == "conversations" and message.get("role") is not None:
        return "; rename the column to 'messages', which TRL reads with 'role' and 'content'"
    return ""


def _fault_in_tokens(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"column 'input_ids' holds {_named(value)}, not a list of token ids"
    wrong = [token for token in value if not isinstance(token, int) or isinstance(token, bool)]
    return f"column 'input_ids' has {_named(wrong[0])} among its token ids" if wrong else None


def _fault_in_tools(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            return f"column 'tools' is not valid JSON ({error.msg}, column {error.colno})"
    if value is None or isinstance(value, list):
        return None
    return f"column 'tools' holds {_named(value)}, not a list of tools or its JSON"


def _named(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, list) and not value:
        return "an empty list"
    kinds = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
