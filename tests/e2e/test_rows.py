"""What the rows say is what is trained: each kind of row that something could be lost of, dry and trained, gives the
tokens and labels that were computed here by hand, or a line that names the row; a dry run and a run agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from tests import tiny
from tests.e2e.command import CommandServer
from tests.e2e.conftest import Start, flags, report_of, sampled

Row = dict[str, Any]


@pytest.fixture
def start(start: Start) -> Start:
    """The shared one, with quiet settings and room for each row."""
    return partial(start, max_length=200, doctor="off", disable_tqdm=True)


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def written(folder: Path, rows: list[Row], name: str = "given.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


QUESTION, ANSWER = ("user", "Where is the mole?"), ("assistant", "Under the lawn.")
TOKENS = "tokens of a completion"
CALL = '{"name": "dig", "arguments": {"depth": "deep"}}'
# Row, flags, what the model reads, which parts of that are in the loss (None: all), what is said
READ: dict[str, tuple[Row, dict[str, Any], str, list[str] | None, str]] = {
    "a mark of a message": (
        {"messages": [user("Say A"), assistant("B", loss=False), user("Say C"), assistant("C", loss=True)]},
        {"assistant_only_loss": True},
        chatml(("user", "Say A"), ("assistant", "B"), ("user", "Say C"), ("assistant", "C")),
        ["C<|im_end|>\n"],
        "",
    ),
    "a weight without a flag": (
        {"messages": [user("Say A"), assistant("B", weight=0), user("Say C"), assistant("C", weight=1)]},
        {},
        chatml(("user", "Say A"), ("assistant", "B"), ("user", "Say C"), ("assistant", "C")),
        ["<|im_start|>user\nSay A<|im_end|>\n<|im_start|>assistant\n", chatml(("user", "Say C"), ("assistant", "C"))],
        "",
    ),
    "a system column beside messages": (
        {"messages": [user(QUESTION[1]), assistant(ANSWER[1])], "system": "Be a gardener."},
        {},
        chatml(("system", "Be a gardener."), QUESTION, ANSWER),
        None,
        "'system' is the system prompt",
    ),
    "a history": (
        {"query": QUESTION[1], "response": ANSWER[1], "history": [["Hello", "Good day"]], "system": "Garden."},
        {},
        chatml(("system", "Garden."), ("user", "Hello"), ("assistant", "Good day"), QUESTION, ANSWER),
        ["Under the lawn.<|im_end|>\n"],
        "'history' stands before it",
    ),
    "roles in any case": (
        {"conversations": [{"from": "HUMAN", "value": QUESTION[1]}, {"from": "Bot", "value": ANSWER[1]}]},
        {"assistant_only_loss": True},
        chatml(QUESTION, ANSWER),
        ["Under the lawn.<|im_end|>"],
        "Bot is assistant",
    ),
    "a system prompt under another name, beside a question": (
        {"system_prompt": "Be a gardener.", "question": QUESTION[1], "response": ANSWER[1]},
        {},
        chatml(("system", "Be a gardener."), QUESTION, ANSWER),
        ["Under the lawn.<|im_end|>\n"],
        "'system_prompt' is the system prompt",
    ),
    "text in parts": (
        {
            "messages": [
                {"role": " User", "content": [{"type": "text", "text": "Where "}, {"type": "text", "text": "is it?"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": ANSWER[1]}]},
            ]
        },
        {},
        chatml(("user", "Where is it?"), ANSWER),
        None,
        "parts of a message become one text",
    ),
    "a mark in a completion": (
        {"prompt": [user("Say A")], "completion": [assistant("B", weight=0), user("Say C"), assistant("C", weight=1)]},
        {},
        chatml(("user", "Say A"), ("assistant", "B"), ("user", "Say C"), ("assistant", "C")),
        [chatml(("user", "Say C"), ("assistant", "C"))],
        "",
    ),
    TOKENS: ({"input_ids": [7, 8, 9], "completion_mask": [0, 0, 1]}, {}, "#$%", ["%"], ""),
    "padding": (
        {"input_ids": [0, 0, 7, 8, 9], "attention_mask": [0, 0, 1, 1, 1]},
        {},
        "",
        None,
        "positions with attention_mask 0 are removed",
    ),
}


# The other kinds are in the normal suite where rows are converted (tests/data/test_formats.py)
@pytest.mark.parametrize("kind", sampled(READ, "a mark of a message", "a history", "a mark in a completion", TOKENS))
def test_the_model_reads_and_learns_what_the_row_says(kind: str, start: Start, tmp_path: Path) -> None:
    row, settings, text, learned, said = READ[kind]
    shown = start("--dry_run", "json", dataset_name=written(tmp_path, [row] * 3), **settings)
    assert shown.code == 0, shown.stderr[-2000:]
    assert said in shown.stderr and "warning" not in shown.stderr
    pieces = json.loads(shown.stdout)["rows"][0]["parts"]["row"]
    if text:
        assert "".join(piece["text"] for piece in pieces) == text
    else:
        assert sum(piece["tokens"] for piece in pieces) == sum(row["attention_mask"])
    if learned is None:
        assert all(piece["counts"] for piece in pieces)
    else:
        assert [piece["text"] for piece in pieces if piece["counts"]] == learned


THOUGHT = {"role": "assistant", "content": "Yes", "reasoning_content": "Moles dig."}
SAID: dict[str, tuple[list[Row], str, str]] = {
    "thinking of the answer": (
        [{"messages": [user("q"), THOUGHT]}],
        "sft",
        "3 of 3 train rows: the thinking of assist",
    ),
    "an answer that also stands elsewhere": (
        [{"messages": [user("Answer Yes or No"), {"role": "oracle", "content": "Yes"}, assistant("Fine")]}],
        "sft",
        "the text of oracle messages is not in what the model reads",
    ),
    "a key": ([{"messages": [{**user("q"), "mood": "glad"}, assistant("a")]}], "sft", "'mood' of user messages"),
    "a call": (
        [{"messages": [user("q"), assistant("", function_call=json.loads(CALL)), assistant("a")]}],
        "sft",
        "tool calls of assistant messages are not in the text",
    ),
    "another chat": (
        [{"messages": [user("q"), assistant("a")], "conversations": [{"from": "human", "value": "worms"}]}],
        "sft",
        "not used: column 'conversations'",
    ),
    "a column": ([{"messages": [user("q"), assistant("a")], "context": "moles"}], "sft", "not used: column 'context'"),
    "an empty answer": ([{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": " "}], "sft", "is empty"),
    "pairs of one answer": ([{"prompt": "q", "chosen": "a", "rejected": "a"}], "dpo", "answer are the same"),
    "one label": ([{"prompt": "q", "completion": "a", "label": True}], "kto", "all answers have the label good"),
}
BARE = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "kind", sampled(SAID, "thinking of the answer", "a column", "pairs of one answer", "one label")
)
def test_what_is_lost_is_told_by_dry_run_run_report_and_card(kind: str, start: Start, tmp_path: Path) -> None:
    rows, method, said = SAID[kind]
    template = {}
    if method == "sft" and "messages" in rows[0]:
        (tmp_path / "bare.jinja").write_text(BARE)
        template = {"chat_template_path": tmp_path / "bare.jinja"}
    settings = {"dataset_name": written(tmp_path, (rows * 3)[:3]), "method": method, **template}
    shown, run = start("--dry_run", "json", **settings), start(**settings)
    assert shown.code == run.code == 0, shown.stderr[-2000:] + run.stderr[-2000:]
    assert "warning: " in run.stdout and said in run.stdout, run.stdout
    assert "RANK" not in run.stdout + run.stderr
    summaries = json.loads(shown.stdout)["summaries"]
    assert summaries == report_of(tmp_path / "out")["data"]
    whats = [finding["what"] for finding in summaries[0]["findings"]]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert any(said.partition("rows: ")[2] in what for what in whats), whats
    assert len([line for line in card.splitlines() if line.startswith("  - ")]) == len(whats)


def many(path: Path) -> Path:
    path.mkdir()
    return path


def file_of(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def folder_of(**files: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        made = many(folder / "rows")
        for name, text in files.items():
            (made / name.replace("__", ".")).write_text(text)
        return made

    return write


LINE = json.dumps({"text": "moles dig"}) + "\n"
PAIR = [{"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]}]
REFUSED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "pairs without a common prompt": (lambda f: written(f, PAIR), "dpo", "row 1 of the 'train' split: 'chosen' and"),
    "a history that is none": (
        lambda f: written(f, [{"query": "q", "response": "a", "history": "before"}]),
        "sft",
        "row 1 of the 'train' split: column 'history' holds text, not pairs",
    ),
    "a weight of a half": (
        lambda f: written(f, [{"messages": [user("q"), assistant("a", weight=0.5)]}]),
        "sft",
        "message 2 has 'weight': 0.5",
    ),
    "a call that is no JSON": (
        lambda f: written(f, [{"conversations": [{"from": "function_call", "value": "dig()"}]}]),
        "sft",
        "message 1 is a function_call, and its 'value' is no JSON",
    ),
    "a call in text": (
        lambda f: written(f, [{"messages": [user("q"), assistant("", tool_calls='[{"name": "dig"}]')]}]),
        "sft",
        "message 2 has text as 'tool_calls', not a list of calls",
    ),
    "a call of nothing": (
        lambda f: written(f, [{"messages": [user("q"), assistant("", tool_calls=[{"id": "7"}])]}]),
        "sft",
        "a call in 'tool_calls' that names no function",
    ),
    "nothing to learn": (lambda f: written(f, [{"text": ""}] * 3), "sft", "no token of the train rows is in the loss"),
    "labels that are all masked": (
        lambda f: written(f, [{"input_ids": [5, 6], "labels": [-100, -100]}] * 2),
        "sft",
        "no training rows remain",
    ),
    "Windows-1252": (file_of("a.jsonl", b'{"text": "\x93moles\x94"}\n'), "sft", "`iconv -f windows-1252 -t utf-8`"),
    "UTF-16": (file_of("a.jsonl", LINE.encode("utf-16")), "sft", "`iconv -f utf-16 -t utf-8`"),
    "a key given twice": (
        file_of("a.jsonl", (LINE * 2 + '{"text": "a", "text": "b"}\n').encode()),
        "sft",
        "a.jsonl, line 3: the key 'text' is given twice",
    ),
    "a broken surrogate": (
        file_of("a.jsonl", (LINE + '{"text": "\\ud83d"}\n').encode()),
        "sft",
        "line 2: The surrogate",
    ),
    "a pointer": (file_of("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n"), "sft", "run `git lfs pull`"),
    "NA in CSV": (
        file_of("a.csv", b"prompt,completion\nq,NA\n"),
        "sft",
        "a word that stands for a missing value in CSV",
    ),
    "semicolons": (file_of("a.csv", b"prompt;completion\nq;a\n"), "sft", "separated by ';'"),
    "unlike columns": (folder_of(a__jsonl=LINE, b__jsonl='{"text": "a", "where": "b"}\n'), "sft", "also has 'where'"),
    "several formats": (folder_of(a__jsonl=LINE, b__csv="text\nmoles\n"), "sft", "leaves out b.csv"),
    "notes that outvote the rows": (folder_of(a__jsonl=LINE, b__txt="x", c__txt="y"), "sft", "leaves out a.jsonl"),
    "only a test split": (folder_of(a__jsonl=LINE, mole_eval__jsonl=LINE), "sft", "a.jsonl belong to none"),
}


# Here one kind for each place that refuses; all are in the normal suite below the command line (tests/data)
OFTEN = (
    "pairs without a common prompt",
    "nothing to learn",
    "labels that are all masked",
    "Windows-1252",
    "several formats",
)


@pytest.mark.parametrize("kind", sampled(REFUSED, *OFTEN))
def test_what_cannot_be_trained_is_one_line_of_dry_run_and_run(kind: str, start: Start, tmp_path: Path) -> None:
    write, method, said = REFUSED[kind]
    data = write(tmp_path)
    for extra in (("--dry_run", "json"), ()):
        refused = start(*extra, dataset_name=data, method=method)
        assert refused.code == 2 and "Traceback" not in refused.stderr, refused.stderr[-2000:]
        assert len(refused.error_lines) == 1 and said in refused.error_lines[0], refused.stderr[-2000:]


ACCEPTED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a CSV of Excel's": (file_of("a.csv", "\ufeffprompt,completion\nq,a\n".encode()), "1 with"),
    "a blank line first": (file_of("a.csv", b"\n\nprompt,completion\nq,a\n"), "1 with"),
    "a first row without a column": (
        lambda f: written(f, [{"instruction": "q", "output": "a"}, {"instruction": "q", "input": "b", "output": "a"}]),
        "2 with",
    ),
    "files beside train.jsonl": (folder_of(train__jsonl=LINE, moles__jsonl=LINE * 3), "not read are moles.jsonl"),
}


@pytest.mark.parametrize("kind", sampled(ACCEPTED, "a CSV of Excel's", "files beside train.jsonl"))
def test_files_that_are_fine_are_read_and_others_named(kind: str, start: Start, tmp_path: Path) -> None:
    write, said = ACCEPTED[kind]
    shown = start("--dry_run", dataset_name=write(tmp_path))
    assert shown.code == 0 and said in shown.stdout + shown.stderr, shown.stderr[-2000:]


#: Kinds of rows, the verb and flags: whatever they are, a dry run shows what a run reads.
COMPARED: dict[str, tuple[Row, str, dict[str, Any]]] = {
    **{kind: (row, "sft", settings) for kind, (row, settings, *_) in READ.items()},
    **{kind: (rows[0], method, {}) for kind, (rows, method, _) in SAID.items() if method != "kto"},
    "masked thinking": (
        {"messages": [user("q"), assistant("<think>moles dig deep</think>Yes")]},
        "sft",
        {"assistant_only_loss": True, "mask_thinking": True},
    ),
    "text": ({"text": "moles dig"}, "sft", {}),
    "text that is cut": ({"text": "moles dig " * 20}, "sft", {"max_length": 9}),
    "a prompt and a completion": ({"prompt": "moles", "completion": " dig"}, "sft", {}),
    "a pair": ({"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}, "dpo", {}),
    "a pair that is scored": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "reward", {}),
    "an answer with its label": ({"prompt": "q", "completion": "a", "label": True}, "kto", {}),
    "tokens with labels": ({"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}, "sft", {}),
}


@pytest.mark.parametrize("kind", sampled(COMPARED, "a weight without a flag", "masked thinking", "a pair"))
def test_a_dry_run_shows_what_a_run_reads(
    kind: str, server: CommandServer, model_of: Callable[[str], Path], tmp_path: Path, checkout: Path
) -> None:
    row, method, settings = COMPARED[kind]
    asked = {
        "model_name_or_path": model_of("llama3"),
        "dataset_name": written(tmp_path, [row] * 2),
        "output_dir": tmp_path / "out",
        "max_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "max_length": 200,
        "doctor": "off",
        **settings,
    }
    probe = {"SCRIPT": str(checkout / "benchmarks" / "rows_probe.py"), "ROWS_PROBE": str(tmp_path / "read.json")}
    shown = server.run(*flags(**asked), "--dry_run", "json", env={"METHOD": method}, cwd=tmp_path)
    run = server.run(*flags(**asked), env={"METHOD": method, **probe}, cwd=tmp_path)
    assert shown.code == run.code == 0, shown.stderr[-2000:] + run.stderr[-2000:]
    content = json.loads(shown.stdout)
    assert content["summaries"] == report_of(tmp_path / "out")["data"]
    read = json.loads((tmp_path / "read.json").read_text())
    runs = [
        [(len([*group]), counts) for counts, group in groupby(label != -100 for label in each["labels"])]
        for each in read
    ]
    for pieces in content["rows"][0]["parts"].values():
        assert [(piece["tokens"], piece["counts"]) for piece in pieces] in runs
    assert len(runs) == 2 * len(content["rows"][0]["parts"])


def test_thinking_that_is_masked_is_masked_in_the_preview_too(start: Start, tmp_path: Path) -> None:
    rows = written(tmp_path, [{"messages": [user("q"), assistant("<think>moles dig deep</think>Yes")]}] * 2)
    settings = {"dataset_name": rows, "assistant_only_loss": True, "mask_thinking": True}
    shown, run = start("--dry_run", "json", **settings), start(**settings)
    assert shown.code == run.code == 0, shown.stderr[-2000:] + run.stderr[-2000:]
    content = json.loads(shown.stdout)
    assert content["summaries"] == report_of(tmp_path / "out")["data"]
    assert [piece["text"] for piece in content["rows"][0]["parts"]["row"] if piece["counts"]] == ["Yes<|im_end|>"]


def test_pairs_for_kto_are_all_there(start: Start, tmp_path: Path) -> None:
    rows = written(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b"}] * 3)
    shown = start("--dry_run", "json", method="kto", dataset_name=rows)
    (summary,) = json.loads(shown.stdout)["summaries"]
    assert (summary["rows"], summary["dropped"]) == (6, 0)


def test_a_bad_row_late_in_a_stream_is_named_and_what_was_learned_is_saved(start: Start, tmp_path: Path) -> None:
    rows = [{"messages": [user(f"q {number}"), assistant("a")]} for number in range(140)]
    rows[120]["messages"][1]["content"] = None
    asked = {"max_steps": 10, "per_device_train_batch_size": 20, "save_strategy": "steps", "save_steps": 500}
    refused = start("--dataset_streaming", dataset_name=written(tmp_path, rows), **asked)
    assert refused.code == 2 and len(refused.error_lines) == 1, refused.stderr[-2000:]
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert "row 121 of the 'train' split" in refused.stderr and saved.name in refused.stderr
    assert (saved / "integrity.json").is_file() and int(saved.name.partition("-")[2]) in (5, 6)
    assert "in the order of the files" in refused.stdout


def test_a_bad_row_that_a_loader_worker_reads_is_named_as_it_counts(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for part in ("train-1", "train-2"):
        rows = [{"messages": [user(f"q {number}"), assistant("a")]} for number in range(140)]
        if part == "train-2":
            rows[120]["messages"][1]["content"] = None
        written(tmp_path, rows).rename(folder / f"{part}.jsonl")
    asked = {"max_steps": 20, "per_device_train_batch_size": 20, "dataloader_num_workers": 2}
    refused = start("--dataset_streaming", dataset_name=folder, **asked)
    assert refused.code == 2 and len(refused.error_lines) == 1 and "Traceback" not in refused.stderr, refused.stderr
    assert "row 121 of the 'train' split as loader worker 2 of 2 counts them: column 'messages'" in refused.stderr
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def test_late_rows_of_a_stream_that_lose_something_are_told_once(start: Start, tmp_path: Path) -> None:
    rows = [{"messages": [user(f"q {number}"), assistant("a")]} for number in range(124)]
    rows[110]["messages"][1]["content"], rows[112]["messages"][1]["content"] = " ", ""
    rows[120]["messages"][1]["reasoning_content"] = "moles dig"
    asked = {"max_steps": 4, "per_device_train_batch_size": 31}
    run = start("--dataset_streaming", dataset_name=written(tmp_path, rows), **asked)
    assert run.code == 0, run.stderr[-2000:]
    told = [line for line in run.stdout.splitlines() if "of the 'train' split: " in line]
    assert told == [
        "hf-rocm-tune: warning: row 111 of the 'train' split: an answer is empty",
        "hf-rocm-tune: warning: row 121 of the 'train' split: the thinking of assistant messages is not in what the "
        "model reads",
    ]


def test_a_late_byte_of_a_stream_that_is_no_text_is_one_line(start: Start, tmp_path: Path) -> None:
    file = file_of("given.jsonl", (LINE * 130).encode() + b'{"text": "taupini\xe8re"}\n')(tmp_path)
    asked = {"max_steps": 10, "per_device_train_batch_size": 40}
    refused = start("--dataset_streaming", dataset_name=file, **asked)
    assert refused.code == 2 and len(refused.error_lines) == 1, refused.stderr[-2000:]
    assert "byte 0xe8 in line 131" in refused.stderr and "checkpoint-" in refused.stderr


@pytest.mark.parametrize(
    ("config", "architecture", "said"),
    [
        pytest.param("T5Config", "T5ForConditionalGeneration", "an encoder and a decoder", marks=pytest.mark.long),
        pytest.param("BertConfig", "BertForMaskedLM", "writes no text", marks=pytest.mark.long),
        ("LlamaConfig", "LlamaForSequenceClassification", "train it with `reward`"),
    ],
)
def test_models_that_write_no_text_are_refused_by_their_configuration(
    start: Start, tmp_path: Path, config: str, architecture: str, said: str
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = getattr(transformers, architecture)(getattr(transformers, config)(vocab_size=512, **sizes))
    model.save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    refused = start(dataset_name=written(tmp_path, [{"text": "a"}]), model_name_or_path=tmp_path / "model")
    assert refused.code == 2 and len(refused.error_lines) == 1 and said in refused.stderr, refused.stderr[-2000:]


# ---- the end of an answer --------------------------------------------------------------------------------------------


def base_without_chat(folder: Path, *, tokens: tuple[str, ...] = ()) -> Path:
    """A model whose tokenizer has no chat template and, unless given, none of ChatML's tokens; it ends a text with
    ``<|endoftext|>``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", *tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(tiny.training_text(), trainer=trainer)
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=end, model_max_length=256)
    config = tiny.config_of("llama3", tiny.build_tokenizer())
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 0
    assert isinstance(config, LlamaConfig)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ENDED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
#: The tokens of ChatML that the base has, its chat template, what the run says of the end, and the end.
ENDS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "without the tokens": ((), "chatml", "are added and trained: <|im_start|>", "<|im_end|>"),
    "another eos": (("<|im_start|>", "<|im_end|>"), BARE, "at which the base does not stop", "<|im_end|>"),
    "a template that was mended": ((), ENDED, "", "<|endoftext|>"),
}


# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", sampled(ENDS, "without the tokens"))
def test_trained_until_it_answers_plain_transformers_stops(case: str, start: Start, tmp_path: Path) -> None:
    tokens, template, said, end = ENDS[case]
    base = base_without_chat(tmp_path / "base", tokens=tokens)
    rows = [{"messages": [user("Say worm"), assistant("worm")]}] * 8
    if template != "chatml":
        (tmp_path / "given.jinja").write_text(template)
        template = str(tmp_path / "given.jinja")
    steps: dict[str, Any] = {"max_steps": 40, "learning_rate": 0.01, "per_device_train_batch_size": 4, "lora_r": 32}
    steps |= {"lr_scheduler_type": "constant", "warmup_steps": 0}
    if template != "chatml":  # nothing is added to random embeddings, so that adapters alone could not learn it
        steps |= {"use_peft": False, "learning_rate": 0.003}
    data = written(tmp_path, rows)
    run = start(dataset_name=data, model_name_or_path=base, chat_template_path=template, **steps)
    assert run.code == 0, run.stderr[-2000:]
    assert said in run.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    if template == "chatml":
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(len(tokenizer))
        model = PeftModel.from_pretrained(model, tmp_path / "out")
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out", max_new_tokens=40, do_sample=False)
    asked = [user("Say worm")]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, generation_config=generation)[0, ids["input_ids"].shape[1] :]
    assert len(answer) < 40 and tokenizer.convert_ids_to_tokens(int(answer[-1])) == end


@pytest.mark.parametrize(
    ("end", "said"), [("", "ends an answer with no token"), ("<|stop_here|>", "'<|stop_here|>', which is ")]
)
def test_a_template_that_ends_no_answer_is_refused(end: str, said: str, start: Start, tmp_path: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}")
    rows = written(tmp_path, [{"messages": [user("q"), assistant("a")]}])
    for extra in (("--dry_run", "json"), ()):
        refused = start(*extra, dataset_name=rows, chat_template_path=template)
        assert refused.code == 2 and len(refused.error_lines) == 1 and said in refused.stderr, refused.stderr[-2000:]
