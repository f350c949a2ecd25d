"""What is trained on is counted and shown before the first step: nothing is cut or dropped without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import tiny
from tests.e2e.command import Result
from tests.e2e.conftest import Start, report_of

ROWS = 20


@pytest.fixture
def lengths(model_of: Callable[[str], Path], tmp_path: Path) -> tuple[Path, list[int], list[int]]:
    """Prompts and completions, and the tokens of each row and of its prompt, counted without the package."""
    file = tiny.write_prompt_completion_jsonl(tmp_path / "pairs.jsonl", ROWS)
    tokenizer = AutoTokenizer.from_pretrained(model_of("llama3"))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    whole = [len(tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token)["input_ids"]) for row in rows]
    return file, whole, [len(tokenizer(row["prompt"])["input_ids"]) for row in rows]


def counted(result: Result, out: Path) -> dict[str, Any]:
    assert result.code == 0, result.stderr[-2000:]
    (found,) = report_of(out)["data"]
    return dict(found)


@pytest.mark.parametrize(
    ("limit", "packing"),
    [(30, False), (60, True), *(pytest.param(*each, marks=pytest.mark.long) for each in ((60, False), (4096, False)))],
)
def test_cut_and_dropped_rows_are_counted(
    start: Start, lengths: tuple[Path, list[int], list[int]], tmp_path: Path, limit: int, packing: bool
) -> None:
    file, whole, prompts = lengths
    result = start(dataset_name=file, max_length=limit, packing=packing)
    found = counted(result, tmp_path / "out")
    assert (found["rows"], found["tokens"], found["longest"]) == (ROWS, sum(whole), max(whole))
    assert found["cut"] == sum(count > limit for count in whole)
    assert found["lost"] == sum(max(count - limit, 0) for count in whole)
    assert found["trained"] == sum(
        max(min(count, limit) - prompt, 0) for count, prompt in zip(whole, prompts, strict=True)
    )
    assert found["dropped"] == (0 if packing else sum(prompt >= limit for prompt in prompts))
    assert ("warning: " in result.stdout and f"--max_length {max(whole)} keeps all" in result.stdout) == (limit < 4096)
    assert "% of the tokens count in the loss" in " ".join(result.stdout.split())


def test_the_other_end_may_be_kept(start: Start, lengths: tuple[Path, list[int], list[int]], tmp_path: Path) -> None:
    file, whole, prompts = lengths
    result = start(dataset_name=file, max_length=30, truncation_mode="keep_end")
    answers = [count - prompt for count, prompt in zip(whole, prompts, strict=True)]
    assert counted(result, tmp_path / "out")["trained"] == sum(
        min(answer, 29) for answer in answers
    )  # nothing predicts the first


def test_pairs_that_are_too_long_are_told(start: Start, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Of the first four pairs only one answer is cut."""
    rows = [
        {"prompt": "Why" + " so" * count, "chosen": " yes" * (30 if count < 4 else 1), "rejected": " no"}
        for count in range(ROWS)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(model_of("llama3"))
    cut = 0
    for row in rows:
        prompt = len(tokenizer(row["prompt"])["input_ids"])
        longer = max(len(tokenizer.tokenize(row[answer])) for answer in ("chosen", "rejected")) + 1  # and its end
        cut += prompt < 16 < prompt + longer
    for method in ("dpo", "reward"):
        result = start("--dry_run", "json", method=method, dataset_name=file, max_length=16)
        assert result.code == 0, result.stderr[-2000:]
        (found,) = json.loads(result.stdout)["summaries"]
        assert found["rows"] == ROWS and 0 < found["dropped"] < ROWS, found
        assert (found["lost"] > 0) == (method == "dpo"), "the reward trainer drops what DPO's cuts"
        assert found["answers_cut"] == (cut if method == "dpo" else 0) and cut > 4


def test_a_dry_run_shows_what_counts_and_writes_nothing(start: Start, tmp_path: Path) -> None:
    chats = tiny.write_messages_jsonl(tmp_path / "chats.jsonl", ROWS)
    before = sorted(tmp_path.rglob("*"))
    row = json.loads(chats.read_text(encoding="utf-8").splitlines()[0])["messages"]
    shown = start("--assistant_only_loss", "--dry_run", dataset_name=chats)
    assert shown.code == 0, shown.stderr[-2000:]
    assert f"[[{row[1]['content']}<|im_end|>" in shown.stdout.replace("\n]]", "]]")
    assert f"<|im_start|>user\n{row[0]['content']}<|im_end|>" in shown.stdout
    content = json.loads(start("--assistant_only_loss", "--dry_run", "json", dataset_name=chats).stdout)
    pieces = content["rows"][0]["parts"]["row"]
    assert len({json.dumps(row) for row in content["rows"]}) == len(content["rows"]), "a row is shown once"
    assert "".join(piece["text"] for piece in pieces if piece["counts"]).startswith(row[1]["content"])
    page = start("--assistant_only_loss", "--dry_run", "html", dataset_name=chats).stdout
    assert page.startswith("<!DOCTYPE html>") and "&lt;|im_start|&gt;user" in page
    assert f"<b>{row[1]['content']}" in page, "what counts is coloured"
    assert sorted(tmp_path.rglob("*")) == before


BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_answers_alone_count_with_a_template_without_marks(start: Start, tmp_path: Path) -> None:
    chats = tiny.write_messages_jsonl(tmp_path / "chats.jsonl", ROWS)
    (tmp_path / "bare.jinja").write_text(BARE)
    asked = ("--assistant_only_loss", "--dataset_name", str(chats))
    found = counted(start(*asked, chat_template_path=tmp_path / "bare.jinja"), tmp_path / "out")
    by_name = start(*asked, "--overwrite_output_dir", chat_template_path="chatml")
    assert 0 < found["trained"] < found["tokens"] and counted(by_name, tmp_path / "out") == found
    (tmp_path / "bare.jinja").write_text(BARE.replace("assistant\n{% endif", "bot\n{% endif"))
    refused = start(*asked, "--overwrite_output_dir", chat_template_path=tmp_path / "bare.jinja")
    assert refused.code == 2 and len(refused.error_lines) == 1 and "row 1 of the 'train' split" in refused.stderr
