"""What a start after another one must know: patience, a named checkpoint, added tokens, inputs in its own directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.conftest import ADAPTER, Job, MakeJob, losses_of


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("resumes", train=48, test=9, max_steps=6, learning_rate=1e-3, save_steps=2)


def attack(step: int) -> dict[str, str]:
    """A trained weight changes in memory, which is found, and the run goes back."""
    changed = {"kind": "trained", "moment": "before clipping", "what": "weight", "step": step}
    return {"MEMORY_ATTACK": json.dumps(changed)}


def test_patience_goes_on_where_it_was(job: Job, tmp_path: Path) -> None:
    stops = {
        "max_steps": 12, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "early_stopping_patience": 3,
        "early_stopping_threshold": 10.0,
    }  # fmt: skip
    job.done(tmp_path / "whole", **stops)
    assert job.run(tmp_path / "killed", crash="step=4,kind=kill", **stops).code < 0
    again = job.done(tmp_path / "killed", **stops)
    assert "continues from checkpoint-3 of 12 steps (verified)" in again.stdout
    assert 1 < len(losses_of(tmp_path / "whole")) < 12
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")


def test_a_rollback_goes_to_the_checkpoint_that_was_named(job: Job, tmp_path: Path) -> None:
    job.done(tmp_path / "first", learning_rate=0.02, seed=7, save_steps=4)
    named = {"resume_from_checkpoint": tmp_path / "first" / "checkpoint-4", "max_steps": 8, "save_steps": 8}
    job.done(tmp_path / "whole", **named)
    job.done(tmp_path / "attacked", env=attack(6), **named)
    assert (tmp_path / "attacked" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()


def test_tokens_that_a_chat_template_brings_are_saved_and_survive_a_rollback(job: Job, tmp_path: Path) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|new1|>", "<|new2|>"]})
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("<|im_start|>", "<|new1|>")
    tokenizer.save_pretrained(tmp_path / "template")
    job.done(tmp_path / "whole", chat_template_path=tmp_path / "template")
    job.done(tmp_path / "attacked", env=attack(4), chat_template_path=tmp_path / "template")
    assert (tmp_path / "attacked" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()
