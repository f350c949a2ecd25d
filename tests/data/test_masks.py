"""Loss on the assistant's turns: equal to TRL's by marks, for templates whose marks were taken out; else refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_rocm_tune.data.formats import MASKED
from hf_rocm_tune.data.masks import template_is_marked, with_labels
from hf_rocm_tune.errors import UsageError
from tests import tiny

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# templates whose marks stand where the generation prompt ends; others mark part of the prompt too
SAME = (
    "cohere", "cohere2", "gemma3", "glm4moe", "idefics3", "lfm2", "llama3", "qwen2_5_vl", "qwen3", "qwen3_vl",
    "qwen3_instruct_2507", "smolvlm",
)  # fmt: skip
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four, of course."}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "\nno more é"},
    ],
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny.build_tokenizer()


def rows(chats: list[Any]) -> Dataset:
    return Dataset.from_list([{"messages": chat} for chat in chats])


def unmarked(template: str) -> str:
    """The template without its marks."""
    as_if = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", as_if)


@pytest.mark.parametrize("name", SAME)
def test_labels_are_those_of_the_marks(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    template = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = unmarked(template)
    ours = with_labels(rows(CHATS), tokenizer, "train")
    for chat, row in zip(CHATS, ours, strict=True):
        marked = tokenizer.apply_chat_template(
            chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        assert row["input_ids"] == marked["input_ids"]
        assert [label != MASKED for label in row["labels"]] == [bool(bit) for bit in marked["assistant_masks"]]
        assert any(label != MASKED for label in row["labels"])


def test_a_stream_is_labelled_too(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = unmarked((TEMPLATES / "llama3_training.jinja").read_text(encoding="utf-8"))
    stream = rows(CHATS).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    assert list(with_labels(stream, tokenizer, "train")) == list(with_labels(rows(CHATS), tokenizer, "train"))


@pytest.mark.parametrize(
    "template",
    [
        # rewrites earlier turns, as templates do that take thinking out of them
        "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content | upper }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        # its generation prompt is not what it writes before an answer
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}",
    ],
)
def test_a_row_that_proves_nothing_is_refused(template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = template
    assert not template_is_marked(tokenizer)
    with pytest.raises(UsageError, match=r"row 1 of the 'train' split: message 2 does not stand"):
        list(with_labels(rows(CHATS[1:]), tokenizer, "train"))
