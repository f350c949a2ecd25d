"""What all rows of a split have in common (`FormatInfo`), and what is found in them (`RowFinding`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from hf_rocm_tune.data.formats.names import FUNCTIONS, REJECTED, Kind

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Rows: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True, kw_only=True)
class RowFinding:
    """Something that the rows of a split say and that is not trained so, or that is trained and teaches nothing."""

    what: str  # a phrase that follows "4 of 9 train rows:"
    rows: int
    first: int  # number of the first of these rows, from 1
    by_design: bool = False  # upstream's intention, such as the thinking of earlier turns: told without "warning"

    def line(self, split: str, total: int) -> str:
        """One line; ``total``: rows of the split, or of those that were checked."""
        begin = "" if self.by_design else "warning: "
        return f"{begin}{self.rows:,} of {total:,} {split} rows: {self.what} (first: row {self.first:,})"


@dataclass(frozen=True, kw_only=True)
class FormatInfo:
    """The format that all rows of a split must have, with the dataset's column names."""

    kind: Kind  # TRL's
    content: Mapping[str, str]  # TRL's name of each training column, and its name in the dataset
    messages: frozenset[str]  # those of them that hold lists of messages
    more: tuple[str, ...]  # optional text and earlier turns that go into the prompt
    dropped: tuple[str, ...]  # columns that TRL would misread
    unused: tuple[str, ...] = ()  # columns of other formats, which TRL might read instead
    beside: tuple[str, ...]  # further columns that are checked
    vocabulary: int | None  # size of the model's; None: unknown
    needs_assistant: bool  # every row needs an assistant turn
    role_key: str
    content_key: str
    in_csv: bool  # where words may stand for a missing value
    conversational: bool = False  # a chat template is applied
    mapping: str | None = None  # the changes that `as_trl` makes; None if TRL reads the rows as they are
    rows: int = 0  # that were checked
    joins_parts: bool = False  # the content of messages is in parts, and all are text
    has_calls: bool = False  # a message has tool calls, whose arguments differ in their keys
    text_arguments: bool = False  # of calls: JSON as text, as OpenAI's
    decodes_calls: bool = False  # these become objects, see `convert.with_decoded_calls`
    uneven_kwargs: bool = False  # rows differ in the keys of `TEMPLATE_KWARGS`, which Arrow fills up with nothing
    marked: bool = False  # a message says whether it is in the loss
    findings: tuple[RowFinding, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()  # rows of unlike structure: index of the first, and how many are like it

    @cached_property
    def columns(self) -> list[str]:
        """The columns that are checked."""
        return [*dict.fromkeys((*self.content.values(), *self.more, *self.beside))]

    @property
    def has_tools(self) -> bool:
        """Whether there is a column of tools."""
        return "tools" in self.beside or FUNCTIONS in self.beside

    @property
    def label(self) -> str | None:
        """The column of KTO's label."""
        return self.content.get("label")

    @property
    def splits(self) -> bool:
        """Whether the last message of a conversation is the answer, which TRL has in a column of its own."""
        prompt = self.content.get("prompt")
        if self.content.get("rejected") == REJECTED[0]:
            return True
        return prompt is not None and prompt == self.content.get("completion")

    @property
    def texts(self) -> tuple[str, ...]:
        """The training columns that hold text where TRL has messages beside them."""
        others = (*self.messages, *REJECTED)
        return tuple(column for name, column in self.content.items() if name != "label" and column not in others)

    @property
    def description(self) -> str:
        """One phrase, such as ``messages (conversational, with tools)``."""
        traits = []
        if self.conversational:
            traits.append("conversational")
        if self.has_tools:
            traits.append("with tools")
        name = self.kind.replace("_", "/")
        return f"{name} ({', '.join(traits)})" if traits else name


def is_renamed(kind: Kind, content: Mapping[str, str]) -> bool:
    """Whether a training column has another name than TRL's, KTO's label aside."""
    return kind != "text" and any(name != column for name, column in content.items() if name != "label")
