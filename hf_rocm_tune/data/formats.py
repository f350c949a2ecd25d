"""Checks the format of the rows before a model is loaded, and converts it to TRL's.

Unchanged are the formats that TRL 1.16 reads; `as_trl` converts Alpaca's and other question-and-answer columns, and
ShareGPT's ``conversations``. Every row of a dataset is checked (about 30 seconds for a million conversations), of a
streamed one the first `STREAMED_ROWS`; not whether a chat template accepts the order of the roles.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import parse_json

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
_BESIDE_IDS = ("labels", "completion_mask", "assistant_masks", "attention_mask")
_SYSTEMS = ("system", "system_prompt")
_HISTORY = "history"  # LLaMA-Factory's and ms-swift's: earlier questions and answers, in pairs
_TURNS = (*_SYSTEMS, _HISTORY)
_ASKED = ("user", "assistant")
_KEYS = ("role", "content")  # of a message
_FUNCTIONS = "functions"  # OpenAI's former name of ``tools``
_KWARGS = "chat_template_kwargs"
_KTO_TAG = "kto_tag"  # LLaMA-Factory's name of KTO's ``label``
_REJECTED = ("rejected_response", "rejected_messages")  # ms-swift's: beside a conversation with the chosen answer
_MARGIN = "margin"  # of a pair, which TRL's reward trainer reads
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT's and ms-swift's: a message whose text is a call
MARKS = ("weight", "train", "training", "loss")  # of a message, by OpenAI, Axolotl (both spellings) and ms-swift
#: Words that pandas and other readers of CSV take for a missing value.
_MISSING = frozenset({"NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NULL", "null", "None"})
_TEXT_PARTS = ("text", "input_text", "output_text")  # the latter two in OpenAI's later form
_MARKS = frozenset(MARKS)
_STANDARD_ROLES = frozenset({"user", "assistant", "system", "tool", "developer"})
#: Other names of roles, in lower case. `_CALL_ROLES` are handled where messages are converted.
_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", *_CALL_ROLES), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response"), "tool"),
}
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
    decodes_calls: bool = False  # these become objects, see `with_decoded_calls`
    uneven_kwargs: bool = False  # rows differ in the keys of `_KWARGS`, which Arrow fills up with nothing
    marked: bool = False  # a message says whether it is in the loss
    findings: tuple[RowFinding, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()  # rows of unlike structure: index of the first, and how many are like it

    @cached_property
    def columns(self) -> list[str]:
        """The columns that are checked."""
        return [*dict.fromkeys((*self.content.values(), *self.more, *self.beside))]

    @property
    def splits(self) -> bool:
        """Whether the last message of a conversation is the answer, which TRL has in a column of its own."""
        rejected, prompt = self.content.get("rejected"), self.content.get("prompt")
        return rejected == _REJECTED[0] or (prompt is not None and prompt == self.content.get("completion"))

    @property
    def texts(self) -> tuple[str, ...]:
        """The training columns that hold text where TRL has messages beside them."""
        others = (*self.messages, *_REJECTED)
        return tuple(column for name, column in self.content.items() if name != "label" and column not in others)

    @property
    def description(self) -> str:
        """One phrase, such as ``messages (conversational, with tools)``."""
        has_tools = {"tools", _FUNCTIONS} & {*self.beside}
        traits = ["conversational"] * self.conversational + ["with tools"] * bool(has_tools)
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
    in_csv: bool = False,
    opening: str | None = None,
) -> FormatInfo:
    """Recognise the format of the rows and check them.

    Args:
        dataset: rows of one split.
        method, assistant_only_loss, completion_only_loss, dataset_text_field: the verb, and TRL's flags.
        has_chat_template: of the tokenizer, or given.
        model_name, split: for messages.
        vocabulary: number of token ids of the model; None: unknown.
        in_csv: whether the rows come from CSV, where a word (`_MISSING`) may stand for a missing value.
        opening: the token with which the tokenizer begins each text by itself; None: with none.

    Raises:
        UsageError: the columns fit no format, or a row does not; it names the row.
    """
    from datasets import Dataset

    first = next(iter(dataset), None)
    if first is None:
        raise UsageError(f"the '{split}' split is empty: there are no rows to check or to train on")
    columns = list(dataset.column_names or first)
    layout = _layout(columns, first, method, dataset_text_field, split, assistant_only_loss, vocabulary, in_csv)
    _check_flags(layout, columns, completion_only_loss, split)
    _check_mixed(layout, first, split)
    seen = _Seen(None if _is_renamed(layout.kind, layout.content) else opening)
    for number, row in enumerate(_rows(dataset, layout), start=1):
        if fault := _fault_in(row, layout):
            begins = repr({column: row[column] for column in layout.columns if column in row})[:120]
            raise UsageError(f"row {number} of the '{split}' split: {fault}; the row begins {begins}")
        seen.note(row, number, layout)
    if layout.messages and not has_chat_template:
        raise UsageError(
            f"the '{split}' rows are conversations, but the tokenizer of '{model_name}' has no chat template: name a "
            "template file, or a model whose template to take, with --chat_template_path"
        )
    if _KWARGS in layout.beside and not isinstance(dataset, Dataset):  # later rows may lack them
        seen.traits.add("uneven kwargs")
    return _completed(layout, seen, columns, first, has_chat_template)


def _completed(
    layout: FormatInfo, seen: _Seen, columns: list[str], first: Mapping[str, Any], has_chat_template: bool
) -> FormatInfo:
    """What `as_trl` has to change and what is told, once all rows have been seen."""
    known = layout.columns
    layout = replace(
        layout,
        more=tuple(name for name in layout.more if name not in _TURNS or name in seen.filled),
        unused=tuple(_unused_formats(layout, columns)),
        joins_parts="text parts" in seen.traits and "other parts" not in seen.traits,
        uneven_kwargs="uneven kwargs" in seen.traits,
    )
    renamed = _is_renamed(layout.kind, layout.content)
    added = not {*_TURNS}.isdisjoint(layout.more)
    shown = has_chat_template and _shows_pictures(layout, columns, first)
    conversational = bool(layout.messages) or ((renamed or added or shown) and has_chat_template)
    layout = replace(layout, conversational=conversational)
    if not conversational:  # a chat template reads them
        known = [name for name in known if name not in _OF_TEMPLATE]
        layout = replace(layout, beside=tuple(name for name in layout.beside if name not in _OF_TEMPLATE))
    mapping = None
    if renamed or added or shown or _has_other_messages(layout, seen, first):
        mapping = _in_words(layout, conversational, seen)
    shapes: tuple[tuple[int, int], ...] = ()
    if conversational:
        shapes = tuple((start, count) for start, count in seen.shapes.values())
    return replace(
        layout,
        mapping=mapping,
        rows=seen.count,
        has_calls=bool({"tool_calls", *_CALL_ROLES} & seen.traits),
        text_arguments="text arguments" in seen.traits,
        marked="mark" in seen.traits,
        findings=(*seen.findings(layout), *_unused(layout, known, columns, seen.count)),
        shapes=shapes,
    )


def _has_other_messages(layout: FormatInfo, seen: _Seen, first: Mapping[str, Any]) -> bool:
    """Whether messages, calls, tools or labels are written otherwise than TRL reads them."""
    return bool(
        layout.dropped
        or layout.joins_parts
        or (layout.role_key, layout.content_key) != _KEYS
        or any(_role(role) != role for role in seen.roles)
        or (layout.messages and layout.texts)
        or layout.content.get("label", "label") != "label"
        or any(isinstance(first[column], dict) for column in layout.messages)
        or {*_CALL_ROLES, _FUNCTIONS, "padding", "bare tools", "uneven kwargs"} & seen.traits
    )


def _shows_pictures(layout: FormatInfo, columns: list[str], first: Mapping[str, Any]) -> bool:
    """Whether pictures beside a prompt of text have no place in it: it has no placeholder of the model's own."""
    if layout.messages or "prompt" not in layout.content or {"image", "images"}.isdisjoint(columns):
        return False
    return not _has_placeholder(str(first[layout.content["prompt"]]))


def _has_placeholder(text: str) -> bool:
    """Whether a text has what models read as a picture, other than the toolkits' ``<image>``."""
    found = re.findall(r"<\|?\w*(?:image|vision|img)\w*\|?>|\[IMG\]", text, re.IGNORECASE)
    return any(each != "<image>" for each in found)


def _unused_formats(layout: FormatInfo, columns: list[str]) -> list[str]:
    if layout.kind == "prompt":  # reward functions read them
        return []
    read = (*layout.columns, *layout.content, *layout.dropped)
    return [name for name in columns if name in (*_READ_BY_TRL, *_BESIDE_IDS) and name not in read]


def _unused(layout: FormatInfo, known: list[str], columns: list[str], rows: int) -> list[RowFinding]:
    """Columns that nothing reads, of those not ``known``: a warning for training data in another format."""
    pictures = ("image", "images") if layout.messages or layout.conversational else ()
    unused = [name for name in columns if name not in (*known, *layout.dropped, *pictures)]
    if layout.kind == "prompt":  # reward functions read all columns
        unused = [name for name in unused if name in _OF_TEMPLATE]
        what = "not in the prompt, but given to the reward functions"
    else:
        what = "not used"
    parts = ([name for name in unused if (name in _TRAINING) == trains] for trains in (True, False))
    return [
        RowFinding(
            what=f"{what}: column{'s' * (len(names) > 1)} {', '.join(map(repr, names))}",
            rows=rows,
            first=1,
            by_design=not trains,
        )
        for names, trains in zip(parts, (True, False), strict=True)
        if names
    ]


_READ_BY_TRL = frozenset({"prompt", "completion", "messages", "conversations", "text", "chosen", "rejected"})
#: Columns that would be training data in another format, here or in another toolkit.
_TRAINING = frozenset(
    {*_READ_BY_TRL, *_PROMPTS, *_ANSWERS, *_MORE, *_TURNS, "tools", _FUNCTIONS, "documents", "chat_history", "label"}
    | {"reasoning", "reasoning_content", "thinking", *_REJECTED, _KTO_TAG, _KWARGS, *_BESIDE_IDS}
)
_OF_TEMPLATE = ("tools", _FUNCTIONS, _KWARGS)


class _Seen:
    """What the rows of a split have in common, gathered row by row."""

    def __init__(self, opening: str | None = None) -> None:
        self.count = 0
        self._opening = opening
        self.roles = set[str]()
        self.filled = set[str]()  # columns of `_TURNS` that have a value
        self.traits = set[str]()
        self.labels = set[bool]()
        self.shapes: dict[int, list[int]] = {}
        self.empty: dict[str, list[int]] = {}

    def note(self, row: Mapping[str, Any], number: int, layout: FormatInfo) -> None:
        self.count = number
        shape: list[Any] = []
        for column in layout.columns:
            value = row.get(column)
            if column in layout.messages:
                for message in _turns(value):
                    shape.append(self._shape(message, layout))
            elif column in layout.more or column in ("tools", _FUNCTIONS):
                shape.append((column, bool(value)))
                if layout.in_csv and value in _MISSING:
                    self._add(f"a word that may stand for a missing value is read as it stands in '{column}'", number)
                if value and column in _TURNS:
                    self.filled.add(column)
                if value and column == _FUNCTIONS:
                    self.traits.add(_FUNCTIONS)
                if value and column == "tools" and _are_bare(value):
                    self.traits.add("bare tools")
            elif column == _KWARGS:
                shape.append(tuple((key, str(each)) for key, each in (value or {}).items() if each is not None))
                if value is None or None in value.values():
                    self.traits.add("uneven kwargs")
            elif column == layout.content.get("label"):
                self.labels.add(bool(value))
            elif column == "attention_mask" and 0 in (value or ()):
                self.traits.add("padding")
        place = self.shapes.setdefault(hash(tuple(shape)), [number - 1, 0])
        place[1] += 1
        self._note_empty(row, number, layout)

    def _shape(self, message: Mapping[str, Any], layout: FormatInfo) -> tuple[Any, ...]:
        """What a chat template can decide by: the role, keys that have a value, kinds of content, thinking."""
        role, content = message[layout.role_key], message.get(layout.content_key)
        self.roles.add(role)
        keys = tuple(key for key, value in message.items() if value is not None and value != [])
        if _is_call_role(role):
            self.traits.add(role.strip().lower())
        for key in ("tool_calls", "function_call"):
            if key not in keys:
                continue
            self.traits.add(key)
            if any(isinstance(arguments, str) for arguments in _arguments_of(message[key])):
                self.traits.add("text arguments")
        if not _MARKS.isdisjoint(keys):
            self.traits.add("mark")
        if isinstance(content, str):
            thinking = ("<think>" in content) + 2 * ("</think>" in content)
            return role, keys, bool(content.strip()), thinking
        parts = tuple(part.get("type") for part in content) if isinstance(content, list) else ()
        if parts and isinstance(content, list):
            self.traits.add("text parts" if _is_text(content) else "other parts")
        return role, keys, parts

    def _note_empty(self, row: Mapping[str, Any], number: int, layout: FormatInfo) -> None:
        pair: list[Any] = [row.get(layout.content[name]) for name in ("chosen", "rejected") if name in layout.content]
        if pair and layout.splits:
            pair[0] = pair[0][-1].get(layout.content_key)
        if pair and pair[0] == pair[1]:
            self._add("the chosen and the rejected answer are the same, which teaches nothing", number)
        for name in ("completion", "chosen", "rejected", "messages"):
            if name not in layout.content:
                continue
            value = row.get(layout.content[name])
            if isinstance(value, str):
                empty = not value.strip()
            else:
                answers = [turn for turn in _turns(value) if _role(turn[layout.role_key]) == "assistant"]
                empty = any(_is_empty(turn, layout) for turn in answers)
                if not answers and name in ("completion", "messages"):
                    self._add("there is no answer of the assistant", number)
            if empty:
                self._add("an answer is empty", number)
        begin: Any = row.get(layout.columns[0]) if layout.kind == "text" or self._opening else None
        if layout.kind == "text" and not begin.strip():
            self._add("the text is empty", number)
        if self._opening and isinstance(begin, str) and begin.startswith(self._opening):
            self._add(
                f"the text begins with {self._opening}, which the tokenizer adds too, so that it is there twice", number
            )

    def _add(self, what: str, number: int) -> None:
        place = self.empty.setdefault(what, [number, 0])
        place[1] += 1

    def findings(self, layout: FormatInfo) -> tuple[RowFinding, ...]:
        found = [RowFinding(what=what, rows=rows, first=first) for what, (first, rows) in self.empty.items()]
        if layout.kind == "unpaired" and len(self.labels) == 1:
            word = "good" if self.labels == {True} else "bad"
            found.append(
                RowFinding(what=f"all answers have the label {word}; KTO compares both", rows=self.count, first=1)
            )
        return tuple(found)


def _is_text(content: list[Any]) -> bool:
    """Whether all parts of a message's content are text."""
    return all(part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str) for part in content)


def _is_empty(message: Mapping[str, Any], layout: FormatInfo) -> bool:
    """Whether an assistant's turn has neither text nor a call."""
    content = message.get(layout.content_key)
    if message.get("tool_calls") or message.get("function_call"):
        return False
    if isinstance(content, list):
        return not any(part.get("text") or part.get("type") != "text" for part in content)
    return not (content or "").strip()


def with_decoded_calls(info: FormatInfo) -> FormatInfo:
    """For a chat template that writes arguments of calls as JSON, and text among them as a JSON string in quotes."""
    more = "arguments of calls, JSON as text, become objects"
    return replace(info, decodes_calls=True, mapping=f"{info.mapping}, {more}" if info.mapping else more)


def check_later(
    dataset: Rows,
    info: FormatInfo,
    split: str,
    check_structure: Callable[..., None],
    tell: Callable[[RowFinding], None],
) -> Rows:
    """A stream that refuses a bad row when it comes to it: `check_format` reads only the first ones.

    Args:
        dataset: a stream, not yet converted.
        info: of its first rows.
        split: for messages.
        check_structure: called with a row and its number for each structure that was not among the first rows.
        tell: called with what is found in later rows, once for each kind.

    Raises:
        UsageError: while the rows are read; it names the row.
    """
    arguments = {"layout": info, "split": split, "seen": _Seen(), "check_structure": check_structure, "tell": tell}
    return dataset.map(_checked, with_indices=True, fn_kwargs=arguments, features=dataset.features)


def place_of(number: int, split: str) -> str:
    """A row in words, such as ``row 7 of the 'train' split``; a worker of a loader counts only what it reads itself."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    counted = "" if worker is None else f" as loader worker {worker.id + 1} of {worker.num_workers} counts them"
    return f"row {number:,} of the '{split}' split{counted}"


def _checked(
    row: dict[str, Any],
    index: int,
    *,
    layout: FormatInfo,
    split: str,
    seen: _Seen,
    check_structure: Callable[..., None],
    tell: Callable[[RowFinding], None],
) -> dict[str, Any]:
    if fault := _fault_in(row, layout):
        raise UsageError(f"{place_of(index + 1, split)}: {fault}")
    known, kinds = len(seen.shapes), len(seen.empty)
    seen.note(row, index + 1, layout)
    if index >= STREAMED_ROWS:
        if len(seen.shapes) > known:
            check_structure(row, index + 1)
        for what in [*seen.empty][kinds:]:
            tell(RowFinding(what=what, rows=1, first=index + 1))
    return row


# ---- in TRL's format ------------------------------------------------------------------------------------------------


def as_trl(dataset: Rows, info: FormatInfo) -> Rows:
    """The rows with TRL's columns, in order, and no column of another format; the same object if TRL reads them as they
    are."""
    from datasets import Dataset, Features, Json, List, Value

    if info.unused:
        dataset = dataset.remove_columns([*info.unused])
    if info.mapping is None:
        return dataset
    read = {*info.content.values(), *info.more, *info.dropped}
    read |= {_FUNCTIONS, "attention_mask"} & {*info.beside}
    dropped = {*info.dropped} & {*info.content}
    more: dict[str, Any] = {"remove_columns": sorted((read - {*info.content}) | dropped)}
    if isinstance(dataset, Dataset) and info.conversational and (info.has_calls or info.uneven_kwargs):
        # Arrow would give the arguments of each call, and of each template, the keys of all others
        kept = {name: kind for name, kind in dataset.features.items() if name not in more["remove_columns"]}
        kept |= {name: List(Json()) for name in info.content if name != "label"}
        if "label" in info.content:
            kept["label"] = dataset.features[info.content["label"]]
        if {"tools", _FUNCTIONS} & {*info.beside}:
            kept["tools"] = Value("string")
        if info.uneven_kwargs:
            kept[_KWARGS] = Json()
        more["features"] = Features(kept)
    return dataset.map(in_trls_format, fn_kwargs={"layout": info}, **more)


def in_trls_format(row: Mapping[str, Any], *, layout: FormatInfo) -> dict[str, Any]:
    """The columns of one row that TRL trains on, in its format.

    Raises:
        UsageError: a call in ShareGPT's form is no JSON.
    """
    if layout.kind == "tokenized":
        return _without_padding(row, layout)
    new: dict[str, Any] = {}
    added = [row[name] for name in layout.more if name not in _TURNS and row[name]]
    begins = "messages" if "messages" in layout.content else "prompt"
    for name, column in layout.content.items():
        value = row[column]
        if name == "label":
            new[name] = value
            continue
        if column == _REJECTED[0]:
            value = [*new["chosen"][:-1], {"role": "assistant", "content": value}]
        elif isinstance(value, str):
            if name == "prompt" and column != name:
                value = "\n\n".join([value, *added]) + ("" if layout.conversational else "\n")
            if layout.conversational:
                value = [{"role": "user" if name == "prompt" else "assistant", "content": value}]
        else:
            value = _messages(_turns(value), layout)
            if layout.splits and name != "chosen":
                value = value[:-1] if name == "prompt" else value[-1:]
        if (name == begins or begins not in layout.content) and column != _REJECTED[0]:
            value = _with_earlier(value, row, layout)
        new[name] = value
    tools = row.get("tools") or row.get(_FUNCTIONS)
    if {"tools", _FUNCTIONS} & {*layout.beside}:
        listed = json.loads(tools) if isinstance(tools, str) else tools
        wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed or ()]
        new["tools"] = json.dumps(wrapped, ensure_ascii=False) if wrapped else None
    if layout.uneven_kwargs:
        new[_KWARGS] = {key: value for key, value in (row[_KWARGS] or {}).items() if value is not None}
    return new


def _with_earlier(value: Any, row: Mapping[str, Any], layout: FormatInfo) -> Any:
    """Text or messages, after the system prompt and the earlier turns that have columns of their own."""
    system = next((row[name] for name in _SYSTEMS if name in layout.more), None)
    history = (row.get(_HISTORY) if _HISTORY in layout.more else None) or []
    if isinstance(value, str):
        return "\n\n".join([*([system] if system else []), *(text for pair in history for text in pair), value])
    earlier = [{"role": role, "content": text} for pair in history for role, text in zip(_ASKED, pair, strict=True)]
    if system and value[0]["role"] != "system":
        earlier.insert(0, {"role": "system", "content": system})
    elif value[0]["role"] == "system":
        return [value[0], *earlier, *value[1:]]
    return [*earlier, *value]


def _without_padding(row: Mapping[str, Any], layout: FormatInfo) -> dict[str, Any]:
    mask = row["attention_mask"]
    names = [name for name in layout.columns if name != "attention_mask"]
    return {name: [entry for entry, real in zip(row[name], mask, strict=True) if real] for name in names}


@lru_cache(maxsize=1024)
def _role(role: str) -> str:
    """TRL's name of a role, whatever its case; a role that is not known stays."""
    lower = role.strip().lower()
    return _ROLES.get(lower, lower if lower in _STANDARD_ROLES else role)


@lru_cache(maxsize=1024)
def _is_call_role(role: str) -> bool:
    return role.strip().lower() in _CALL_ROLES


def _messages(turns: list[Any], layout: FormatInfo) -> list[dict[str, Any]]:
    """Messages in TRL's form; calls that are messages of their own become part of the answer that they follow."""
    new: list[dict[str, Any]] = []
    for turn in turns:
        message = _message(turn, layout)
        if not (new and _is_call_role(turn[layout.role_key]) and _are_one_answer(new[-1], message)):
            new.append(message)
            continue
        new[-1]["tool_calls"] = [*new[-1].get("tool_calls", ()), *message["tool_calls"]]
    return new


def _are_one_answer(message: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether a call belongs to the message before it: an answer that is in the loss as the call is, or is not."""
    return message["role"] == "assistant" and all(message.get(mark) == call.get(mark) for mark in MARKS)


def _message(message: Mapping[str, Any], layout: FormatInfo) -> dict[str, Any]:
    """A message in TRL's form: OpenAI's former ``function_call`` and ShareGPT's become ``tool_calls``."""
    role, content = message[layout.role_key], message.get(layout.content_key)
    if layout.joins_parts and isinstance(content, list) and _is_text(content):
        content = "".join(part["text"] for part in content)
    own = (layout.role_key, layout.content_key, "function_call")
    rest = {key: value for key, value in message.items() if key not in own and value is not None}
    calls = message.get("function_call")
    if _is_call_role(role):
        calls, content = json.loads(content or ""), ""
    if calls:
        listed = calls if isinstance(calls, list) else [calls]
        rest["tool_calls"] = [{"type": "function", "function": call} for call in listed]
    if layout.decodes_calls and "tool_calls" in rest:
        rest["tool_calls"] = [_decoded(call) for call in rest["tool_calls"]]
    return {"role": _role(role), "content": content, **rest}


def _arguments_of(calls: Any) -> Iterator[Any]:
    """The arguments of a message's calls, as they stand."""
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, dict):
            yield (call.get("function") or call).get("arguments")


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


def _are_bare(tools: Any) -> bool:
    """Whether tools lack OpenAI's ``function`` around them, as in LLaMA-Factory's files."""
    listed = json.loads(tools) if isinstance(tools, str) else tools
    return any(isinstance(tool, dict) and "function" not in tool for tool in listed)


def _in_words(layout: FormatInfo, conversational: bool, seen: _Seen) -> str:
    said = _columns_in_words(layout)
    said += [f"'{name}' is the system prompt" for name in layout.more if name in _SYSTEMS]
    said += [f"'{name}' goes into the prompt" for name in layout.more if name not in _TURNS]
    said += [f"'{_HISTORY}' stands before it, read and not learned"] if _HISTORY in layout.more else []
    said += [f"'{name}' is not used" for name in layout.dropped]
    said += [f"{role} is {_role(role)}" for role in sorted(seen.roles) if _role(role) != role]
    keys = (layout.role_key, layout.content_key)
    said += [f"{'/'.join(keys)} are {'/'.join(_KEYS)}"] if keys != _KEYS else []
    said += ["parts of a message become one text"] if layout.joins_parts else []
    said += [f"{name} becomes tool_calls" for name in _CALL_ROLES if name in seen.traits]
    said += [f"'{_FUNCTIONS}' are the tools"] if _FUNCTIONS in seen.traits else []
    said += ["positions with attention_mask 0 are removed"] if "padding" in seen.traits else []
    said += [f"keys of '{_KWARGS}' that a row lacks are not given to the template"] if layout.uneven_kwargs else []
    if layout.texts and layout.kind != "tokenized":
        plain = "as plain text, because the tokenizer has no chat template"
        said.append("text becomes chat messages" if conversational else plain)
    return ", ".join(said)


def _columns_in_words(layout: FormatInfo) -> list[str]:
    if layout.splits:
        (chat,) = layout.messages
        label = layout.content.get("label", "label")
        tagged = [] if label == "label" else [f"'{label}' is the label"]
        if layout.kind == "preference":
            return [f"'{chat}' is the chosen conversation, whose last answer '{_REJECTED[0]}' replaces in the rejected"]
        return [f"the last message of '{chat}' is the completion and the others are the prompt", *tagged]
    return [f"'{column}' is the {name}" for name, column in layout.content.items() if name != column]


# ---- recognising the format -----------------------------------------------------------------------------------------


def _layout(
    columns: list[str],
    first: dict[str, Any],
    method: Method,
    text_field: str,
    split: str,
    needs_assistant: bool,
    vocabulary: int | None,
    in_csv: bool,
) -> FormatInfo:
    kind, content, dropped = recognise(columns, first, method, text_field, split)
    messages: set[str] = set()
    more: list[str] = []
    if kind not in ("text", "tokenized"):
        for column in content.values():
            if isinstance(first[column], list | dict) or column in _CHATS:
                messages.add(column)
        messages.discard(_REJECTED[0])
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
        vocabulary=vocabulary if kind == "tokenized" else None,
        needs_assistant=needs_assistant,
        role_key=role_key,
        content_key=content_key,
    )


def _columns_of_questions(
    columns: list[str], first: Mapping[str, Any], kind: Kind, content: Mapping[str, str]
) -> list[str]:
    """Columns that belong to a question beside it: Alpaca's input, a system message, the turns before."""
    question = content.get("prompt", "prompt")
    is_text = isinstance(first.get(content.get("prompt", "")), str)
    taken: list[str] = []
    if is_text and question != "prompt" and kind != "prompt":  # rewards may read columns beside a prompt
        taken += _MORE
    taken += [name for name in _SYSTEMS if name in columns][:1]
    if is_text:
        taken.append(_HISTORY)
    return [name for name in columns if name in taken and name not in content.values()]


def _columns_beside(
    columns: list[str], kind: Kind, content: Mapping[str, str], method: Method, *, has_messages: bool
) -> Iterator[str]:
    """Columns that stay as they are: of tokens, a margin of rewards, and what a chat template reads."""
    if kind == "tokenized":
        names = [*_BESIDE_IDS]
    elif method == "reward":
        names = [_MARGIN]
    else:
        names = []
    if kind != "prompt" and (has_messages or _is_renamed(kind, content)):
        names += [name for name in _OF_TEMPLATE if name != _FUNCTIONS or "tools" not in columns]
    for name in names:
        if name in columns:
            yield name


def _keys_of_messages(first: Mapping[str, Any], messages: Collection[str]) -> tuple[str, str]:
    """The keys of a message that name its role and hold its text, by the first one of the first row."""
    message: Any = {}
    for column in messages:
        if turns := list(_turns(first[column])):
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


_CHATS = ("messages", "conversations")


def _is_renamed(kind: Kind, content: Mapping[str, str]) -> bool:
    """Whether a training column has another name than TRL's, KTO's label aside."""
    return kind != "text" and any(name != column for name, column in content.items() if name != "label")


def _turns(value: Any) -> list[Any]:
    """Messages: a list of them, one, or lists of their roles and contents, as older `datasets` keep them."""
    if isinstance(value, dict) and isinstance(value.get("role") or value.get("from"), list):
        return [dict(zip(value, message, strict=False)) for message in zip(*value.values(), strict=False)]
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
    rejected = next((name for name in _REJECTED if name in columns), None)
    if method in ("dpo", "orpo", "reward", "kto") and chat and rejected:
        return "preference", {"chosen": chat, "rejected": rejected}, ()
    label = next((name for name in ("label", _KTO_TAG) if name in columns), None)
    if method == "kto" and label and prompt and answer:
        return "unpaired", {"prompt": prompt, "completion": answer, "label": label}, ()
    if method == "kto" and label and chat and not prompt and not answer:
        return "unpaired", {"prompt": chat, "completion": chat, "label": label}, ()
    if method == "grpo" and (prompt or chat):
        return "prompt", {"prompt": prompt or str(chat)}, ()
    raise UsageError(_refusal(columns, first, method, text_field, split))


def _only(names: tuple[str, ...], columns: list[str]) -> str | None:
    """The one of these names among the columns: TRL's own, else the only one."""
    found = [name for name in names if name in columns]
    return found[0] if names[0] in columns or len(found) == 1 else None


def _begins(messages: list[Any]) -> bool:
    """Whether a list of messages begins with the prompt."""
    turn = messages[0] if messages else None
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return isinstance(role, str) and _role(role) in ("user", "system", "developer")


def _refusal(columns: list[str], first: dict[str, Any], method: Method, text_field: str, split: str) -> str:
    listed = ", ".join(f"'{column}'" for column in columns)
    accepted = _ACCEPTED[method].format(text=text_field)
    return (
        f"the columns of the '{split}' split fit no format of {method}: found {listed}; accepted {accepted}; "
        f"{_hint(columns, first, method, text_field)}"
    )


def _hint(columns: list[str], first: dict[str, Any], method: Method, text_field: str) -> str:
    """What to do about columns that fit no format."""
    if len(columns) == 1 and (separators := [mark for mark in (";", "\t", "|") if mark in columns[0]]):
        return f"the file is separated by {separators[0]!r}: save it with commas"
    if columns[0].startswith(("{", "[")):
        return "the file holds JSON: give it the suffix .jsonl"
    accepted = {
        "sft": {*_PROMPTS, *_ANSWERS, *_CHATS, text_field},
        "kto": {*_PROMPTS, *_ANSWERS, "chosen", "rejected", "label"},
        "grpo": {*_PROMPTS},
    }.get(method, {*_PROMPTS, "chosen", "rejected"})
    inside = [name for name in columns if _holds_rows(first[name], accepted)]
    if len(inside) > 1 and not any(isinstance(first[name], list) for name in inside):
        return (
            f"the file seems to be one object of which each value ('{inside[0]}', ...) is a row: write them as a list"
        )
    if inside:
        return f"the rows seem to be inside '{inside[0]}': write that list, alone, to a file"
    for column in columns:
        if keys := _unlike_messages(first[column]):
            return f"'{column}' holds objects with {keys}: write them as messages with 'role' and 'content'"
    for names, what in ((_PROMPTS, "the prompt"), (_ANSWERS, "the answer")):
        several = [name for name in names if name in columns]
        if len(several) > 1 and names[0] not in columns:
            return f"{' and '.join(repr(name) for name in several)} could both be {what}: keep one of them"
    if {*_OF_OPENAI} <= {*columns}:
        best, worst = _OF_OPENAI
        return f"write the messages of 'input' as 'prompt', '{best}' as 'chosen' and '{worst}' as 'rejected'"
    chats = next((name for name in _CHATS if name in columns), None)
    if chats and method in ("dpo", "orpo", "reward", "kto"):
        wanted = "'completion'" if method == "kto" else "'chosen' and 'rejected'"
        return f"split the last answer of '{chats}' off: its other messages are the 'prompt', and answers are {wanted}"
    decided = {name for group in (_PROMPTS, _ANSWERS) if _only(group, columns) for name in group}
    missing = sorted(accepted - {*columns} - decided)
    renamed = []
    for column in columns:
        fits = isinstance(first[column], str | list) and column not in accepted
        meant = _MEANT.get(column.lower()) if fits else None
        fits = fits and column not in (*_MORE, *_TURNS)
        near = difflib.get_close_matches(column.lower(), missing, n=1, cutoff=_ALIKE) if fits else []
        if name := meant if meant in missing else next(iter(near), None):
            renamed.append(f"rename '{column}' to '{name}'?")
    text = ", or name the column of plain text with --dataset_text_field NAME" if method == "sft" else ""
    return ", ".join(renamed) or f"rename the columns{text}"


_OF_OPENAI = ("preferred_output", "non_preferred_output")
_ALIKE = 0.75  # of `difflib`: 'conversation' is like 'conversations', and 'version' is not
#: Columns that are likely to be meant as prompt or answer where no better ones are there.
_MEANT = {
    **dict.fromkeys(("input", "user", "human", "instructions", "questions", "article", "problem"), "prompt"),
    **dict.fromkeys(("assistant", "gpt", "bot", "target", "answers", "responses"), "completion"),
    **dict.fromkeys(("generation", "summary", "solution", "reply"), "completion"),
}


def _unlike_messages(value: Any) -> str:
    """The keys of a list of objects that are no messages, such as ``'human', 'assistant'``; "": it is no such list."""
    inner = value[0] if isinstance(value, list) and value else None
    keys = [] if not isinstance(inner, dict) else [key for key, each in inner.items() if each is not None]
    return "" if {"role", "from"} & {*keys} else ", ".join(map(repr, keys))


def _holds_rows(value: Any, accepted: set[str]) -> bool:
    """Whether a value of a column is itself a row, or a list of rows."""
    inner = value[0] if isinstance(value, list) and value else value
    return isinstance(inner, dict) and bool(accepted & {*inner}) and "role" not in inner and "from" not in inner


def _check_mixed(layout: FormatInfo, first: dict[str, Any], split: str) -> None:
    """Refuses rows of two formats in one file, which Arrow fills up with nothing."""
    wanted = [*layout.content.values()]
    other = next((name for name in (*_CHATS, "text", "prompt") if name not in wanted and first.get(name)), None)
    if other and all(first.get(name) is None for name in wanted):
        raise UsageError(
            f"the '{split}' rows are of two formats: row 1 has '{other}', others {' and '.join(map(repr, wanted))}: "
            "give each format a file of its own"
        )


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
            fault = _fault_in_messages(_turns(value) if isinstance(value, dict) else value, layout, column)
        elif column in ("tools", _FUNCTIONS):
            fault = _fault_in_tools(value)
        else:
            right, what = isinstance(value, str) or (value is None and column in layout.more), "text"
            if column == layout.content.get("label"):
                right, what = value in (True, False), "true or false"
            elif column == _MARGIN:
                right, what = isinstance(value, int | float), "a number"
            elif column == _KWARGS:
                right, what = isinstance(value, dict | None), "an object"
            elif column == _HISTORY:
                right, what = _is_history(value), "pairs of a question and an answer"
            fault = None if right else f"holds {_named(value, layout)}, not {what}"
            if fault and layout.in_csv and isinstance(value, int | float):
                fault += ": CSV tells no text from numbers, so give such rows as .jsonl"
            if layout.in_csv and column in layout.content.values() and value in _MISSING:
                fault = (
                    f"holds {value!r}, a word that stands for a missing value in CSV: leave the row out, or give the "
                    "rows as .jsonl if the word is meant"
                )
        if fault:
            return f"column '{column}' {fault}"
    if fault := _fault_in_system(row, layout) or _fault_in_end(row, layout):
        return fault
    if layout.kind == "preference" and "prompt" not in layout.content and layout.messages and not layout.splits:
        chosen, rejected = (_turns(row[layout.content[name]]) for name in ("chosen", "rejected"))
        if chosen[0] != rejected[0]:
            return "'chosen' and 'rejected' do not begin with the same prompt, and there is no column 'prompt'"
    return None


def _fault_in_system(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """Two system prompts of one row that differ: which is meant is not known."""
    for column in layout.more:
        if column not in _SYSTEMS or not row.get(column):
            continue
        for name in layout.messages:
            first = _turns(row[name])[0]
            if _role(first[layout.role_key]) == "system" and first.get(layout.content_key) != row[column]:
                return f"column '{column}' and the first message of '{name}' are system prompts that differ: keep one"
    return None


def _fault_in_end(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """A conversation that does not end as it has to where its last message has a meaning of its own."""
    chat = layout.content.get("prompt", layout.content.get("chosen", ""))
    if chat not in _CHATS or not (layout.splits or layout.kind == "prompt"):
        return None
    turns = _turns(row[chat])
    answered = _role(turns[-1][layout.role_key]) == "assistant"
    if layout.kind == "prompt" and answered:
        return f"column '{chat}' ends with an answer, and GRPO writes the answers itself: leave it out"
    if layout.splits and not (answered and len(turns) > 1):
        return f"column '{chat}' does not end with a question and the assistant's answer"
    return None


def _is_history(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(
            isinstance(pair, list) and len(pair) == len(_ASKED) and all(isinstance(text, str) for text in pair)
            for pair in value
        )
    )


def _fault_in_messages(value: Any, layout: FormatInfo, column: str) -> str | None:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return "holds text that looks like JSON, not a list of messages: write the list itself, in a .jsonl file"
    if not isinstance(value, list) or not value:
        return f"holds {_named(value, layout)}, not a list of messages"
    role, content = layout.role_key, layout.content_key
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get(role), str):
            keys = [f"'{key}'" for key in message if message[key] is not None] if isinstance(message, dict) else []
            what = f"an object with {', '.join(keys)}" if keys else _named(message, layout)
            return f"message {number} is {what}, not an object with '{role}' and '{content}'"
        said = message.get(content)
        parts = isinstance(said, list) and said and all(isinstance(each, dict) and "type" in each for each in said)
        calls = message.get("tool_calls") or message.get("function_call")
        if not (isinstance(said, str) or parts or (said is None and calls)):
            return f"message {number} has {_named(said, layout)} as '{content}', not text"
        if _is_call_role(message[role]) and not _is_call(said):
            return f"message {number} is a {message[role]}, and its '{content}' is no JSON object with 'name'"
        if fault := _fault_in_calls(message.get("tool_calls")):
            return f"message {number} {fault}"
        for mark in () if _MARKS.isdisjoint(message) else MARKS:
            if message.get(mark) not in (None, True, False):  # 0 and 1 are equal to them
                return f"message {number} has '{mark}': {message[mark]!r}, and a message is in the loss (1) or not (0)"
    roles = {_role(message[role]) for message in value}
    if layout.needs_assistant and layout.content.get("prompt") != column and "assistant" not in roles:
        return "has no message of the role 'assistant', which --assistant_only_loss needs"
    return None


def _fault_in_calls(calls: Any) -> str | None:
    """What is wrong with the ``tool_calls`` of a message: a template would leave out what it cannot read."""
    if not calls:
        return None
    if not isinstance(calls, list):
        return f"has {_named(calls)} as 'tool_calls', not a list of calls"
    for call in calls:
        function = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return "has a call in 'tool_calls' that names no function: {'function': {'name': ..., 'arguments': ...}}"
    return None


def _fault_in_tokens(row: dict[str, Any], layout: FormatInfo) -> str | None:
    """Of lists of token ids and masks: their types and lengths, and ids that the model does not have."""
    count, end = len(row.get("input_ids") or ()), layout.vocabulary or sys.maxsize
    for column in layout.columns:
        value, mask = row.get(column), column not in ("input_ids", "labels")
        what = "zeros and ones" if mask else "token ids"
        if not isinstance(value, list) or not value or {*map(type, value)} - {int, bool}:
            return f"column '{column}' is {_named(value, layout)} and no list of {what}"
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
            value = parse_json(value)
        except json.JSONDecodeError as error:
            return f"is not valid JSON ({error.msg}, column {error.colno})"
        except ValueError as error:
            return f"is JSON that is not used: {error}"
    return None if isinstance(value, list | None) else f"holds {_named(value)}, not a list of tools or its JSON"


def _is_call(text: Any) -> bool:
    try:
        calls = json.loads(text)
    except (TypeError, json.JSONDecodeError):
        return False
    listed = calls if isinstance(calls, list) else [calls]
    return all(isinstance(call, dict) and "name" in call for call in listed)


def _named(value: Any, layout: FormatInfo | None = None) -> str:
    if value is None:
        return "nothing (an empty cell)" if layout and layout.in_csv else "nothing (null)"
    if value == []:
        return "an empty list"
    kinds = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    kinds[bytes] = "bytes"
    return kinds.get(type(value), f"a {type(value).__name__}")
