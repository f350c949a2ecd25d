"""Whether a chat template shows what the rows say, and whether it ends an answer with a token at which a model stops.

A template decides by the structure of a row: roles, keys, their order, thinking. So one row of each structure that
`check_format` has counted is rendered, with a mark inside each of its texts; a text whose mark is not in the result is
left out. A search for the text itself would be no proof: the answer "Yes" may also stand in the question. Not covered:
a template that decides by the words of a text; numbers and booleans, of which only unknown keys are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from hf_rocm_tune.data.formats import MARKS, STREAMED_ROWS, FormatInfo, RowFinding, in_trls_format, place_of
from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_rocm_tune.data.formats.layout import Rows

Message = dict[str, Any]

_THINKING = ("reasoning_content", "reasoning", "thinking")
_STRUCTURE = frozenset({"role", "content", "tool_calls", "tool_call_id", "id"})
_NAMES_OF_PARTS = frozenset({"type", "id", "tool_use_id", "tool_call_id"})
_KNOWN_ROLES = frozenset({"user", "assistant", "system", "tool", "developer"})
_FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class Renderer:
    """A chat template as the trainer applies it."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None  # None: the tokenizer's own

    @classmethod
    def of(cls, tokenizer: Any, training: Any) -> Renderer | None:
        """For these settings of TRL; None for a processor, whose rows may have pictures."""
        from transformers import AutoTokenizer
        from trl.chat_template_utils import get_training_chat_template

        if not hasattr(tokenizer, "is_fast"):
            return None
        path = getattr(training, "chat_template_path", None)
        if path and not path.endswith((".jinja", ".j2")):
            return cls(tokenizer, AutoTokenizer.from_pretrained(path).chat_template)
        if not tokenizer.chat_template:
            return None
        template = None
        if getattr(training, "assistant_only_loss", False):
            try:
                template = get_training_chat_template(tokenizer)
            except ValueError:  # no marks, and none that TRL knows
                template = None
        return cls(tokenizer, template)

    def mentions(self, name: str) -> bool:
        """Whether a name stands in the template, which otherwise cannot depend on it."""
        template = self.template or self.tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template or ""]
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)

    def text(self, messages: list[Message], tools: Any = None, **options: Any) -> str:
        """A conversation as text.

        Raises:
            jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError: of the template.
        """
        shown: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, chat_template=self.template, **options
        )
        return shown


def left_out(
    dataset: Rows, info: FormatInfo, renderer: Renderer, split: str, *, marks_are_read: bool
) -> tuple[RowFinding, ...]:
    """What of the rows is not in the text that the template makes of them.

    Args:
        dataset: the rows as they were checked, not yet converted.
        info: of them.
        renderer: of the template.
        split: for messages.
        marks_are_read: whether `formats.MARKS` in a message have an effect.

    Raises:
        UsageError: the template cannot render a row; it names the row.
    """
    counts: dict[tuple[str, bool], list[int]] = {}
    for row, first, count in _samples(dataset, info):
        if info.mapping is not None:
            row = _converted(row, info)
        for what in dict.fromkeys(_left_out_of_row(row, first + 1, renderer, split, marks_are_read)):
            entry = counts.setdefault(what, [first + 1, 0])
            entry[1] += count
    return tuple(
        RowFinding(what=what, rows=count, first=first, by_design=by_design)
        for (what, by_design), (first, count) in counts.items()
    )


def left_out_of_row(
    row: Mapping[str, Any], number: int, *, info: FormatInfo, renderer: Renderer, split: str, marks_are_read: bool
) -> list[RowFinding]:
    """As `left_out`, of one row of a stream, not yet converted."""
    if info.mapping is not None:
        row = _converted(row, info)
    left = dict.fromkeys(_left_out_of_row(row, number, renderer, split, marks_are_read))
    return [RowFinding(what=what, rows=1, first=number, by_design=by_design) for what, by_design in left]


def _converted(row: Mapping[str, Any], info: FormatInfo) -> dict[str, Any]:
    beside = {name: row.get(name) for name in ("chat_template_kwargs", "tools")}
    return {**beside, **in_trls_format(row, layout=info)}


def _samples(dataset: Rows, info: FormatInfo) -> Iterator[tuple[dict[str, Any], int, int]]:
    """One row of each structure, its index, and how many rows are like it."""
    from datasets import Dataset

    rows: Any = dataset
    if not isinstance(dataset, Dataset):
        rows = list(islice(dataset, STREAMED_ROWS))
    for first, count in info.shapes:
        yield dict(rows[first]), first, count


def conversations(row: Mapping[str, Any]) -> list[list[Message]]:
    """The conversations that the model reads of a row in TRL's format: one, or one for each answer of a pair."""
    if "messages" in row:
        return [row["messages"]]
    prompt = row.get("prompt") or []
    answers = [row[name] for name in ("completion", "chosen", "rejected") if row.get(name)]
    return [prompt + answer for answer in answers] or [prompt]


def _left_out_of_row(
    row: Mapping[str, Any], number: int, renderer: Renderer, split: str, marks_are_read: bool
) -> Iterator[tuple[str, bool]]:
    """What is left out of one row, and whether by the template's design."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools)
    options = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    for key in options:
        if not renderer.mentions(key):
            yield f"'{key}' of 'chat_template_kwargs' is not in the chat template", False
    for messages in conversations(row):
        marks = _Marks()
        marked = [marks.message(message, later, marks_are_read) for message, later in _with_later(messages)]
        marked_tools = [marks.tool(tool) for tool in tools or ()] or None
        try:
            text = renderer.text(marked, marked_tools, **options).lower()
        except _FAILURES:
            try:
                renderer.text(messages, tools or None, **options)
            except TemplateSyntaxError as error:
                raise UsageError(f"the chat template is not valid: {error}; mend it, or give another one") from error
            except _FAILURES as error:
                raise UsageError(
                    f"{place_of(number, split)}: the chat template cannot render it: "
                    f"{' '.join(str(error).split())}; change the row, or give another template with "
                    "--chat_template_path"
                ) from error
            continue  # it dislikes the marks only
        parts: list[Any] = []
        for message in marked:
            parts += _parts(message)
        if any(repr(part).lower() in text for part in parts):
            raise UsageError(
                f"{place_of(number, split)}: the chat template cannot read the parts of a message and writes them as "
                "they stand, with braces and quotes; give the content as one text, or another template with "
                "--chat_template_path"
            )
        yield from marks.missing_from(text)
        words = json.dumps(marked, ensure_ascii=False).lower()
        for role in {message["role"] for message in messages} - _KNOWN_ROLES:
            of_role = [message for message in messages if message["role"] == role]
            elsewhere = words.count(role.lower()) - len(of_role)
            if text.count(role.lower()) <= elsewhere:
                yield f"the role '{role}' is unknown to the chat template", False
            else:
                yield f"the role '{role}' is written as it stands, and its messages are no answers", True


def _parts(message: Message) -> list[Any]:
    return message["content"] if isinstance(message.get("content"), list) else []


def _with_later(messages: list[Message]) -> Iterator[tuple[Message, bool]]:
    """Each message, and whether a question of the user follows it."""
    asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last = asked[-1] if asked else -1
    for index, message in enumerate(messages):
        yield message, index < last


class _Marks:
    """Inserts marks into the texts of a row, and tells whose mark a text lacks."""

    def __init__(self) -> None:
        self._whats: list[tuple[str, bool]] = []
        self._unmarked: list[tuple[str, bool]] = []

    def missing_from(self, text: str) -> list[tuple[str, bool]]:
        return self._unmarked + [what for number, what in enumerate(self._whats) if _mark(number) not in text]

    def message(self, message: Message, later: bool, marks_are_read: bool) -> Message:
        """A marked copy; ``later``: a question of the user follows."""
        role = message["role"]
        new = {key: value for key, value in message.items() if value is not None or key == "content"}
        content = message.get("content")
        if isinstance(content, str):
            new["content"] = self._text(content, role, later)
        elif isinstance(content, list):
            new["content"] = [self._part(part, role, later) for part in content]
        calls = message.get("tool_calls")
        if calls:
            new["tool_calls"] = [self._call(call, role) for call in calls]
        for key, value in message.items():
            if key in _STRUCTURE or value in (None, "", [], {}) or (key in MARKS and marks_are_read):
                continue
            if key == "name" and role in ("tool", "function"):  # the call has it too
                continue
            if key in _THINKING and isinstance(value, str):
                new[key] = self._insert(value, *_of_thinking(role, later))
            elif isinstance(value, str):
                new[key] = self._insert(value, f"'{key}' of {role} messages is not in the text", False)
            else:
                self._unmarked.append((f"'{key}' of {role} messages is not read", False))
        return new

    def _part(self, part: Message, role: str, later: bool) -> Message:
        """A part of a message's content: text, or another kind, all of whose texts are marked."""
        kind = part.get("type")
        if isinstance(part.get("text"), str):
            return {**part, "text": self._text(part["text"], role, later)}
        if kind in _THINKING:
            what = _of_thinking(role, later)
        else:
            what = f"parts of the type '{kind}' of {role} messages are not in the text", False
        new = {}
        for key, value in part.items():
            if key in _NAMES_OF_PARTS:
                new[key] = value
            else:
                new[key] = self._deep(value, *what)
        return new

    def _deep(self, value: Any, what: str, by_design: bool) -> Any:
        if isinstance(value, str):
            return self._insert(value, what, by_design)
        if isinstance(value, dict):
            return {key: self._deep(inner, what, by_design) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._deep(inner, what, by_design) for inner in value]
        return value

    def tool(self, tool: Any) -> Any:
        """A marked copy of the description of a tool."""
        if not isinstance(tool, dict):
            return tool
        function = tool.get("function")
        described = function if isinstance(function, dict) else tool
        key = "description" if described.get("description") else "name"
        if not isinstance(described.get(key), str):
            return tool
        marked = {**described, key: self._insert(described[key], "the tools are not in the text", False)}
        if function is None:
            return marked
        return {**tool, "function": marked}

    def _call(self, call: Any, role: str) -> Any:
        if not isinstance(call, dict):
            return call
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return call
        what = f"tool calls of {role} messages are not in the text", False
        arguments = function.get("arguments")
        as_text = isinstance(arguments, str)
        if as_text:
            try:
                arguments = json.loads(function["arguments"])
            except json.JSONDecodeError:
                arguments = self._insert(function["arguments"], *what)
        if isinstance(arguments, dict):
            mark = self._next(*what)
            arguments = {**arguments, mark: mark}
            if as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
        marked = {**function, "name": self._insert(function["name"], *what), "arguments": arguments}
        if "function" in call:
            return {**call, "function": marked}
        return {**call, **marked}

    def _text(self, text: str, role: str, later: bool) -> str:
        """The text with marks in it, those of thinking apart."""
        pieces = re.split(r"(</?think>)", text)
        thinks = "</think>" in pieces and "<think>" not in pieces[: pieces.index("</think>")]
        for index, piece in enumerate(pieces):
            if piece in ("<think>", "</think>"):
                thinks = piece == "<think>"
            elif piece.strip():
                what, by_design = f"the text of {role} messages is not in what the model reads", False
                if thinks:
                    what, by_design = _of_thinking(role, later)
                pieces[index] = self._insert(piece, what, by_design)
        return "".join(pieces)

    def _insert(self, text: str, what: str, by_design: bool) -> str:
        """A mark near the middle, at a space if there is one: templates look at beginnings and ends."""
        if not text.strip():
            return text
        begin = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        at = (begin + end) // 2
        space = text.find(" ", at, end)
        if space > 0:
            at = space
        return text[:at] + self._next(what, by_design) + text[at:]

    def _next(self, what: str, by_design: bool) -> str:
        self._whats.append((what, by_design))
        return _mark(len(self._whats) - 1)


def _mark(number: int) -> str:
    return f"zq{number}qz"


def _of_thinking(role: str, later: bool) -> tuple[str, bool]:
    if later:
        return f"the chat template leaves out the thinking of earlier {role} messages", True
    return f"the thinking of {role} messages is not in what the model reads", False


def quotes_arguments(renderer: Renderer) -> bool:
    """Whether the template writes arguments of a call that are JSON as text in quotes once more, and objects well."""
    texts = []
    asked: list[Message]
    for arguments in (_ARGUMENTS, json.loads(_ARGUMENTS)):
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
        asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            texts.append(renderer.text(asked))
        except _FAILURES:
            return False
    as_text, as_object = texts
    return '\\"zqkeyqz\\"' in as_text and '"zqkeyqz"' in as_object and "\\" not in as_object


_ARGUMENTS = '{"zqkeyqz": "zqvalueqz"}'


# ---- the end of a turn -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """What a chat template writes after an answer."""

    token: str | None  # the first special token there, else the one that opens the next question; None: there is none
    after_last: bool  # whether it also stands after the last answer of a conversation
    like_token: str | None  # a text that looks like one, and is several tokens
    pieces: int  # of that text
    stops: bool  # whether generation stops at the token


_ANSWER = "zqanswerqz"
_ASKED = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
_LIKE_TOKEN = re.compile(r"<\|?[^<>\s]{2,40}?\|?>|\[/?[A-Z_]{3,}\]")


def turn_end(renderer: Renderer, stop_ids: Collection[int | None]) -> TurnEnd | None:
    """What ends an answer, by a conversation of one question; None: the template cannot render that.

    ``stop_ids``: ids of the tokens at which generation stops.
    """
    tokenizer = renderer.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    tail = ""
    ends: list[int | None] = []
    for messages in (_ASKED, [*_ASKED, _ASKED[0]]):
        try:
            after = renderer.text(messages).partition(_ANSWER)[2]
        except _FAILURES:
            return None
        tail = tail or after
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        ends.append(next((token for token in ids if token in special), None))
    last, between = ends
    end = last
    if last is None and between in stop_ids:
        # GLM's templates write nothing there: its models stop at the token that opens the next question
        end = between
    token = None
    like_token = None
    pieces = 0
    if end is not None:
        token = str(tokenizer.convert_ids_to_tokens(end))
    else:
        like = _LIKE_TOKEN.search(tail)
        if like:
            like_token = like[0]
            pieces = len(tokenizer(like_token, add_special_tokens=False)["input_ids"])
    return TurnEnd(
        token=token, after_last=last is not None, like_token=like_token, pieces=pieces, stops=end in stop_ids
    )


def lacking_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], str | None]:
    """Special tokens that a tokenizer's chat template writes and the tokenizer cuts into pieces, and the one of them
    that ends an answer."""
    text = Renderer(tokenizer, None).text(_ASKED, add_generation_prompt=True)
    vocabulary = tokenizer.get_vocab()
    lacking = [name for name in dict.fromkeys(_LIKE_TOKEN.findall(text)) if name not in vocabulary]
    end = _LIKE_TOKEN.search(text.partition(_ANSWER)[2])
    if end and end[0] in lacking:
        return lacking, end[0]
    return lacking, None
