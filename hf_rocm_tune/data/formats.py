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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hf_rocm_tune.data import rowchecks
from hf_rocm_tune.data.rowchecks import Layout
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
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
    """Recognise the shape of the rows and check them.

    Args:
        dataset: at least one row.
        assistant_only_loss: TRL's flag; every row then needs an assistant turn.
        completion_only_loss: TRL's flag; None leaves the choice to TRL.
        dataset_text_field: TRL's flag, the column of plain text.
        has_chat_template: whether the tokenizer has one.
        model_name: for messages.
        split: of the dataset, for messages.

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
    layout = Layout(
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


def _check_flags(layout: Layout, columns: list[str], completion_only_loss: bool | None, split: str) -> None:
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


def _check_rows(dataset: Rows, layout: Layout, split: str) -> int:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return _check_in_python(islice(dataset, STREAMED_ROWS), layout, split, start=0)
    arrow = dataset.select_columns(layout.columns).with_format("arrow")
    plain = dataset.select_columns(layout.columns).with_format(None)
    checked = read = 0
    for start in range(0, len(dataset), _BATCH):
        table = arrow[start : start + _BATCH]
        if not rowchecks.is_clean(table, layout):
            if read >= PYTHON_ROWS:
                continue
            rows = (plain[number] for number in range(start, start + table.num_rows))
            read += _check_in_python(rows, layout, split, start=start)
        checked += table.num_rows
    return checked


def _check_in_python(rows: Iterator[dict[str, Any]], layout: Layout, split: str, *, start: int) -> int:
    number = start
    for number, row in enumerate(rows, start=start + 1):
        if fault := rowchecks.fault_in(row, layout):
            raise UsageError(f"row {number} of the '{split}' split: {fault}; the row begins {_beginning(row, layout)}")
    return number - start


def _beginning(row: dict[str, Any], layout: Layout) -> str:
    text = repr({column: row[column] for column in layout.columns if column in row})
    return text if len(text) <= 120 else text[:117] + "..."


def _unusual_roles(dataset: Rows, layout: Layout) -> tuple[str, ...]:
    if not layout.conversational:
        return ()
    roles = {
        message[layout.role_key]
        for row in islice(iter(dataset), STREAMED_ROWS)
        for column in layout.message_columns
        for message in row[column]
    }
    return tuple(sorted(roles - _KNOWN_ROLES))
