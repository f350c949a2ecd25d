"""The checks of one batch of rows: by Arrow without Python objects, and in Python with words for what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape that all rows of a split must have.

    Attributes:
        kind: one of `hf_rocm_tune.data.formats.Kind`.
        text_field: name of the column of plain text.
        conversational: whether the columns hold lists of messages.
        has_tools: whether there is a ``tools`` column.
        needs_assistant: whether every row must have an assistant turn.
    """

    kind: str
    text_field: str
    conversational: bool
    has_tools: bool
    needs_assistant: bool

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


def is_clean(table: pa.Table, layout: Layout) -> bool:
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


def _are_messages(column: pa.ChunkedArray, layout: Layout, name: str) -> bool:
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


def fault_in(row: dict[str, Any], layout: Layout) -> str | None:
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


def _fault_in_messages(value: Any, layout: Layout, column: str) -> str | None:
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


def _renaming(message: dict[str, Any], layout: Layout) -> str:
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
