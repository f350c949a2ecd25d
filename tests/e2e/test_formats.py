"""Every format, source and variant that the command promises trains through the command line, all bytes verified."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import CommandServer, Result, log_rows
from tests.e2e.conftest import flags, report_of, sampled

ROWS = 12

Train = Callable[..., Result]


@pytest.fixture
def train(server: CommandServer, model_of: Callable[[str], Path], tmp_path: Path) -> Train:
    """Runs the command for two steps into `tmp_path / "out"`; flags may be overridden."""

    def run(*extra: str, **settings: Any) -> Result:
        shared = {
            "model_name_or_path": model_of("llama3"),
            "output_dir": tmp_path / "out",
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "max_length": 48,
            "logging_steps": 1,
            "lora_dropout": 0.0,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        result = server.run(*flags(**shared | settings), *extra)
        assert result.code == 0, result.stderr[-3000:]
        covered = report_of(tmp_path / "out")["coverage"]
        assert covered["unverified"] == []
        assert covered["verified_bytes"] == covered["device_bytes"] > 0
        return result

    return run


def losses(result: Result) -> list[float]:
    """The training losses that a run printed."""
    found = [float(row["loss"]) for row in log_rows(result.stdout)]
    assert found and all(math.isfinite(loss) and loss > 0 for loss in found), result.stdout
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _parquet(folder: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(_rows(tiny.write_messages_jsonl(folder / "rows.jsonl", ROWS))).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "messages.jsonl": lambda folder: tiny.write_messages_jsonl(folder / "rows.jsonl", ROWS),
    "messages with tools": lambda folder: tiny.write_tools_jsonl(folder / "rows.jsonl", ROWS),
    "text": lambda folder: tiny.write_text_jsonl(folder / "rows.jsonl", ROWS),
    "parquet": _parquet,
}


@pytest.mark.parametrize(
    "source",
    sampled(SOURCES, "messages with tools", "text"),
)
def test_every_source_trains_with_every_byte_verified(source: str, train: Train, tmp_path: Path) -> None:
    result = train(dataset_name=SOURCES[source](tmp_path))
    assert len(losses(result)) == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def _written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_alpaca_trains_as_the_same_questions_in_trls_columns(train: Train, tmp_path: Path) -> None:
    pairs = _rows(tiny.write_prompt_completion_jsonl(tmp_path / "pairs.jsonl", ROWS, conversational=True))
    asked = [(row["prompt"][-1]["content"], row["completion"][0]["content"]) for row in pairs]
    trls = _written(tmp_path, [{**row, "prompt": row["prompt"][-1:]} for row in pairs])
    stock = losses(train(dataset_name=trls))
    alpaca = _written(tmp_path, [{"instruction": q, "input": "", "output": a} for q, a in asked])
    result = train("--overwrite_output_dir", dataset_name=alpaca)
    assert losses(result) == stock
    assert "the train rows become prompt/completion (conversational): 'instruction' is the prompt" in result.stdout


def test_a_mixture_in_a_recipe(train: Train, tmp_path: Path) -> None:
    chats = tiny.write_sharegpt_jsonl(tmp_path / "chats.jsonl", ROWS)
    parts = [{"path": str(chats), "fraction": 1}, {"path": "json", "data_files": str(chats), "fraction": 1}]
    recipe = tmp_path / "mixture.yaml"
    recipe.write_text(json.dumps({"datasets": parts, "test_split_size": 0.25}))
    result = train("--config", str(recipe))
    assert f"training on {2 * ROWS * 3 // 4} rows" in result.stdout and "human is user" in result.stdout


def test_streamed_rows_train_and_are_evaluated(train: Train, tmp_path: Path) -> None:
    evaluation = {"eval_split_size": 3, "eval_strategy": "steps", "eval_steps": 1}
    result = train("--dataset_streaming", dataset_name=SOURCES["messages.jsonl"](tmp_path), **evaluation)
    assert len(losses(result)) == 2
    assert result.stdout.count("evaluation: loss") >= 2


def test_only_the_tokens_that_were_asked_for_count(train: Train, tmp_path: Path) -> None:
    pairs = tiny.write_prompt_completion_jsonl(tmp_path / "pairs.jsonl", ROWS)
    chats = tiny.write_messages_jsonl(tmp_path / "chats.jsonl", ROWS)
    again = {"overwrite_output_dir": True, "max_steps": 1, "max_length": 256}
    completions = losses(train(dataset_name=pairs, **again))
    everything = losses(train(dataset_name=pairs, completion_only_loss=False, **again))
    assert completions != everything
    assistant = losses(train("--assistant_only_loss", dataset_name=chats, **again))
    assert assistant != losses(train(dataset_name=chats, **again))


def test_packing_moves_fewer_batches_and_all_of_them_are_verified(train: Train, tmp_path: Path) -> None:
    rows = SOURCES["messages.jsonl"](tmp_path)
    epoch = {"dataset_name": rows, "max_steps": -1, "num_train_epochs": 1, "max_length": 256}
    steps = {}
    for packing in (False, True):
        result = train(packing=packing, overwrite_output_dir=True, **epoch)
        steps[packing] = len(losses(result))
        assert "flash" not in result.stderr.lower()  # SDPA isolates the examples: see test_packing.py
    assert steps[True] < steps[False] == ROWS / 2
    assert report_of(tmp_path / "out")["batches"]["tensors"] > 0


@pytest.mark.parametrize(("learning_rate", "steps"), [(0.0, 3), (0.01, 5)])
def test_early_stopping_on_rows_split_off_stops_when_nothing_improves_and_not_before(
    train: Train, tmp_path: Path, learning_rate: float, steps: int
) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "early_stopping_patience": 2, "eval_split_size": 0.25}
    source = SOURCES["messages.jsonl"](tmp_path)
    result = train(dataset_name=source, max_steps=5, learning_rate=learning_rate, **evaluation)
    assert len(losses(result)) == steps  # the first evaluation sets the mark; the next two do not beat it
    assert "training on 9 rows, evaluation on 3 rows" in result.stdout


def test_early_stopping_goes_back_to_the_best_checkpoint(train: Train, messages: Path, tmp_path: Path) -> None:
    each = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    # A rate at which the loss soon rises: the best checkpoint is an early one.
    best = {"load_best_model_at_end": True, "early_stopping_patience": 1, "learning_rate": 3.0}
    train(dataset_name=messages, max_steps=20, **each, **best)
    newest = max((tmp_path / "out").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((newest / "trainer_state.json").read_text())
    assert state["global_step"] < 20 and state["best_global_step"] < state["global_step"]
    chosen = load_file(tmp_path / "out" / f"checkpoint-{state['best_global_step']}" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, chosen[name]) for name, tensor in saved.items())


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "8-bit": ({"load_in_8bit": True}, {}),
    "4-bit dora": ({"load_in_4bit": True, "use_dora": True}, {"use_dora": True}),
    "4-bit packed": ({"load_in_4bit": True, "packing": True, "max_length": 256}, {}),
    "saved modules": ({"lora_modules_to_save": "lm_head"}, {"modules_to_save": ["lm_head"]}),
}


@pytest.mark.parametrize("variant", sampled(VARIANTS, "8-bit", "4-bit dora", "saved modules"))
def test_every_adapter_variant_trains(variant: str, train: Train, messages: Path, tmp_path: Path) -> None:
    settings, written = VARIANTS[variant]
    assert len(losses(train(dataset_name=messages, **settings))) == 2
    adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {name: adapter[name] for name in written} == written
    names = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    assert any("lora_magnitude_vector" in name for name in names) == ("dora" in variant)
    assert any(name.endswith("lm_head.weight") for name in names) == (variant == "saved modules")


def test_full_fine_tuning_saves_the_whole_model(train: Train, messages: Path, tmp_path: Path) -> None:
    train(dataset_name=messages, use_peft=False)
    output = tmp_path / "out"
    assert (output / "model.safetensors").is_file() and not (output / "adapter_config.json").exists()
