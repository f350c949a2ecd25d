"""What the rows of a split have in common, gathered row by row, and what in them teaches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.data.formats.layout import FormatInfo, RowFinding
from hf_rocm_tune.data.formats.messages import are_bare, arguments_of, is_call_role, is_text, standard_role, turns_of
from hf_rocm_tune.data.formats.names import FUNCTIONS, MARKS, MISSING, TEMPLATE_KWARGS, TURNS

_MARKS = frozenset(MARKS)


class RowTraits:
    """Gathered by `note`, once a row.

    Attributes:
        count: rows so far.
        roles: as they are written.
        filled: columns of `TURNS` that have a value.
        kinds: names of what some row has, such as ``tool_calls``, ``text parts``, ``padding``.
        shapes: by the hash of a row's structure: the index of the first such row, and how many there are.
        empty: by what was found: the number of the first such row, and how many there are.
    """

    def __init__(self, opening: str | None = None) -> None:
        """``opening``: the token with which the tokenizer begins each text by itself; None: with none."""
        self.count = 0
        self.roles = set[str]()
        self.filled = set[str]()
        self.kinds = set[str]()
        self.shapes: dict[int, list[int]] = {}
        self.empty: dict[str, list[int]] = {}
        self._labels = set[bool]()
        self._opening = opening

    def record(self, row: Mapping[str, Any], number: int, layout: FormatInfo) -> None:
        """A row that has no fault, and its number from 1."""
        self.count = number
        structure: list[Any] = []
        for column in layout.columns:
            value = row.get(column)
            if column in layout.messages:
                for message in turns_of(value):
                    structure.append(self._structure(message, layout))
            elif column in layout.more or column in ("tools", FUNCTIONS):
                structure.append((column, bool(value)))
                self._record_beside(column, value, number, layout)
            elif column == TEMPLATE_KWARGS:
                given = value or {}
                structure.append(tuple((key, str(option)) for key, option in given.items() if option is not None))
                if value is None or None in value.values():
                    self.kinds.add("uneven kwargs")
            elif column == layout.label:
                self._labels.add(bool(value))
            elif column == "attention_mask" and 0 in (value or ()):
                self.kinds.add("padding")
        shape = self.shapes.setdefault(hash(tuple(structure)), [number - 1, 0])
        shape[1] += 1
        self._record_answers(row, number, layout)
        self._record_text(row, number, layout)

    def _record_beside(self, column: str, value: Any, number: int, layout: FormatInfo) -> None:
        """Of a column beside a question, or of tools."""
        if layout.in_csv and value in MISSING:
            self._add(f"a word that may stand for a missing value is read as it stands in '{column}'", number)
        if not value:
            return
        if column in TURNS:
            self.filled.add(column)
        elif column == FUNCTIONS:
            self.kinds.add(FUNCTIONS)
        elif column == "tools" and are_bare(value):
            self.kinds.add("bare tools")

    def _structure(self, message: Mapping[str, Any], layout: FormatInfo) -> tuple[Any, ...]:
        """What a chat template can decide by: the role, keys that have a value, kinds of content, thinking."""
        role = message[layout.role_key]
        content = message.get(layout.content_key)
        self.roles.add(role)
        keys = tuple(key for key, value in message.items() if value is not None and value != [])
        if is_call_role(role):
            self.kinds.add(role.strip().lower())
        for key in ("tool_calls", "function_call"):
            if key not in keys:
                continue
            self.kinds.add(key)
            if any(isinstance(arguments, str) for arguments in arguments_of(message[key])):
                self.kinds.add("text arguments")
        if not _MARKS.isdisjoint(keys):
            self.kinds.add("mark")
        if isinstance(content, str):
            thinking = ("<think>" in content) + 2 * ("</think>" in content)
            return role, keys, bool(content.strip()), thinking
        if not isinstance(content, list) or not content:
            return role, keys, ()
        kind = "text parts" if is_text(content) else "other parts"
        self.kinds.add(kind)
        return role, keys, tuple(part.get("type") for part in content)

    # ---- what teaches nothing -------------------------------------------------------------------------------

    def _record_answers(self, row: Mapping[str, Any], number: int, layout: FormatInfo) -> None:
        """Answers that are empty, missing, or the same where they should differ."""
        chosen, rejected = (row.get(layout.content.get(name, "")) for name in ("chosen", "rejected"))
        if "chosen" in layout.content:
            if layout.splits:
                chosen = chosen[-1].get(layout.content_key)  # type: ignore[index]  # a list of messages
            if chosen == rejected:
                self._add("the chosen and the rejected answer are the same, which teaches nothing", number)
        for name in ("completion", "chosen", "rejected", "messages"):
            if name not in layout.content:
                continue
            value = row.get(layout.content[name])
            if isinstance(value, str):
                empty = not value.strip()
            else:
                answers = [turn for turn in turns_of(value) if standard_role(turn[layout.role_key]) == "assistant"]
                empty = any(_is_empty(turn, layout) for turn in answers)
                if not answers and name in ("completion", "messages"):
                    self._add("there is no answer of the assistant", number)
            if empty:
                self._add("an answer is empty", number)

    def _record_text(self, row: Mapping[str, Any], number: int, layout: FormatInfo) -> None:
        """A text that is empty, or begins as the tokenizer begins it too."""
        if layout.kind != "text" and not self._opening:
            return
        text = row.get(layout.columns[0])
        if layout.kind == "text" and isinstance(text, str) and not text.strip():
            self._add("the text is empty", number)
        if self._opening and isinstance(text, str) and text.startswith(self._opening):
            self._add(
                f"the text begins with {self._opening}, which the tokenizer adds too, so that it is there twice", number
            )

    def _add(self, what: str, number: int) -> None:
        entry = self.empty.setdefault(what, [number, 0])
        entry[1] += 1

    def findings(self, layout: FormatInfo) -> tuple[RowFinding, ...]:
        findings = [RowFinding(what=what, rows=rows, first=first) for what, (first, rows) in self.empty.items()]
        if layout.kind == "unpaired" and len(self._labels) == 1:
            word = "good" if self._labels == {True} else "bad"
            what = f"all answers have the label {word}; KTO compares both"
            findings.append(RowFinding(what=what, rows=self.count, first=1))
        return tuple(findings)


def _is_empty(message: Mapping[str, Any], layout: FormatInfo) -> bool:
    """Whether an assistant's turn has neither text nor a call."""
    if message.get("tool_calls") or message.get("function_call"):
        return False
    content = message.get(layout.content_key)
    if isinstance(content, list):
        return not any(part.get("text") or part.get("type") != "text" for part in content)
    return not (content or "").strip()
