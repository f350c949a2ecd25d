"""Perplexity is that of the definition, token by token, however rows are batched; and the harness gets our model."""

from __future__ import annotations

import importlib.util
import json
import math
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.data_utils import common_prefix_length

from hf_rocm_tune import cli
from hf_rocm_tune.publish import evaluate
from hf_rocm_tune.publish.evaluate import perplexity
from hf_rocm_tune.publish.generate import Loaded
from tests import tiny

CLOSE = 1e-5  # relative, float32 in another order
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def data(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`made`, and data in every format."""
    scratch = tmp_path_factory.mktemp("data")
    return {
        **made,
        "text": tiny.write_text_jsonl(scratch / "text.jsonl", 7),
        "pairs": tiny.write_prompt_completion_jsonl(scratch / "pairs.jsonl", 6),
        "chats": tiny.write_messages_jsonl(scratch / "chats.jsonl", 6),
        "chat pairs": tiny.write_prompt_completion_jsonl(scratch / "chat_pairs.jsonl", 5, conversational=True),
        "sharegpt": tiny.write_sharegpt_jsonl(scratch / "sharegpt.jsonl", 5),
        "folder": tiny.write_dataset_dir(scratch / "folder", train=5, test=4),
    }


def rows_of(file: Path, tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Ids of each row and the first counted token, by the definition of each format, without our code."""
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if "text" in row:
            yield tokenizer(row["text"] + tokenizer.eos_token)["input_ids"], 1
        elif "messages" in row or "conversations" in row:
            names = {"human": "user", "gpt": "assistant"}
            turns = row.get("messages") or [
                {"role": names[turn["from"]], "content": turn["value"]} for turn in row["conversations"]
            ]
            yield tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"], 1
        elif isinstance(row["prompt"], str):
            begun = tokenizer(row["prompt"])["input_ids"]
            ids = tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token)["input_ids"]
            yield ids, common_prefix_length(begun, ids)
        else:
            begun = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)["input_ids"]
            yield ids, common_prefix_length(begun["input_ids"], ids)


def by_definition(model_directory: Path, file: Path, max_length: int = 1024) -> tuple[float, int]:
    """Mean negative log-likelihood and number of counted tokens: one row at a time, no padding, float64 at the end."""
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    total, count = 0.0, 0
    for ids, first in rows_of(file, AutoTokenizer.from_pretrained(model_directory)):
        ids = ids[:max_length]
        with torch.no_grad():
            likely = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        for at in range(max(first, 1), len(ids)):
            total -= float(likely[at - 1, ids[at]])
            count += 1
    return total / count, count


@pytest.mark.parametrize("kind", ["text", "pairs", "chats", "chat pairs", "sharegpt"])
def test_it_is_the_perplexity_of_the_definition(kind: str, data: dict[str, Path], loaded: Loaded) -> None:
    found = perplexity(loaded, str(data[kind]), batch_size=3, compare=True)
    for name, result in (("merged", found), ("base", found["without_adapter"])):
        loss, count = by_definition(data[name], data[kind])
        assert result["loss"] == pytest.approx(loss, rel=CLOSE)
        assert result["perplexity"] == pytest.approx(math.exp(loss), rel=CLOSE)
        assert found["tokens"] == count
    assert found["loss"] != pytest.approx(found["without_adapter"]["loss"], rel=CLOSE)


def test_neither_batches_nor_their_padding_change_it(data: dict[str, Path], loaded: Loaded) -> None:
    losses = [perplexity(loaded, str(data["text"]), batch_size=size)["loss"] for size in (1, 2, 7)]
    assert losses == pytest.approx([losses[0]] * 3, rel=CLOSE)


def test_rows_are_cut_at_their_end_and_counted_as_cut(data: dict[str, Path], loaded: Loaded) -> None:
    found = perplexity(loaded, str(data["text"]), max_length=20)
    loss, count = by_definition(data["merged"], data["text"], max_length=20)
    assert (found["loss"], found["tokens"]) == (pytest.approx(loss, rel=CLOSE), count)
    assert found["rows_cut"] > 0


def test_only_the_assistant_counts_where_that_is_asked(data: dict[str, Path], loaded: Loaded) -> None:
    found = perplexity(loaded, str(data["chats"]), assistant_only=True)
    tokenizer = AutoTokenizer.from_pretrained(data["base"])
    model = AutoModelForCausalLM.from_pretrained(data["merged"]).eval()
    total, count = 0.0, 0
    for line in data["chats"].read_text().splitlines():
        shown = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        with torch.no_grad():
            likely = model(torch.tensor([shown["input_ids"]])).logits[0].double().log_softmax(-1)
        for at, (token, wanted) in enumerate(zip(shown["input_ids"], shown["assistant_masks"], strict=True)):
            if wanted and at:
                total, count = total - float(likely[at - 1, token]), count + 1
    assert (found["loss"], found["tokens"]) == (pytest.approx(total / count, rel=CLOSE), count)
    assert found["counted"] == "tokens of the assistant"


def command(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[str], list[str]]:
    code = cli.main(["eval", *map(str, argv)])
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("hf-rocm-tune: error:")]
    return code, printed.out.splitlines(), errors


def test_the_last_line_is_the_json_that_the_file_gets(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(
        capsys, data["adapter"], "--dataset_name", data["folder"], "--compare", "--json", tmp_path / "r.json"
    )
    result = json.loads(out[-1])
    assert code == 0 and result == json.loads((tmp_path / "r.json").read_text())
    assert (result["perplexity"]["split"], result["perplexity"]["rows"]) == ("test", 4)
    assert result["verified"]["verified_bytes"] == result["verified"]["device_bytes"]
    assert result["perplexity"]["batches"]["tensors"] == 3  # ids, mask and labels of one batch
    assert [line.split()[0] for line in out[2:4]] == ["base", "adapter"]


def test_batches_that_arrive_wrong_change_nothing(
    data: dict[str, Path], loaded: Loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = perplexity(loaded, str(data["text"]), batch_size=2)
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=zero,stage=batches,rate=0.5,seed=5")
    code, out, _ = command(capsys, data["adapter"], "--dataset_name", data["text"], "--batch_size", 2)
    found = json.loads(out[-1])["perplexity"]
    assert code == 0 and found["loss"] == clean["loss"]
    assert found["batches"]["mismatches"] == found["batches"]["recovered"] > 0


def test_a_batch_that_stays_wrong_gives_no_figure(
    data: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=flip,stage=batches,persist=1")
    code, out, errors = command(capsys, data["adapter"], "--dataset_name", data["text"])
    assert (code, out, len(errors)) == (3, [], 1)


@pytest.mark.parametrize(
    ("name", "argv", "named"),
    [
        ("adapter", [], ["nothing to evaluate", "--dataset_name", "--tasks"]),
        ("adapter", ["--dataset_name", "gone.jsonl"], ["gone.jsonl"]),
        ("adapter", ["--dataset_name", "{folder}", "--split", "tset"], ["no split 'tset'", "--split NAME"]),
        ("adapter", ["--dataset_name", "{text}", "--max_length", "1"], ["--max_length"]),
        ("adapter", ["--dataset_name", "{text}", "--batch_size", "0"], ["--batch_size"]),
        ("adapter", ["--dataset_name", "{text}", "--assistant_only"], ["--assistant_only needs conversations"]),
        ("adapter", ["--dataset_name", "/"], ["'/' is the root"]),
        ("adapter", ["--dataset_name", "{text}", "--json", "x" * 300], ["--json"]),
        ("adapter", ["--dataset_name", "{text}", "--dataset_text_field", "txt"], ["columns", "text"]),
        ("adapter", ["--dataset_name", "{text}", "--json", "no/such/r.json"], ["--json"]),
        ("adapter", ["--dataset_name", "{one}"], ["no row has a token to count"]),
        ("merged", ["--dataset_name", "{beyond}"], ["row 1", "token id 512; ids are from 0 to 511"]),
        ("adapter", ["--dataset_name", "{mask}"], ["'completion_mask' has 1 entries for 2"]),
        ("bare", ["--dataset_name", "{chats}"], ["no chat template"]),
        ("merged", ["--dataset_name", "{text}", "--compare"], ["--compare"]),
        ("adapter", ["--tasks", "a,,b"], ["--tasks"]),
        ("adapter", ["--tasks", "a", "--include_path", "gone"], ["--include_path gone"]),
        ("adapter", ["--tasks", "a", "--include_path", "x" * 300], ["--include_path"]),
    ],
)
def test_wrong_input_is_one_line(
    name: str,
    argv: list[str],
    named: list[str],
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {"one": {"input_ids": [5]}, "beyond": {"input_ids": [5, 512]}}
    rows["mask"] = {"input_ids": [5, 6], "completion_mask": [1]}
    for each, row in rows.items():
        (tmp_path / f"{each}.jsonl").write_text(json.dumps(row) + "\n")
    places = {**data, **{each: tmp_path / f"{each}.jsonl" for each in rows}}
    code, out, errors = command(capsys, data[name], *(part.format(**places) for part in argv))
    assert (code, out, len(errors)) == (2, [], 1)
    assert all(part in errors[0] for part in named), errors[0]


def test_rows_are_cut_where_a_model_has_no_more_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"input_ids": [5] * 300}) + "\n")
    model = tiny.build("gpt2", tmp_path)
    code, out, _ = command(capsys, model, "--dataset_name", tmp_path / "long.jsonl")
    found = json.loads(out[-1])["perplexity"]
    assert (code, found["max_length"], found["rows_cut"], found["tokens"]) == (0, 256, 1, 255)


def test_a_missing_harness_is_one_line_with_the_command_that_installs_it(
    data: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: None)
    code, out, errors = command(capsys, data["adapter"], "--tasks", "arc_easy")
    assert (code, out, len(errors)) == (2, [], 1)
    assert "pip install 'hf-rocm-tune[eval]'" in errors[0]


@pytest.mark.skipif(not HAS_HARNESS, reason="the extra `eval` (lm-eval) is not installed")
@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_the_harness_asks_the_model_that_was_loaded(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each question has two answers, of which the base prefers one and the adapter the other, which is called right."""
    tokenizer = AutoTokenizer.from_pretrained(data["merged"])
    letters = {letter: tokenizer(letter)["input_ids"][0] for letter in string.ascii_lowercase}
    models = [AutoModelForCausalLM.from_pretrained(data[name]).eval() for name in ("base", "merged")]
    rows = []
    for number in range(8):
        ids = tokenizer(f"Question {number}:", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            base, mine = (model(ids).logits[0, -1] for model in models)
        pairs = [(one, other) for one in letters for other in letters if one != other]
        right, wrong = max(
            pairs,
            key=lambda pair: min(
                float(mine[letters[pair[0]]] - mine[letters[pair[1]]]),
                float(base[letters[pair[1]]] - base[letters[pair[0]]]),
            ),
        )
        rows.append({"question": f"Question {number}:", "choices": [wrong, right], "answer": 1})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(
        "task: tiny_choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    code, out, _ = command(capsys, data["adapter"], "--tasks", "tiny_choice", "--include_path", tmp_path, "--compare")
    found = json.loads(out[-1])["tasks"]
    assert code == 0
    assert found["results"]["tiny_choice"]["acc,none"] == 1
    assert found["without_adapter"]["results"]["tiny_choice"]["acc,none"] == 0
    assert "not verified" in found["inputs"]
    code, _, errors = command(capsys, data["adapter"], "--tasks", "tiny_choise", "--include_path", tmp_path)
    assert code == 2 and "no task 'tiny_choise'" in errors[0]
