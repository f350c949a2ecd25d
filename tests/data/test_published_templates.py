"""Chat templates of published models raise no false alarm on clean chats: what they leave out by design is told as
such, and what they cannot show is told truly. Most are those that TRL brings; the others are written in the manner of
Mistral's, Phi-4's, Granite's and SmolLM3's."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, Features, Json, List, Value
from transformers import PreTrainedTokenizerFast

from hf_rocm_tune.data.formats import check_format
from hf_rocm_tune.data.rendering import Renderer, TurnEnd, left_out, quotes_arguments, turn_end
from hf_rocm_tune.errors import UsageError
from tests import tiny

Row = dict[str, Any]

BUNDLED = Path(trl.__file__).parent / "chat_templates"
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
    "{% endif %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
PHI4 = (
    "{% for m in messages %}{% if m.role == 'system' and tools %}<|system|>{{ m.content }}<|tool|>{{ tools | tojson }}"
    "<|/tool|><|end|>{% else %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>"
    "{{ c.function | tojson }}<|/tool_call|>{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRANITE = (
    "{% if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>You are helpful.<|end_of_text|>\n"
    "{% endif %}{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson(indent=4) }}"
    "<|end_of_text|>\n{% endif %}{% for m in messages %}<|start_of_role|>"
    "{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
SMOLLM3 = (
    "<|im_start|>system\n## Metadata\n\n{% if messages[0].role == 'system' %}{{ messages[0].content.rstrip() }}"
    "{% endif %}{% if tools %}\n<tools>{% for t in tools %}{{ t | string }}\n{% endfor %}</tools>{% endif %}"
    "<|im_end|>\n{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content.strip() }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = {"mistral": MISTRAL, "phi4": PHI4, "granite": GRANITE, "smollm3": SMOLLM3}
#: Of these the processor makes messages of parts, and rows of text alone are read by it too.
PICTURED = ("idefics3", "llava_next", "smolvlm", "diffusion_gemma")
SAMPLE = ("llama3_1", "qwen2_5", "qwen3", "gemma3", "deepseekv3", "gptoss", "glm4moe", *OWN)


def template_of(name: str) -> str:
    """The source of a chat template."""
    return OWN[name] if name in OWN else (BUNDLED / f"{name}.jinja").read_text(encoding="utf-8")


ALL = [*sorted({path.stem for path in BUNDLED.glob("*.jinja") if "training" not in path.stem} - {*PICTURED}), *OWN]
NAMES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in ALL]
_WRITTEN = re.compile(r"<\|[^|<>\s]{2,40}\|>|<[a-z_]{3,20}\|?>|<\|[a-z_]{3,20}>|\[/?[A-Z_]{3,}\]|<｜[^｜]{2,40}｜>")


@cache
def renderer_of(name: str) -> Renderer:
    """The template with a tokenizer that has its tokens."""
    tokenizer: PreTrainedTokenizerFast = tiny.build_tokenizer(chat_template=False)
    source = template_of(name)
    written = {*_WRITTEN.findall(source), "<|assistant|>", "<|user|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(written)})
    tokenizer.chat_template = source
    return Renderer(tokenizer, None)


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "measures a lawn",
        "parameters": {"type": "object", "properties": {"side": {"type": "string", "description": "which one"}}},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "measure", "arguments": {"side": "north"}}}
CALLED = [
    user("Measure it"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "measure", "tool_call_id": "abcdefghi", "content": "ten"},
    assistant("Ten."),
]
THOUGHTS = [
    user("a"),
    assistant("<think>\nmoles\n</think>\n\nb"),
    user("c"),
    assistant("<think>\nworms\n</think>\n\nd"),
]
CLEAN: dict[str, Row] = {
    "a question": {"messages": [user("Where is it?"), assistant("There.")]},
    "several": {"messages": [user("Where?"), assistant("There."), user("Why?"), assistant("Because.")]},
    "an answer that stands elsewhere": {"messages": [user("Say Yes or No"), assistant("Yes")]},
    "spaces around": {"messages": [user("  Where is it? \n"), assistant("\n There. ")]},
    "marks of other languages": {
        "messages": [user("Où est-elle ?"), assistant('« Là », sous l\'herbe: <b>là</b> & "ici"')]
    },
    "a prompt and a completion": {"prompt": [user("Where?")], "completion": [assistant("There.")]},
}


def findings(name: str, row: Row) -> list[tuple[str, bool]]:
    """What is found in a row by `check_format` and `left_out`: in words, and whether it is by the template's design."""
    kinds = {
        name: Json() if isinstance(value, dict) else List(Json()) for name, value in row.items() if name != "tools"
    }
    rows = Dataset.from_list(
        [row], features=Features({**kinds, **({"tools": Value("string")} if "tools" in row else {})})
    )
    info = check_format(rows, has_chat_template=True, model_name="m")
    found = info.findings + left_out(rows, info, renderer_of(name), "train", marks_are_read=True)
    return [(finding.what, finding.by_design) for finding in found]


@pytest.mark.parametrize("name", NAMES)
def test_clean_chats_have_no_findings(name: str) -> None:
    assert {kind: found for kind, row in CLEAN.items() if (found := findings(name, row))} == {}


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_has_an_end_and_stopping_there_is_all_right(name: str) -> None:
    renderer = renderer_of(name)
    ids = renderer.tokenizer.get_vocab()
    found = turn_end(renderer, ())
    assert found is not None
    end = found.token or found.like_token
    assert end in ids, found
    stops = turn_end(renderer, {ids[end]})
    # GLM's models stop where the next question begins
    assert stops == TurnEnd(token=end, after_last=not name.startswith("glm"), like_token=None, pieces=0, stops=True)


#: What models were trained with that drop the thinking of earlier turns, and of models that drop all of it.
DROPS_EARLIER = ("qwen3", "glm4moe")
DROPS_ALL = ("deepseekv3",)


@pytest.mark.parametrize("name", NAMES)
def test_thinking_that_is_dropped_is_told_by_where_it_stands(name: str) -> None:
    found = findings(name, {"messages": THOUGHTS})
    earlier = ("the chat template leaves out the thinking of earlier assistant messages", True)
    last = ("the thinking of assistant messages is not in what the model reads", False)
    assert {*found} <= {earlier, last}
    text = renderer_of(name).text(THOUGHTS)
    assert [(earlier in found), (last in found)] == ["moles" not in text, "worms" not in text]
    if name in (*DROPS_EARLIER, *DROPS_ALL):
        assert found == ([earlier] if name in DROPS_EARLIER else [earlier, last])


SHOWS_TOOLS = ("llama3_1", "qwen2_5", "qwen3", "gptoss", "glm4moe", "mistral", "granite", "smollm3")


@pytest.mark.parametrize("name", SHOWS_TOOLS)
def test_tools_as_json_are_no_finding_where_the_template_shows_them(name: str) -> None:
    assert findings(name, {"messages": CALLED, "tools": json.dumps([TOOL])}) == []


def test_tools_that_a_template_does_not_show_are_told() -> None:
    assert {what for what, _ in findings("llama3", {"messages": CALLED, "tools": json.dumps([TOOL])})} == {
        "tool calls of assistant messages are not in the text",
        "the tools are not in the text",
    }


def test_a_text_and_a_key_that_a_template_leaves_out_are_told_wherever_else_the_words_stand() -> None:
    unknown = {"role": "oracle", "content": "Yes"}
    row = {"messages": [{**user("Answer Yes or No"), "mood": "glad"}, unknown, assistant("Fine")]}
    assert findings("smollm3", row) == [
        ("'mood' of user messages is not in the text", False),
        ("the text of oracle messages is not in what the model reads", False),
        ("the role 'oracle' is unknown to the chat template", False),
    ]


def test_a_role_that_a_template_writes_as_it_stands_is_told() -> None:
    row = {"messages": [user("Where?"), {"role": "asistant", "content": "There."}, assistant("Here.")]}
    assert findings("granite", row) == [
        ("the role 'asistant' is written as it stands, and its messages are no answers", True)
    ]


def test_a_key_for_the_template_that_it_does_not_have_is_told() -> None:
    row = {"messages": CLEAN["a question"]["messages"], "chat_template_kwargs": {"enable_thinking": False}}
    assert findings("qwen3", row) == []
    assert findings("granite", row) == [
        ("'enable_thinking' of 'chat_template_kwargs' is not in the chat template", False)
    ]


#: Templates that write arguments by ``tojson`` whatever they are, and some that do not.
QUOTES = {"qwen2_5": True, "llama3_1": True, "mistral": True, "granite": True, "qwen3": False, "deepseekv3": False}


@pytest.mark.parametrize("name", QUOTES)
def test_templates_that_would_quote_arguments_of_calls_twice_are_known(name: str) -> None:
    assert quotes_arguments(renderer_of(name)) == QUOTES[name]


def in_parts(kind: str) -> Row:
    thought = {"type": kind, kind: "moles dig"}
    return {"messages": [user("q"), {"role": "assistant", "content": [thought, {"type": "text", "text": "Worms."}]}]}


def test_parts_that_a_template_writes_as_they_stand_are_refused_and_those_that_it_skips_are_told() -> None:
    with pytest.raises(UsageError, match="row 1 of the 'train' split: the chat template cannot read the parts of a"):
        findings("granite", in_parts("thinking"))
    assert findings("gemma3", in_parts("thinking")) == [
        ("the thinking of assistant messages is not in what the model reads", False)
    ]
    assert findings("gemma3", in_parts("poem")) == [
        ("parts of the type 'poem' of assistant messages are not in the text", False)
    ]
