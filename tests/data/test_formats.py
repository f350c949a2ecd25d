"""Rows that TRL cannot train on are refused with row, column and what was found; all that it can are recognised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, Features, IterableDataset, Json, List

from hf_rocm_tune.data.formats import STREAMED_ROWS, FormatInfo, as_trl, check_format, with_decoded_calls
from hf_rocm_tune.data.sources import load_source
from hf_rocm_tune.errors import UsageError
from tests import tiny
from tests.data.test_sources import private_cache as private_cache

Row = dict[str, Any]

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def check(rows: Any, **arguments: Any) -> FormatInfo:
    arguments.setdefault("has_chat_template", True)
    return check_format(rows, model_name="some/model", **arguments)


def refusal(rows: Any, **arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check(rows, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def streamed(rows: list[Row]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


Writer = Callable[[Path, int], Path]
FORMATS: dict[str, tuple[Writer, str]] = {
    "messages": (tiny.write_messages_jsonl, "messages (conversational)"),
    "tools": (tiny.write_tools_jsonl, "messages (conversational, with tools)"),
    "text": (tiny.write_text_jsonl, "text"),
    "sharegpt": (tiny.write_sharegpt_jsonl, "messages (conversational)"),
    "prompt": (tiny.write_prompt_completion_jsonl, "prompt/completion"),
    "prompt_chat": (
        lambda path, n: tiny.write_prompt_completion_jsonl(path, n, conversational=True),
        "prompt/completion (conversational)",
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_trl_is_recognised(tmp_path: Path, name: str, streaming: bool) -> None:
    write, description = FORMATS[name]
    rows = load_source(str(write(tmp_path / "rows.jsonl", 12)), streaming=streaming).train
    info = check(rows)
    assert info.description == description
    assert (info.mapping is not None) == (name == "sharegpt")


def test_tokens_and_a_text_column_of_another_name_are_recognised() -> None:
    assert check(Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})).kind == "tokenized"
    assert check(Dataset.from_dict({"body": ["a"]}), dataset_text_field="body").kind == "text"


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (["a", "b"], ["found 'a', 'b'", "'messages'", "'instruction' and 'output'", "--dataset_text_field NAME"]),
        (["question", "output", "answer"], ["found 'question', 'output', 'answer'; accepted"]),
        (["message"], ["rename 'message' to 'messages'?"]),
    ],
)
def test_wrong_columns_are_listed_beside_the_accepted_ones(columns: list[str], parts: list[str]) -> None:
    message = refusal(Dataset.from_dict({column: ["a"] for column in columns}))
    assert all(part in message for part in parts), message


GOOD: Row = {"messages": [USER, ASSISTANT]}
ALPACA: Row = {"instruction": "i", "input": "", "output": "o"}
GOOD_PAIR: Row = {"prompt": "q", "completion": "a"}
BAD_ROWS: dict[str, tuple[Row, Row, str]] = {
    "text null": ({"text": "a"}, {"text": None}, "column 'text' holds nothing (null), not text"),
    "prompt and completion differ": (
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "a"},
        "column 'completion' holds text, not a list of messages",
    ),
    "message text": (GOOD, {"messages": ["hello"]}, "message 1 is text, not an object with 'role' and 'content'"),
    "no role": (GOOD, {"messages": [{"content": "q"}]}, "message 1 is an object with 'content', not an object"),
    "no content": (GOOD, {"messages": [USER, {"role": "assistant"}]}, "message 2 has nothing (null) as 'content'"),
    "number in Alpaca": (ALPACA, {**ALPACA, "input": 3}, "column 'input' holds a number, not text"),
    "role in conversations": (
        {"conversations": [{"from": "user", "value": "q"}]},
        {"conversations": [USER]},
        "message 1 is an object with 'role', 'content', not an object with 'from' and 'value'",
    ),
    "tools not JSON": ({**GOOD, "tools": "[]"}, {**GOOD, "tools": "[{"}, "column 'tools' is not valid JSON"),
    "no tokens": ({"input_ids": [1]}, {"input_ids": []}, "column 'input_ids' is an empty list and no list of token"),
    "half a token": ({"input_ids": [1.0]}, {"input_ids": [1.5]}, "column 'input_ids' is a list and no list of token"),
    "negative token": ({"input_ids": [1]}, {"input_ids": [1, -2]}, "has the token id -2; ids are from 0"),
    "more labels": (
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [1, 2], "labels": [1, 2, 3]},
        "column 'labels' has 3 entries for 2 'input_ids'",
    ),
    "a history that is none": (
        {"query": "q", "response": "a", "history": None},
        {"query": "q", "response": "a", "history": "before"},
        "column 'history' holds text, not pairs of a question and an answer",
    ),
    "a weight of a half": (
        {"messages": [USER, {**ASSISTANT, "weight": 1.0}]},
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
        "message 2 has 'weight': 0.5, and a message is in the loss (1) or not (0)",
    ),
    "a call in text": (
        GOOD,
        {"messages": [USER, {**ASSISTANT, "tool_calls": '[{"name": "dig"}]'}]},
        "message 2 has text as 'tool_calls', not a list of calls",
    ),
    "a call of nothing": (
        GOOD,
        {"messages": [USER, {**ASSISTANT, "tool_calls": [{"id": "7"}]}]},
        "message 2 has a call in 'tool_calls' that names no function",
    ),
    "two system prompts": (
        {**GOOD, "system": "Dig."},
        {"messages": [{"role": "System", "content": "Swim."}, USER], "system": "Dig."},
        "are system prompts that differ: keep one",
    ),
    "text for the template": (
        {**GOOD, "chat_template_kwargs": {"a": 1}},
        {**GOOD, "chat_template_kwargs": "a"},
        "column 'chat_template_kwargs' holds text, not an object",
    ),
}


def map_style(rows: list[Row]) -> Dataset:
    """As `datasets` itself types rows of unlike shape: JSON columns where Arrow has no common type."""
    try:
        return Dataset.from_list(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return Dataset.from_list(rows, features=Features({key: Json() for key in rows[0]}))


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
PAIR = {"prompt": CHAT[:1], "completion": CHAT[1:]}
DIG = '{"name": "dig", "arguments": {"depth": 2}}'
TOOL = {"type": "function", "function": {"name": "dig", "description": "digs"}}


def calls(*arguments: Any) -> Row:
    """An answer that calls a tool with each of these arguments."""
    made = [{"type": "function", "function": {"name": "dig", "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": "", "tool_calls": made}


ANSWERS = {"chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "b"}]}
# Row, trainer, what TRL gets, what is said of it; all with a chat template.
MAPPED: dict[str, tuple[Row, str, Row, str]] = {
    "Alpaca": (
        {"instruction": "i", "input": "x", "output": "a"},
        "sft",
        {"prompt": [{"role": "user", "content": "i\n\nx"}], "completion": CHAT[1:]},
        "'instruction' is the prompt, 'output' is the completion, 'input' goes into the prompt, text becomes chat",
    ),
    "Alpaca without input": ({"instruction": "q", "input": None, "output": "a"}, "sft", PAIR, "'instruction' is"),
    "questions": ({"question": "q", "answer": "a", "n": 1}, "sft", {**PAIR, "n": 1}, "'question' is the prompt"),
    "with a system prompt": (
        {"system": "s", "question": "q", "response": "a"},
        "sft",
        {**PAIR, "prompt": [SYSTEM, *CHAT[:1]]},
        "'system' is the system prompt",
    ),
    "a system prompt that stands in the messages too": (
        {"system": "s", "messages": [SYSTEM, *CHAT]},
        "sft",
        {"messages": [SYSTEM, *CHAT]},
        "'system' is the system prompt",
    ),
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, "sft", {"messages": CHAT}, "human is user, from/value are"),
    "roles in any case": (
        {"conversations": [{"from": "HUMAN", "value": "q"}, {"from": " Bot", "value": "a"}]},
        "sft",
        {"messages": CHAT},
        " Bot is assistant, HUMAN is user",
    ),
    "a history": (
        {"query": "q", "response": "a", "history": [["o", "p"]], "system": "s"},
        "sft",
        {
            "prompt": [SYSTEM, {"role": "user", "content": "o"}, {"role": "assistant", "content": "p"}, CHAT[0]],
            "completion": CHAT[1:],
        },
        "'history' stands before it, read and not learned",
    ),
    "padding": (
        {"input_ids": [0, 0, 7, 8], "attention_mask": [0, 0, 1, 1]},
        "sft",
        {"input_ids": [7, 8]},
        "positions with attention_mask 0 are removed",
    ),
    "ShareGPT in messages": ({"messages": [HUMAN, GPT]}, "sft", {"messages": CHAT}, "gpt is assistant"),
    "a prompt beside messages": ({"prompt": "q", "messages": CHAT}, "sft", {"messages": CHAT}, "'prompt' is not used"),
    "ShareGPT pairs": (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "b"}},
        "dpo",
        {"prompt": CHAT[:1], **ANSWERS},
        "'conversations' is the prompt",
    ),
    "a prompt that both begin with": (
        {"prompt": "q", "chosen": CHAT, "rejected": CHAT},
        "dpo",
        {"chosen": CHAT, "rejected": CHAT},
        "'prompt' is not used",
    ),
    "a prompt of text before messages": ({"prompt": "q", **ANSWERS}, "kto", {"prompt": CHAT[:1], **ANSWERS}, "text"),
    "unpaired": ({"question": "q", "answer": "a", "label": True}, "kto", {**PAIR, "label": True}, "'question' is"),
    "ms-swift's pairs": (
        {"system": "s", "messages": CHAT, "rejected_response": "b"},
        "dpo",
        {"chosen": [SYSTEM, *CHAT], "rejected": [SYSTEM, CHAT[0], *ANSWERS["rejected"]]},
        "'messages' is the chosen conversation, whose last answer 'rejected_response' replaces in the rejected",
    ),
    "ms-swift's pairs of conversations": (
        {"messages": CHAT, "rejected_messages": [CHAT[0], *ANSWERS["rejected"]], "margin": 0.5},
        "reward",
        {"chosen": CHAT, "rejected": [CHAT[0], *ANSWERS["rejected"]], "margin": 0.5},
        "'messages' is the chosen, 'rejected_messages' is the rejected",
    ),
    "a conversation whose answer is judged": (
        {"messages": [SYSTEM, *CHAT], "label": False},
        "kto",
        {"prompt": [SYSTEM, CHAT[0]], "completion": CHAT[1:], "label": False},
        "the last message of 'messages' is the completion and the others are the prompt",
    ),
    "ShareGPT that is judged by LLaMA-Factory's tag": (
        {"conversations": [HUMAN, GPT], "kto_tag": True},
        "kto",
        {**PAIR, "label": True},
        "'kto_tag' is the label",
    ),
    "text that is judged by LLaMA-Factory's tag": (
        {"prompt": "q", "completion": "a", "kto_tag": True},
        "kto",
        {"prompt": "q", "completion": "a", "label": True},
        "'kto_tag' is the label",
    ),
    "a conversation to go on with": (
        {"messages": [SYSTEM, CHAT[0]], "solution": "4"},
        "grpo",
        {"prompt": [SYSTEM, CHAT[0]], "solution": "4"},
        "'messages' is the prompt",
    ),
    "ms-swift's calls, which are one turn with the answer before them": (
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": "Let me see."},
                {"role": "tool_call", "content": DIG},
                {"role": "tool_call", "content": DIG},
                {"role": "tool_response", "content": "2"},
            ]
        },
        "sft",
        {
            "messages": [
                CHAT[0],
                {**calls({"depth": 2}, {"depth": 2}), "content": "Let me see."},
                {"role": "tool", "content": "2"},
            ]
        },
        "tool_call is assistant, tool_response is tool, tool_call becomes tool_calls",
    ),
    "questions with tools": (
        {"question": "q", "answer": "a", "tools": [TOOL]},
        "sft",
        {**PAIR, "tools": json.dumps([TOOL])},
        "'question' is the prompt",
    ),
    "functions, as tools were named before": (
        {"messages": CHAT, "functions": [TOOL["function"]]},
        "sft",
        {"messages": CHAT, "tools": json.dumps([TOOL])},
        "'functions' are the tools",
    ),
    "lists of roles and contents, as older datasets keep messages": (
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
        "sft",
        {"messages": CHAT},
        "",
    ),
    "roles with values, as Pygmalion's": (
        {"conversations": [{"role": "human", "value": "q"}, {"role": "bot", "value": "a"}]},
        "sft",
        {"messages": CHAT},
        "role/value are role/content",
    ),
    "OASST": ({"messages": [{**CHAT[0], "role": "prompter"}, CHAT[1]]}, "sft", {"messages": CHAT}, "prompter is user"),
    "for generation": ({"question": "q", "answer": "a"}, "grpo", {"prompt": CHAT[:1], "answer": "a"}, "'question' is"),
}


@pytest.mark.parametrize("case", MAPPED)
def test_what_others_read_gets_the_columns_of_trl(case: str) -> None:
    row, method, expected, said = MAPPED[case]
    for rows in (streamed([row, row]), Dataset.from_list([row, row])):
        info = check(rows, method=method)
        assert info.mapping is not None and said in info.mapping, info.mapping
        assert list(as_trl(rows, info)) == [expected, expected]


def test_a_key_for_the_template_that_a_row_lacks_is_not_given_to_it() -> None:
    given = [{"messages": CHAT, "chat_template_kwargs": each} for each in ({"effort": "low"}, {"deep": True}, None)]
    for rows in (streamed(given), Dataset.from_list(given)):
        info = check(rows)
        assert info.mapping is not None and "keys of 'chat_template_kwargs' that a row lacks" in info.mapping
        assert [row["chat_template_kwargs"] for row in as_trl(rows, info)] == [{"effort": "low"}, {"deep": True}, {}]


def test_arguments_of_calls_that_are_text_become_objects_where_a_template_needs_it() -> None:
    rows = [{"messages": [CHAT[0], calls('{"depth": 2}', "no JSON"), CHAT[1]]}]
    info = check(Dataset.from_list(rows))
    assert info.text_arguments and info.mapping is None
    decoded = with_decoded_calls(info)
    assert decoded.mapping == "arguments of calls, JSON as text, become objects"
    assert as_trl(Dataset.from_list(rows), decoded)[0]["messages"][1] == calls({"depth": 2}, "no JSON")
    objects = Dataset.from_list([{"messages": [calls({"depth": 2})]}])
    assert not check(objects).text_arguments


@pytest.mark.parametrize(
    ("row", "method", "said"),
    [
        ({"messages": CHAT[:1], "rejected_response": "b"}, "dpo", "'messages' does not end with a question and the"),
        ({"messages": CHAT, "rejected_response": None}, "dpo", "'rejected_response' holds nothing (null), not text"),
        ({"messages": CHAT[1:], "label": True}, "kto", "'messages' does not end with a question and the assistant's"),
        ({"messages": CHAT}, "grpo", "'messages' ends with an answer, and GRPO writes the answers itself"),
        ({"chosen": "a", "rejected": "b", "margin": "wide"}, "reward", "column 'margin' holds text, not a number"),
        ({"messages": [{"role": "tool_call", "content": "dig()"}]}, "sft", "is a tool_call, and its 'content' is no"),
    ],
)
def test_rows_of_other_toolkits_that_lack_something_are_refused(row: Row, method: str, said: str) -> None:
    assert said in refusal(Dataset.from_list([row]), method=method)


def whats(row: Row, **arguments: Any) -> list[tuple[str, bool]]:
    """What is found in a row, and whether it is only told."""
    return [(each.what, each.by_design) for each in check(Dataset.from_list([row]), **arguments).findings]


NOT_USED: dict[str, tuple[Row, str, bool]] = {
    "another chat": ({"messages": [USER, ASSISTANT], "conversations": [{"from": "human"}]}, "'conversations'", False),
    "training data of another format": ({"messages": [USER, ASSISTANT], "context": "moles"}, "'context'", False),
    "a number of its own": ({"messages": [USER, ASSISTANT], "row": 7}, "'row'", True),
}


@pytest.mark.parametrize("case", NOT_USED)
def test_a_column_that_is_not_used_is_told(case: str) -> None:
    row, column, only_told = NOT_USED[case]
    assert whats(row) == [(f"not used: column {column}", only_told)]


def test_answers_that_teach_nothing_are_counted() -> None:
    rows = [{"prompt": "q", "completion": text} for text in ("a", " ", "")]
    (found,) = check(Dataset.from_list(rows)).findings
    assert (found.what, found.rows, found.first) == ("an answer is empty", 2, 2)
    same = {"prompt": "q", "chosen": "a", "rejected": "a"}
    assert whats(same, method="dpo") == [
        ("the chosen and the rejected answer are the same, which teaches nothing", False)
    ]
    judged = {"prompt": "q", "completion": "a", "label": True}
    assert whats(judged, method="kto") == [("all answers have the label good; KTO compares both", False)]


def test_tools_that_no_template_reads_are_told() -> None:
    row = {"prompt": "q", "completion": "a", "tools": [TOOL]}
    assert whats(row) == [("not used: column 'tools'", False)]
    assert whats({"prompt": "q", "tools": [TOOL]}, method="grpo") == [
        ("not in the prompt, but given to the reward functions: column 'tools'", False)
    ]
    assert whats({"question": "q", "answer": "a", "tools": [TOOL]}, has_chat_template=False) == [
        ("not used: column 'tools'", False)
    ]


@pytest.mark.parametrize("column", ["labels", "completion_mask", "assistant_masks", "attention_mask"])
@pytest.mark.parametrize("row", [{"text": "moles dig"}, {"messages": CHAT}, {"prompt": "q", "completion": "a"}])
def test_labels_beside_text_are_told_and_kept_from_trl(row: Row, column: str) -> None:
    rows = Dataset.from_list([{**row, column: [1, 0]}])
    info = check(rows)
    assert [finding.line("train", 1) for finding in info.findings] == [
        f"warning: 1 of 1 train rows: not used: column '{column}' (first: row 1)"
    ]
    assert list(as_trl(rows, info)) == [row]


def test_a_number_in_a_table_says_how_to_give_text() -> None:
    rows = Dataset.from_list([{"prompt": "1 + 1", "completion": 2}])
    assert "holds a number, not text: CSV tells no text from numbers, so give" in refusal(rows, in_csv=True)
    assert "holds a number, not text; the row" in refusal(rows)


def test_a_word_for_a_missing_value_is_refused_as_an_answer_and_told_of_elsewhere() -> None:
    told = ("a word that may stand for a missing value is read as it stands in 'input'", False)
    assert whats({"instruction": "q", "input": "null", "output": "a"}, in_csv=True) == [told]
    said = refusal(Dataset.from_list([{"prompt": "q", "completion": "NA"}]), in_csv=True)
    assert (
        "column 'completion' holds 'NA', a word that stands for a missing value in CSV: leave the row out, or" in said
    )
    assert whats({"prompt": "q", "completion": "NA"}) == []


def test_a_text_that_begins_with_the_token_that_the_tokenizer_adds_is_told() -> None:
    told = ("the text begins with <s>, which the tokenizer adds too, so that it is there twice", False)
    assert whats({"text": "<s>moles"}, opening="<s>") == [told]
    assert whats({"prompt": "<s>Dig", "completion": "a"}, opening="<s>") == [told]
    assert whats({"text": "moles <s>"}, opening="<s>") == whats({"text": "<s>moles"}) == []


AS_IT_IS: dict[str, tuple[Row, str]] = {
    "preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "dpo"),
    "preference in messages": ({"prompt": CHAT[:1], **ANSWERS}, "dpo"),
    "a prompt in both": ({"chosen": CHAT, "rejected": CHAT}, "reward"),
    "unpaired": ({"prompt": "q", "completion": "a", "label": False}, "kto"),
    "pairs with a margin": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1}, "reward"),
    "pairs for KTO": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "kto"),
    "prompts": ({"prompt": "q", "solution": "s"}, "grpo"),
}


@pytest.mark.parametrize("case", AS_IT_IS)
def test_what_trl_reads_stays_as_it_is(case: str) -> None:
    row, method = AS_IT_IS[case]
    rows = Dataset.from_list([row])
    info = check(rows, method=method)
    assert info.mapping is None and as_trl(rows, info) is rows


def test_without_a_chat_template_questions_are_plain_text() -> None:
    rows = Dataset.from_list([{"instruction": "i", "input": "x", "output": "a"}])
    info = check(rows, has_chat_template=False)
    assert list(as_trl(rows, info)) == [{"prompt": "i\n\nx\n", "completion": "a"}]
    assert info.mapping is not None and "as plain text" in info.mapping


@pytest.mark.parametrize(
    ("method", "row", "said"),
    [
        ("kto", {"prompt": "q", "completion": "a"}, "accepted 'prompt', 'completion' and 'label'"),
        ("kto", {"prompt": "q", "completion": "a", "label": "yes"}, "column 'label' holds text, not true or false"),
        ("reward", {"chosen": "a", "reject": "b"}, "rename 'reject' to 'rejected'?"),
        ("dpo", {"messages": [USER], "worse": "a"}, "split the last answer of 'messages' off"),
        ("sft", {"human": "q", "gpt": "a"}, "rename 'human' to 'prompt'?, rename 'gpt' to 'completion'?"),
        ("sft", {"edition": "1", "items": [{"messages": [USER, ASSISTANT]}]}, "rows seem to be inside 'items'"),
        ("sft", {"texture": 5, "test": "x"}, "accepted 'messages' (also with 'tools'), 'prompt' and 'completion'"),
        ("sft", {"instruction": "q", "generation": "a"}, "; rename 'generation' to 'completion'?"),
        (
            "sft",
            {"conversation": [{"human": "q", "assistant": "a"}]},
            "'conversation' holds objects with 'human', 'ass",
        ),
        ("sft", {"7": GOOD_PAIR, "8": GOOD_PAIR}, "one object of which each value ('7', ...) is a row"),
        ("dpo", {"instruction": "q", "input": "i", "output": ["a", "b"]}, "; rename the columns"),
        (
            "dpo",
            {"input": {"messages": [USER]}, "preferred_output": [ASSISTANT], "non_preferred_output": [ASSISTANT]},
            "'preferred_output' as 'chosen' and 'non_preferred_output' as 'rejected'",
        ),
        ("sft", {"prompt;completion": "q;a"}, "the file is separated by ';': save it with commas"),
        ("grpo", {"text": "a"}, "fit no format of grpo: found 'text'; accepted 'prompt'"),
    ],
)
def test_wrong_columns_of_a_trainer_name_what_it_reads(method: str, row: Row, said: str) -> None:
    assert said in refusal(Dataset.from_list([row]), method=method)


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_wrong_row_is_named_with_number_and_column(case: str) -> None:
    good, bad, expected = BAD_ROWS[case]
    rows = [good] * 2 + [bad]
    for message in map(refusal, (streamed(rows), map_style(rows))):
        # rows of which the first is wrong as well are found there
        assert message.startswith("row 1 of" if case == "half a token" else "row 3 of the 'train' split: "), message
        assert expected in message
        assert "the row begins {" in message


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("wrong", [8, -1])
def test_a_token_that_the_model_does_not_have_is_named_with_its_bounds(column: str, wrong: int) -> None:
    right = {"input_ids": [7, 0], "labels": [7, -100]}
    rows = Dataset.from_list([right, {**right, column: [wrong, 0]}])
    bounds = "ids are from 0 to 7, the vocabulary of the model"
    assert f"column '{column}' has the token id {wrong}; {bounds}" in refusal(rows, vocabulary=8)
    assert check(Dataset.from_list([right]), vocabulary=8).kind == "tokenized"


def test_a_nested_fault_far_behind_is_found_and_rows_are_numbered_as_the_dataset_counts() -> None:
    rows = [GOOD] * 2500 + [{"messages": [USER, {"role": None, "content": "x"}]}]
    dataset = Dataset.from_list(rows)
    assert "row 2501" in refusal(dataset)
    assert "row 1 of" in refusal(dataset.select([2500, 3]))
    assert check(dataset.select(range(100))).kind == "messages"


def test_of_a_stream_only_the_first_rows_are_read() -> None:
    rows = [{"text": "a"}] * STREAMED_ROWS + [{"text": None}]
    assert check(streamed(rows)).kind == "text"
    assert "row 100 of" in refusal(streamed(rows[1:]))


def test_content_in_parts_and_tool_calls_without_content_are_accepted() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    rows = Dataset.from_list([{"messages": [parts, call]}], features=Features({"messages": List(Json())}))
    assert check(rows).kind == "messages"


def test_text_in_parts_becomes_one_text_and_other_parts_stay() -> None:
    def parts(*kinds: str) -> Row:
        return {"messages": [USER, {"role": "assistant", "content": [{"type": kind, "text": kind} for kind in kinds]}]}

    kinds = Features({"messages": List(Json())})
    texts = Dataset.from_list([parts("text", "output_text")], features=kinds)
    info = check(texts)
    assert info.mapping == "parts of a message become one text"
    assert as_trl(texts, info)[0]["messages"][1]["content"] == "textoutput_text"
    assert check(Dataset.from_list([parts("text", "verse")], features=kinds)).mapping is None
    nothing = {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": None}]}]}
    assert check(Dataset.from_list([nothing], features=kinds)).mapping is None


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "grpo"])
def test_of_two_columns_of_questions_the_one_is_read_that_trl_reads(method: Any) -> None:
    answers = {"sft": {"output": "a"}, "kto": {"output": "a", "label": True}, "grpo": {}}
    row = {"prompt": "q", "question": "other", **answers.get(method, {"chosen": "a", "rejected": "b"})}
    assert check(Dataset.from_list([row]), method=method).content["prompt"] == "prompt"


def test_a_system_prompt_has_several_names_of_which_one_counts() -> None:
    row = {"system_prompt": "Dig.", "question": "q", "response": "a"}
    info = check(Dataset.from_list([row]))
    assert as_trl(Dataset.from_list([row]), info)[0]["prompt"][0] == {"role": "system", "content": "Dig."}
    both = check(Dataset.from_list([{**row, "system": "Swim."}]))
    assert [finding.what for finding in both.findings] == ["not used: column 'system_prompt'"]


def test_bytes_and_json_in_text_are_named() -> None:
    assert "text that looks like JSON, not a list of" in refusal(Dataset.from_list([{"messages": json.dumps([USER])}]))
    assert "column 'text' holds bytes, not text" in refusal(Dataset.from_list([{"text": b"a"}]))


def test_rows_of_two_formats_in_one_file_are_refused() -> None:
    message = refusal(Dataset.from_list([{**GOOD, "prompt": None, "completion": None}]))
    assert "are of two formats: row 1 has 'messages', others 'prompt' and 'completion'" in message


def test_conversations_without_a_template_name_model_and_flag() -> None:
    message = refusal(Dataset.from_list([GOOD]), has_chat_template=False)
    assert "'some/model' has no chat template" in message
    assert "--chat_template_path" in message
    assert check(Dataset.from_dict({"text": ["a"]}), has_chat_template=False).kind == "text"


@pytest.mark.parametrize("rows", [{"text": ["a"]}, {"prompt": ["a"], "completion": ["b"]}, {"input_ids": [[1]]}])
def test_assistant_only_loss_needs_conversations(rows: dict[str, list[Any]]) -> None:
    assert refusal(Dataset.from_dict(rows), assistant_only_loss=True).startswith("--assistant_only_loss needs")


def test_assistant_only_loss_needs_an_assistant_in_every_row() -> None:
    rows = [GOOD, GOOD, {"messages": [USER, USER]}]
    message = refusal(Dataset.from_list(rows), assistant_only_loss=True)
    assert message.startswith("row 3 ")
    assert "no message of the role 'assistant'" in message
    assert check(Dataset.from_list(rows)).kind == "messages"
    assert check(Dataset.from_list(rows[:2]), assistant_only_loss=True).kind == "messages"


def test_completion_only_loss_needs_a_completion() -> None:
    assert "--completion_only_loss needs 'prompt'" in refusal(Dataset.from_list([GOOD]), completion_only_loss=True)
    assert check(Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}), completion_only_loss=True)
    assert check(Dataset.from_dict({"input_ids": [[1]], "completion_mask": [[1]]}), completion_only_loss=True)
