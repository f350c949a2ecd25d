"""What TRL expects of a processor, where one gives something else: copies of it that give that.

TRL hands each text without a picture to the processor and reads the result as rows of tokens. Most make them. Some give
the tokens of a single text without a list around them (TrOCR, Whisper, GIT), take several texts for one (Idefics), or
refuse a text without a picture or a sound (GOT-OCR 2, Kosmos-2.5). Then the tokenizer that the processor has makes the
rows. TRL gives the pictures of a batch as a list for each row, which some refuse where each row has one (GOT-OCR 2).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from hf_rocm_tune.errors import FOREIGN_ERRORS

_SENSES = ("images", "videos", "audio")
_KINDS = "mm_token_type_ids"
"""Of each token, whether it stands for a picture, a video or a sound."""


def as_trl_calls(loaded: Any, model_class: Any) -> Any:
    """What TRL's trainers can call as they do: a tokenizer or processor itself, or a copy.

    The copy of a processor is one of the same class name and the same files. Its texts without anything seen or heard
    go to its tokenizer, unless the processor makes rows of tokens of them; it gives the kinds of tokens where it names
    them among the inputs of its model, of class ``model_class``, which takes them.
    """
    if getattr(loaded, "tokenizer", None) is None:
        return loaded
    made = _of_two_texts(loaded)
    lacks_kinds = made is not None and _KINDS not in made and _takes_kinds(loaded, model_class)
    if made is not None and not lacks_kinds:
        return loaded
    kind = type(loaded)

    @wraps(kind.__call__)
    def call(self: Any, *inputs: Any, text: Any = None, **settings: Any) -> Any:
        senses = [settings.get(name) for name in _SENSES]
        if made is None and text is not None and not inputs and all(each is None for each in senses):
            for name in _SENSES:
                settings.pop(name, None)
            texts = [text] if isinstance(text, str) else text
            return self.tokenizer(texts, **settings)
        if lacks_kinds:
            settings.setdefault(f"return_{_KINDS}", True)
        return kind.__call__(self, *inputs, text=text, **settings)

    return _copy(loaded, __call__=call)


def _takes_kinds(processor: Any, model_class: Any) -> bool:
    """Whether a processor can give the kinds of tokens, and a model's class takes them (Cosmos 3 Edge)."""
    forward = getattr(model_class, "forward", None)
    return (
        _KINDS in getattr(processor, "model_input_names", ())
        and forward is not None
        and _KINDS in inspect.signature(forward).parameters
    )


def _of_two_texts(processor: Any) -> Mapping[str, Any] | None:
    """What a processor makes of texts without pictures; None: no rows of tokens, a row for each text."""
    try:
        row = processor(text="a")["input_ids"]
        made: Mapping[str, Any] = processor(text=["a", "a"])
    except FOREIGN_ERRORS:  # it takes none
        return None
    rows = made["input_ids"]
    if len(row) != 1 or isinstance(row[0], int) or len(rows) != 2:
        return None
    return made


def with_flat_pictures(processor: Any) -> Any:
    """A copy that is given the pictures of a batch in one list where it refuses a list for each row, of one picture."""
    kind = type(processor)

    @wraps(kind.__call__)
    def call(self: Any, images: Any = None, text: Any = None, **settings: Any) -> Any:
        try:
            return kind.__call__(self, images=images, text=text, **settings)
        except FOREIGN_ERRORS as error:
            if images is None or any(not isinstance(row, list) or len(row) != 1 for row in images):
                raise
            try:
                return kind.__call__(self, images=[row[0] for row in images], text=text, **settings)
            except FOREIGN_ERRORS:  # it is not the lists
                raise error from None

    return _copy(processor, __call__=call)


def render_by_tokenizer(processor: Any) -> None:
    """Makes a processor without a chat template render conversations of text by its tokenizer's, if that has one."""
    template = getattr(getattr(processor, "tokenizer", None), "chat_template", None)
    if not template or processor.chat_template:
        return
    kind = type(processor)

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

    processor.chat_template = template
    processor.__class__ = _derived(kind, apply_chat_template=render)


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


def _copy(processor: Any, **methods: Callable[..., Any]) -> Any:
    changed = copy.copy(processor)
    changed.__class__ = _derived(type(processor), **methods)
    return changed


def _derived(kind: Any, **methods: Callable[..., Any]) -> Any:
    """A class of the same name and module, which are written beside a result."""
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
