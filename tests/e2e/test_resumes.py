"""What a start after another one must know: patience, a named checkpoint, added tokens, inputs in its own directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of

ADAPTER = "adapter_model.safetensors"
Run = Callable[..., Result]


@pytest.fixture
def run(server: CommandServer, model_of: Callable[[str], Path], messages: Path, tmp_path: Path) -> Run:
    settings = {
        "model_name_or_path": model_of("llama3"),
        "dataset_name": messages,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "max_length": 64,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
    }

    def one(name: str, *more: str, env: dict[str, str] | None = None, **changed: Any) -> Result:
        return server.run(*flags(**{**settings, **changed}, output_dir=tmp_path / name), *more, env=env)

    return one


def done(result: Result) -> None:
    assert result.code == 0, result.stderr[-3000:]


def attack(step: int) -> dict[str, str]:
    """A trained weight changes in memory, which is found, and the run goes back."""
    changed = {"kind": "trained", "moment": "before clipping", "what": "weight", "step": step}
    return {"MEMORY_ATTACK": json.dumps(changed)}


def test_patience_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    stops = {
        "max_steps": 12, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "early_stopping_patience": 3,
        "early_stopping_threshold": 10.0,
    }  # fmt: skip
    done(run("whole", **stops))
    assert run("killed", env={"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}, **stops).code < 0
    again = run("killed", **stops)
    done(again)
    assert "continues from checkpoint-3 of 12 steps (verified)" in again.stdout
    assert 1 < len(losses_of(tmp_path / "whole")) < 12
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")


def test_a_rollback_goes_to_the_checkpoint_that_was_named(run: Run, tmp_path: Path) -> None:
    done(run("first", learning_rate=0.02, seed=7, save_steps=4))
    named = {"resume_from_checkpoint": tmp_path / "first" / "checkpoint-4", "max_steps": 8, "save_steps": 8}
    done(run("whole", **named))
    done(run("attacked", env=attack(6), **named))
    assert (tmp_path / "attacked" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()


def test_tokens_that_a_chat_template_brings_are_saved_and_survive_a_rollback(run: Run, tmp_path: Path) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|new1|>", "<|new2|>"]})
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("<|im_start|>", "<|new1|>")
    tokenizer.save_pretrained(tmp_path / "template")
    done(run("whole", chat_template_path=tmp_path / "template"))
    done(run("attacked", env=attack(4), chat_template_path=tmp_path / "template"))
    assert (tmp_path / "attacked" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()


def test_an_adapter_in_the_output_directory_is_not_replaced(run: Run, tmp_path: Path) -> None:
    done(run("out"))
    for adapter in ("out", "out/checkpoint-4"):
        again = run("out", "--overwrite_output_dir", adapter_name_or_path=tmp_path / adapter)
        assert again.code == 2 and "choose another --output_dir" in again.stderr
    assert manifest.verify(tmp_path / "out") == []


def test_the_number_of_processes_decides_what_is_packed(run: Run) -> None:
    for packing, code in ((True, 2), (False, 0)):
        name = f"packing {packing}"
        assert run(name, env={"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"}, packing=packing, dataset_num_proc=1).code < 0
        again = run(name, packing=packing, dataset_num_proc=2)
        assert again.code == code, again.stderr[-2000:]
