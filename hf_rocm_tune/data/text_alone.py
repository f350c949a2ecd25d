"""Texts without pictures, for processors that do not make rows of tokens of them as TRL expects.

TRL hands each text of a model that has a processor to that processor, and reads the result as rows of tokens. Most make
them. Some give the tokens of a single text without a list around them (TrOCR, Whisper, GIT), some refuse a text without
a picture or a sound (GOT-OCR 2, Kosmos-2.5). Then the tokenizer that the processor has makes the rows. It renders the
conversations as well where it has a chat template and its processor has none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import wraps
from typing import Any

from hf_rocm_tune.errors import FOREIGN_ERRORS

_SENSES = ("images", "videos", "audio")


def with_text_alone(loaded: Any) -> Any:
    """What TRL's trainers can read texts without pictures with: a tokenizer or processor itself, or a copy.

    The copy of a processor is one of the same class name and the same files, whose texts without anything seen or heard
    go to its tokenizer. A tokenizer, and a processor that makes rows of tokens of a text, are given back as they are.
    """
    tokenizer = getattr(loaded, "tokenizer", None)
    if tokenizer is None:
        return loaded
    own: dict[str, Any] = {}
    if not _makes_rows(loaded):
        own["__call__"] = _reading(type(loaded))
    template = getattr(tokenizer, "chat_template", None)
    lacks_template = bool(template) and not getattr(loaded, "chat_template", None)
    if lacks_template:
        own["apply_chat_template"] = _rendering(type(loaded))
    if not own:
        return loaded
    changed = copy.copy(loaded)
    if lacks_template:
        changed.chat_template = template
    kind = type(loaded)
    # of the same name and module: both are written beside a result
    changed.__class__ = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})
    return changed


def _makes_rows(processor: Any) -> bool:
    """Whether a processor makes a list of rows of a single text without a picture, which TRL takes the first of."""
    try:
        rows = processor(text="a")["input_ids"]
    except FOREIGN_ERRORS:  # it takes none
        return False
    return len(rows) > 0 and not isinstance(rows[0], int)


def _reading(kind: Any) -> Any:
    """The call of a processor of this class, for which its tokenizer reads texts alone."""

    @wraps(kind.__call__)
    def call(self: Any, *inputs: Any, text: Any = None, **settings: Any) -> Any:
        senses = [settings.get(name) for name in _SENSES]
        if text is None or inputs or any(each is not None for each in senses):
            return kind.__call__(self, *inputs, text=text, **settings)
        for name in _SENSES:
            settings.pop(name, None)
        texts = [text] if isinstance(text, str) else text
        return self.tokenizer(texts, **settings)

    return call


def _rendering(kind: Any) -> Any:
    """The rendering of conversations by a processor of this class, for which its tokenizer renders those of text."""

    @wraps(kind.apply_chat_template)
    def render(self: Any, conversation: Any, *more: Any, tokenize: bool = False, **settings: Any) -> Any:
        is_one = bool(conversation) and isinstance(conversation[0], Mapping)
        conversations = [conversation] if is_one else conversation
        plain = [_of_text(messages) for messages in conversations]
        if more or any(messages is None for messages in plain):
            return kind.apply_chat_template(self, conversation, *more, tokenize=tokenize, **settings)
        # a processor's rows of tokens are a list, also of one conversation; its text is not
        given = plain[0] if is_one and not tokenize else plain
        return self.tokenizer.apply_chat_template(given, tokenize=tokenize, **settings)

    return render


def _of_text(messages: Any) -> list[dict[str, Any]] | None:
    """Messages whose contents are strings, which TRL has put into parts; None: some parts are no text."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                return None
            content = "".join(part["text"] for part in content)
        plain.append({**message, "content": content})
    return plain
