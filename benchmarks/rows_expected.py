"""Which tokens and labels are right for the data files of `rows.py`, by hand: nothing of the package or TRL runs here.

Files are read by Python's own readers, conversations are put together as text, and the tokenizer's file is used by
`tokenizers` alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Pieces = list[tuple[str, bool]]  # text, and whether it is learned

_END = "<|im_end|>"


def _template(message: str, *, before: str = "", asks: str = "<|im_start|>assistant\n") -> str:
    loop = "{% for m in messages %}" + message + "{% endfor %}"
    return before + loop + "{% if add_generation_prompt %}" + asks + "{% endif %}"


_PLAIN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n"
_CALLS = (
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
)
#: Chat templates, by what is odd in them.
TEMPLATES = {
    "unmarked": _template(_PLAIN),
    "known roles": _template("{% if m.role in ('user', 'assistant', 'system') %}" + _PLAIN + "{% endif %}"),
    "no system": _template("{% if m.role != 'system' %}" + _PLAIN + "{% endif %}"),
    "trims": _template(_PLAIN.replace("or ''", "| trim")),
    "no end": _template("{{ m.role }}: {{ m.content }}\n", asks="assistant: "),
    "another end": _template(_PLAIN.replace(_END, "<|bos|>")),
    "with tools": _template(
        _CALLS, before="{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    ),
    "earlier thinking dropped": _template(
        _PLAIN.replace("m.content or ''", "m.content if loop.last else m.content.split('</think>')[-1] | trim")
    ),
}


@dataclass(frozen=True)
class Sequence:
    """Token ids, and the labels of a loss (-100: not learned)."""

    ids: list[int]
    labels: list[int]
    pieces: tuple[str, ...] = ()  # its text


@dataclass(frozen=True)
class Expected:
    """What has to come of a case: rows, or a refusal; and words that have to be said."""

    rows: list[Sequence]
    refused: bool
    says: tuple[str, ...] = ()


# ---- what has to be refused, and what has to be said -----------------------------------------------------------------

#: Cases that cannot be trained as they say, and a word of the line.
REFUSED: dict[str, str] = {
    "all_empty_text.jsonl": "nothing would be learned",
    "axolotl_segments.jsonl": "'segments'",
    "bare_list.jsonl": "line 1: a row has to be a JSON object",
    "bare_string.jsonl": "line 1: a row has to be a JSON object",
    "bytes.parquet": "bytes",
    "chats.jsonl (no end)": "ends an answer with no token",
    **dict.fromkeys(("chats.jsonl.bz2", "chats.jsonl.xz", "chats.jsonl.zip", "chats.jsonl.zst", "chats.zip"), "suffix"),
    "content_only.jsonl": "'content'",
    "conversation_singular.jsonl": "rename 'conversation' to 'conversations'",
    "cp1252.jsonl": "iconv -f windows-1252",
    "dir_cols": "b.jsonl also has 'source'",
    "dir_mixed": "b.csv",
    "dir_only_test": "only test",
    "dir_two_txt": "a.jsonl",
    "dpo_implicit_differ.jsonl": "row 1",
    "dpo_long.jsonl": "--max_length",
    "dpo_null_rejected.jsonl": "row 1",
    "dupkeys.jsonl": "line 9",
    "ids_allmasked.jsonl": "no row has a token that is in the loss",
    "ids_oob.jsonl": "token id 700",
    "image_rows.jsonl": "pictures",
    "image_str_rows.jsonl": "pictures",
    "input_output.jsonl": "rename 'input' to 'prompt'",
    "json_string_messages.jsonl": "looks like JSON",
    "kto_cols.jsonl": "row 1",
    "kto_str.jsonl": "'label' holds text",
    "late_columns.jsonl": "two formats",
    "late_null.jsonl": "row 25",
    "latin1.jsonl": "line 9",
    "missing_key.jsonl": "row 9",
    "mixed_output.jsonl": "row 5",
    "msgs.csv": "looks like JSON",
    "msgs_str.parquet": "looks like JSON",
    "na.csv": "NA",
    "nested_messages.jsonl": "inside 'data'",
    "notreallygz.jsonl.gz": "not compressed",
    "null_assistant.jsonl": "row 9",
    "null_text.jsonl": "row 5",
    "null_value_sharegpt.jsonl": "row 5",
    "num.csv": "row 1",
    "num_output.jsonl": "row 1",
    "only_user.jsonl [turns]": "no message of the role 'assistant'",
    "ragged.csv": "line 3",
    "semi.csv": "';'",
    "sharegpt_both.jsonl": "row 3",
    "squad.jsonl": "'answers'",
    "stream_null_late.jsonl": "row 151",
    "string_list.jsonl": "row 1",
    "surrogate.jsonl": "line 9",
    "think_open.jsonl [thinking]": "after </think>",
    "tools_dictresult.jsonl": "row 1",
    "trailing_comma.jsonl": "line 1",
    "tuple_messages.jsonl": "row 1",
    "two_prompt_names.jsonl": "keep one of them",
    "user_assistant_cols.jsonl": "rename 'user' to 'prompt'?, rename 'assistant' to 'completion'?",
    "utf16.jsonl": "iconv -f utf-16",
    "wrapped.json": "inside 'data'",
    "wrapped_train.json": "inside 'train'",
}
#: Cases of which something has to be said.
SAYS: dict[str, str] = {
    **dict.fromkeys(("alpaca_empty_output.jsonl", "dpo_empty.jsonl", "pc_empty_completion.jsonl"), "answer is empty"),
    "empty_assistant.jsonl": "answer is empty",
    **dict.fromkeys(("book.txt", "dir_txt", "empty_text.jsonl", "spaces_text.jsonl"), "the text is empty"),
    "alpaca_text.jsonl": "not used: columns 'instruction', 'input', 'output'",
    "alpaca_system.jsonl": "system",
    "chats.jsonl (another end)": "<|bos|>",
    "dir_bak": "notes.txt",
    "dir_hidden": ".c.jsonl",
    "dir_train_plus": "more_chats.jsonl",
    "dpo_same.jsonl": "are the same",
    "dpo_swift.jsonl": "'messages' is the chosen conversation",
    "dpo_ultra.jsonl": "'messages'",
    "dpo_one_msg_diff_prompt.jsonl": "'prompt' is not used",
    "extra_cols.jsonl": "not used",
    "extra_mixed_meta.jsonl": "not used",
    "index.csv": "not used",
    "instr_response.jsonl": "'category'",
    "kto_false.jsonl": "all answers have the label bad",
    "kto_messages.jsonl [kto]": "the last message of 'messages' is the completion",
    "kto_messages.jsonl [sft]": "not used: column 'label'",
    "long.jsonl": "are cut to 256 tokens",
    "longans.jsonl": "are cut to 256 tokens",
    "messages_syscol.jsonl": "'system'",
    "name_key.jsonl": "'name' of user messages is not in the text",
    "only_user.jsonl": "there is no answer of the assistant",
    "openai_functions.jsonl": "tool calls of assistant messages are not in the text",
    "openai_functions.jsonl (with tools)": "function_call becomes tool_calls",
    "pc_merge.jsonl": "tokenised otherwise",
    "pc_trailing.jsonl": "tokenised otherwise",
    "prompt_messages.jsonl": "'prompt' is not used",
    "reasoning_content.jsonl": "the thinking of assistant messages",
    "reasoning_content.jsonl (with tools)": "",
    "stream_ok.jsonl": "in the order of the files",
    "swift_history.jsonl": "'history'",
    "system.jsonl (no system)": "the text of system messages",
    "text_and_messages.jsonl": "not used: column 'text'",
    "think_multi.jsonl (earlier thinking dropped)": "the thinking of earlier assistant messages",
    **dict.fromkeys(("tools_two.jsonl", "tools_two_bom.jsonl", "tools_str.jsonl"), "the tools are not in the text"),
    "tool_calls_empty_content.jsonl": "the tools are not in the text",
    "tools_two.jsonl (with tools)": "",
    "tools_str.jsonl (with tools)": "",
}


def expected_of(
    name: str, path: Path, method: str, template: str, flags: dict[str, Any], encode: Callable[[str], Any]
) -> Expected:
    """What is right for a case.

    Args:
        name, path: of the data file.
        method: of training.
        template: a name of `TEMPLATES`, or "" for the tokenizer's own.
        flags: of the command.
        encode: of a `tokenizers.Tokenizer`.
    """
    traits = [
        method,
        *(["thinking"] if flags.get("mask_thinking") else ["turns"] if flags.get("assistant_only_loss") else []),
    ]
    keys = [f"{name} ({template})", *(f"{name} [{trait}]" for trait in reversed(traits)), name]
    key = next((each for each in keys if each in REFUSED or each in SAYS), name)
    if key in REFUSED:
        return Expected([], True, (REFUSED[key],))
    rows = [
        _tokenised(pieces, encode)
        for row in _rows_of(path)
        for pieces in (_meaning(row, method, template, flags) if "input_ids" not in row else [row])
    ]
    return Expected(rows, False, (SAYS[key],) if SAYS.get(key) else ())


def _tokenised(pieces: Any, encode: Callable[[str], Any]) -> Sequence:
    """Pieces of text, tokenised as a whole; a row of token ids without its padding."""
    if isinstance(pieces, dict):
        ids, mask = pieces["input_ids"], pieces.get("attention_mask", [1] * len(pieces["input_ids"]))
        labels = pieces.get("labels", ids)
        kept = [(token, label) for token, label, real in zip(ids, labels, mask, strict=True) if real]
        return Sequence(*(list(each) for each in zip(*kept, strict=True)))
    whole = encode("".join(text for text, _ in pieces))
    ends, end = [], 0
    for text, learned in pieces:
        end += len(text)
        ends.append((end, learned))
    labels = []
    for token, (_, stop) in zip(whole.ids, whole.offsets, strict=True):
        learned = next(learned for end, learned in ends if stop <= end)
        labels.append(token if learned else -100)
    return Sequence(whole.ids[:256], labels[:256], tuple(text for text, _ in pieces))


# ---- reading ---------------------------------------------------------------------------------------------------------


def _rows_of(path: Path) -> Iterator[Row]:
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and each.name[0] != ".")
        named = [each for each in files if each.stem == "train"]
        for file in named or [each for each in files if "test" not in each.name and each.suffix != ".md"]:
            yield from _rows_of(file)
        return
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
        return
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    if path.suffix == ".txt":
        yield from ({"text": line} for line in text.splitlines())
    elif path.suffix in (".csv", ".tsv"):
        yield from csv.DictReader(io.StringIO(text.lstrip("\r\n")), delimiter="\t" if path.suffix == ".tsv" else ",")
    else:
        decoder, at = json.JSONDecoder(), 0
        while (at := _next(text, at)) < len(text):
            value, at = decoder.raw_decode(text, at)
            yield from value if isinstance(value, list) else [value]


def _next(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


# ---- meaning ---------------------------------------------------------------------------------------------------------

_USER = ("user", "human")
_ASSISTANT = ("assistant", "gpt", "bot", "model")


def _role(name: str) -> str:
    lower = name.lower()
    return "user" if lower in _USER else "assistant" if lower in _ASSISTANT else "tool" if lower == "function" else name


def _messages(value: Any) -> list[Row]:
    listed = value if isinstance(value, list) else [value]
    found = []
    for message in listed:
        new = {key: each for key, each in message.items() if each is not None}
        new["role"] = _role(new.pop("from", None) or new["role"])
        new["content"] = new.pop("value", None) or new.get("content") or ""
        if isinstance(new["content"], list):
            new["content"] = "".join(part.get("text", "") for part in new["content"])
        found.append(new)
    return found


def _meaning(row: Row, method: str, template: str, flags: dict[str, Any]) -> Iterator[Pieces]:
    """The sequences of a row: one, or one for each answer of a pair."""
    row = _with_answer_apart(row, method)
    has_answers = "chosen" in row and "rejected" in row
    if method in ("dpo", "reward") or (method == "kto" and has_answers):
        for name in ("chosen", "rejected"):
            yield [(text, learned or method == "reward") for text, learned in _answered(row, row[name])]
    elif method == "kto":
        yield _answered(row, row["completion"])
    elif "messages" in row or "conversations" in row:
        yield list(_chat(_messages(row.get("messages") or row["conversations"]), row, template, flags))
    elif "text" in row:
        yield [(row["text"] + _END, True)]
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        yield [(row["prompt"], False), (row["completion"] + _END, True)]
    else:
        answer = next(row[name] for name in ("completion", "output", "answer", "response") if name in row)
        yield _answered(row, answer)


def _with_answer_apart(row: Row, method: str) -> Row:
    """ms-swift's rows for preferences, whose conversation ends with the answer, as TRL's."""
    if method == "sft" or "messages" not in row:
        return row
    before, last = row["messages"][:-1], row["messages"][-1:]
    if "rejected_response" in row:
        other = [{"role": "assistant", "content": row["rejected_response"]}]
        return {"prompt": before, "chosen": last, "rejected": other}
    return {"prompt": before, "completion": last} if "chosen" not in row else row


def _answered(row: Row, answer: Any) -> Pieces:
    """A prompt that is read and an answer that is learned."""
    asked = next((row[n] for n in ("prompt", "instruction", "question", "query", "conversations") if n in row), None)
    plain = isinstance(asked, str) and isinstance(answer, str) and "prompt" in row
    if plain and not row.get("system") and "response" not in row:
        return [(asked, False), (answer + _END, True)]
    return _as_chat(row, asked, answer)


def _as_chat(row: Row, asked: Any, answer: Any) -> Pieces:
    more = [row[name] for name in ("input", "context") if row.get(name) and not isinstance(asked, list)]
    before = [{"role": "user", "content": "\n\n".join([asked, *more])}] if isinstance(asked, str) else []
    before = before if asked is None or isinstance(asked, str) else _messages(asked)
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _messages(answer)
    if before and after[0]["role"] == "user":  # the answer begins with its prompt
        before = []
    if not before:
        before, after = after[:-1], after[-1:]
    for question, said in reversed(row.get("history") or []):
        before = [{"role": "user", "content": question}, {"role": "assistant", "content": said}, *before]
    if row.get("system"):
        before = [{"role": "system", "content": row["system"]}, *before]
    text = "".join(_turn(message) for message in before)
    rest = "".join(_turn(message) for message in after)
    opening = "<|im_start|>assistant\n"
    return [(text + opening, False), (rest.removeprefix(opening), True)]


def _turn(message: Row) -> str:
    return f"<|im_start|>{message['role']}\n{message['content']}{_END}\n"


def _chat(messages: list[Row], row: Row, template: str, flags: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """A conversation, each turn in pieces."""
    if row.get("system"):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    turns_only = bool(flags.get("assistant_only_loss"))
    end = "<|bos|>" if template == "another end" else _END
    if template == "with tools" and (row.get("tools") or row.get("functions")):
        tools = row.get("tools") or [{"type": "function", "function": each} for each in row["functions"]]
        tools = json.loads(tools) if isinstance(tools, str) else tools
        yield f"<|im_start|>system\n{json.dumps(_without_nulls(tools), ensure_ascii=False)}{end}\n", not turns_only
    marked = {"": False, **dict.fromkeys(TEMPLATES, True)}[template]  # by prefixes, where there are no marks
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if template == "known roles" and role not in ("user", "assistant", "system"):
            continue
        if template == "no system" and role == "system":
            continue
        if template == "trims":
            content = content.strip()
        if template == "earlier thinking dropped" and number < len(messages) - 1:
            content = content.split("</think>")[-1].strip()
        if template == "with tools":
            thought, calls = message.get("reasoning_content"), message.get("tool_calls") or []
            if message.get("function_call"):
                calls = [{"function": message["function_call"]}]
            calls = [_with_objects(call) for call in calls]  # this template writes arguments as JSON itself
            content += f"<think>{thought}</think>" if thought else ""
            content += "".join(
                f"<tool_call>{json.dumps(_without_nulls(call['function']), ensure_ascii=False)}</tool_call>"
                for call in calls
            )
        learned = all(message.get(mark, True) for mark in ("weight", "train", "training", "loss"))
        is_answer = role == "assistant"
        given = any(mark in each for each in messages for mark in ("weight", "train", "training", "loss"))
        if turns_only:
            learned = learned and is_answer
        yield f"<|im_start|>{role}\n", not turns_only
        if flags.get("mask_thinking") and is_answer and "<think>" in content:
            begin, found, rest = content.partition("</think>")
            yield begin + found, False
            content = rest
            if not found:
                rest, learned = "", False
        yield content + end, learned
        with_newline = learned and (marked or given or not turns_only)
        yield "\n", with_newline if is_answer else not turns_only


def _with_objects(call: Row) -> Row:
    """A call whose arguments, JSON as text, are an object."""
    function = call["function"]
    given = function["arguments"]
    return {**call, "function": {**function, "arguments": json.loads(given) if isinstance(given, str) else given}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
