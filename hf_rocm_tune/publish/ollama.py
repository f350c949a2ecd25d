"""The ``Modelfile`` of a GGUF file: chat template, stop tokens and a place for a system message.

Ollama renders prompts with a template in the language of Go's text/template, not with the Jinja template in the file.
Here it is derived: the Jinja template is rendered for conversations with marks in place of the contents, and what
stands around the marks becomes Ollama's. That is written only if it gives, for several conversations, exactly what the
Jinja template gives. Tools and thinking are not covered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

_SYSTEM = "«system»"
_USER = "«user»"
_ANSWER = "«answer»"


@dataclass(frozen=True)
class Pieces:
    """What a chat template writes around the contents of messages."""

    begin: str  # before the first message, where there is no system message
    system: tuple[str, str]  # before and after a system message that has a turn of its own
    in_user: str | None  # after a system message that stands in the first user's turn; None: it has its own
    user: tuple[str, str]
    answer: tuple[str, str]
    prompt: str  # before an answer that is to be generated

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation, and the start of the next answer, as Ollama renders `template`."""
        system = next((message["content"] for message in messages if message["role"] == "system"), "")
        text = self.begin
        folded = ""  # into the first message of the user
        if system and self.in_user is None:
            text = self.system[0] + system + self.system[1]
        elif system and self.in_user is not None:
            folded = system + self.in_user
        for message in messages:
            if message["role"] == "user":
                text += self.user[0] + folded + message["content"] + self.user[1]
                folded = ""
            elif message["role"] == "assistant":
                text += self.answer[0] + message["content"] + self.answer[1]
        return text + self.prompt

    @property
    def template(self) -> str:
        """For ``TEMPLATE`` of a Modelfile."""
        begin = _literal(self.begin)
        prompt = _literal(self.prompt)
        before_system, after_system = map(_literal, self.system)
        before_user, after_user = map(_literal, self.user)
        before_answer, after_answer = map(_literal, self.answer)
        user = "{{ .Content }}"
        if self.in_user is None:
            head = "{{ if .System }}" + before_system + "{{ .System }}" + after_system
            if begin:
                head += "{{ else }}" + begin
            head += "{{ end }}"
        else:
            head = "{{ $system := .System }}" + begin
            user = "{{ if $system }}{{ $system }}" + _literal(self.in_user) + '{{ $system = "" }}{{ end }}' + user
        of_user = '{{ if eq .Role "user" }}' + before_user + user + after_user
        of_answer = '{{ else if eq .Role "assistant" }}' + before_answer + "{{ .Content }}" + after_answer
        return head + "{{ range .Messages }}" + of_user + of_answer + "{{ end }}{{ end }}" + prompt


def _literal(text: str) -> str:
    """A text in a template of Go: two braces, or one before an action, would begin another action."""
    if "{{" in text or text.endswith("{"):
        return text.replace("{", '{{ "{" }}')
    return text


def _can_be_written(text: str) -> bool:
    """Whether a Modelfile can hold a text: Ollama's parser drops what is not printable, and takes no escapes."""
    return '"""' not in text and all(letter.isprintable() or letter in "\n\t" for letter in text)


def pieces_of(tokenizer: Any, *, adds_bos: bool) -> Pieces | None:
    """The pieces of a tokenizer's chat template; None for one that does more than write around contents.

    ``adds_bos``: Ollama puts the bos token before the prompt itself, so that the template must not.
    """
    if "strftime_now" in str(tokenizer.chat_template):  # the day of this export would stand in it for ever
        return None
    bos = ""
    if adds_bos and tokenizer.bos_token:
        bos = tokenizer.bos_token

    def rendered(messages: Sequence[Mapping[str, str]]) -> str | None:
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError):
            return None
        return str(text).removeprefix(bos)

    pieces = _derived(rendered, [token.content for token in tokenizer.added_tokens_decoder.values()])
    if pieces is None or not _can_be_written(pieces.template):
        return None
    for messages in _conversations(pieces):
        if rendered(messages) != pieces.render(messages):
            return None
    return pieces


def _derived(rendered: Any, tokens: Sequence[str]) -> Pieces | None:
    """Pieces of conversations that end with a user, as every prompt does: an answer at the end may be another text."""
    user = {"role": "user", "content": _USER}
    answer = {"role": "assistant", "content": _ANSWER}
    alone = rendered([user])
    after = rendered([user, answer, user])
    if alone is None or after is None:
        return None
    parts = re.split(f"{_USER}|{_ANSWER}", after)
    if len(parts) != 4 or alone != parts[0] + _USER + parts[3]:
        return None
    first, to_answer, to_user, to_prompt = parts
    before_user = _common_end(first, to_user)
    starts = [before_user.find(token) for token in tokens if token in before_user]
    before_user = before_user[min(starts, default=0) :]  # not from the middle of another token
    begin = first[: len(first) - len(before_user)]
    after_answer = to_user[: len(to_user) - len(before_user)]
    # Where a user's turn ends as an answer does; else its end belongs to the beginning of the answer.
    ends_alike = to_answer.startswith(after_answer) and to_prompt.startswith(after_answer)
    after_user = after_answer if ends_alike else ""
    plain = Pieces(
        begin=begin,
        system=("", ""),
        in_user=None,
        user=(before_user, after_user),
        answer=(to_answer.removeprefix(after_user), after_answer),
        prompt=to_prompt.removeprefix(after_user),
    )
    with_system = rendered([{"role": "system", "content": _SYSTEM}, user])
    if with_system is None:  # it refuses system messages
        return plain
    head = re.split(f"{_SYSTEM}|{_USER}", with_system)
    if len(head) != 3 or head[2] != to_prompt:
        return None
    if before_user and head[1].endswith(before_user):
        return replace(plain, system=(head[0], head[1][: len(head[1]) - len(before_user)]))
    if head[0] != first:
        return None
    return replace(plain, in_user=head[1])


def _common_end(text: str, other: str) -> str:
    length = 0
    for letter, letter_of_other in zip(reversed(text), reversed(other), strict=False):
        if letter != letter_of_other:
            break
        length += 1
    return text[len(text) - length :]


def _conversations(pieces: Pieces) -> list[list[dict[str, str]]]:
    """Conversations that the pieces must render as the Jinja template does."""
    turns = [
        {"role": "user", "content": "A question?"},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "Another, with 2 < 3?"},
        {"role": "assistant", "content": "Two\nlines."},
        {"role": "user", "content": "The last."},
    ]
    conversations = [turns[:1], turns[:3], turns]
    if pieces.system != ("", "") or pieces.in_user is not None:
        system = {"role": "system", "content": "Be brief."}
        conversations += [[system, *conversation] for conversation in conversations]
    return conversations


# ---- the file --------------------------------------------------------------------------------------------------------

_PAGE = "https://github.com/ollama/ollama/blob/main/docs/modelfile.md"


def modelfile(
    file: str, pieces: Pieces | None, ends: Sequence[str], *, has_template: bool, adapter: str | None = None
) -> str:
    """The content of a Modelfile.

    Args:
        file: the GGUF file, or the base of an adapter, as Ollama names it.
        pieces: see `pieces_of`.
        ends: texts of all tokens that end an answer.
        has_template: whether the model has a chat template, from which no pieces could be derived if they are None.
        adapter: the GGUF file of an adapter, None for a whole model.
    """
    lines = [f"FROM {file}"]
    if adapter is not None:
        lines = ["# The GGUF file of the adapter's base, or the base's name in Ollama:", *lines, f"ADAPTER {adapter}"]
    if pieces is not None:
        lines.append(f'TEMPLATE """{pieces.template}"""')
    elif has_template:
        lines += [
            "# The chat template cannot be written in Ollama's language by rule. Ollama uses its own where it knows",
            f"# the one in the GGUF file; otherwise write a TEMPLATE here: {_PAGE}",
        ]
    lines += [f"PARAMETER stop {_quoted(end)}" for end in ends if end and _can_be_written(end)]
    lines.append("# Uncomment for a system message in every conversation:")
    lines.append('# SYSTEM """You are a helpful assistant."""')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text as Ollama's parser reads it: up to the last quotation marks, without escapes."""
    return f'"""{text}"""' if '"' in text else f'"{text}"'
