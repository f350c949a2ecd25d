"""``python -m hf_rocm_tune.demo`` (``make demo``): the main job from nothing to an adapter, with no network.

Creates the data and a small base model (`assets`), lets the base model answer two questions, runs the real command
``hf-rocm-tune sft`` in a child process, and shows what changed. The job runs on the GPU if torch sees one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_rocm_tune.demo import assets
from hf_rocm_tune.errors import CommandParser, UsageError

_NEW_TOKENS = 40
_PREFIX = "demo:"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit code of the job, or 2 if the assets cannot be created there."""
    started = time.perf_counter()
    try:
        code = _run(_parse(argv))
    except UsageError as error:
        print(f"{_PREFIX} error: {error}", file=sys.stderr)
        return error.exit_code
    if code == 0:
        _say(f"all done in {time.perf_counter() - started:.0f} s")
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m hf_rocm_tune.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output"), help="default: demo-output")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps of the fine-tuning (default: 250)")
    parser.add_argument("--fresh", action="store_true", help="create data and base model again even if they exist")
    options = parser.parse_args(argv)
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: at least one step is needed")
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output_dir {options.output_dir}: {error.strerror}; name another directory") from error
    return options


def _run(options: argparse.Namespace) -> int:
    _quieten_libraries()
    made = assets.prepare(options.output_dir / "assets", fresh=options.fresh, say=_say)
    pairs = _sample_pairs(made.data / "test.jsonl")
    before = _answers(made.model, None, [question for question, _ in pairs])
    adapter = options.output_dir / "adapter"
    command = job_command(made, adapter, steps=options.steps)
    _say("running " + " ".join(["python", *command[1:]]))
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    after = _answers(made.model, adapter, [question for question, _ in pairs])
    _report(adapter, pairs, before, after)
    return 0


def job_command(made: assets.Assets, adapter: Path, *, steps: int) -> list[str]:
    """The real command of the main job, for these assets."""
    flags: dict[str, Any] = {
        "model_name_or_path": made.model,
        "dataset_name": made.data,
        "output_dir": adapter,
        "max_steps": steps,
        "learning_rate": 2e-3,  # ten times the default, right for a model this small
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 16,
        "max_length": 128,
        "gradient_checkpointing": "false",  # saves memory that this model does not need
        "eval_on_start": "true",
        "eval_strategy": "steps",
        "eval_steps": steps,
        "save_steps": steps,
        "logging_steps": 25,
        "report_to": "none",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "hf_rocm_tune", "sft", *arguments, "--overwrite_output_dir"]


def _quieten_libraries() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()


def _sample_pairs(test_file: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in test_file.read_text(encoding="utf-8").splitlines()]
    chosen = (rows[len(rows) // 3], rows[2 * len(rows) // 3])
    return [(question["content"], answer["content"]) for question, answer in chosen]


def _answers(model_folder: Path, adapter: Path | None, questions: list[str]) -> list[str]:
    """Greedy answers of the base model on the CPU, with or without the adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            tokens = model.generate(**prompt, max_new_tokens=_NEW_TOKENS, do_sample=False)
        new_tokens = tokens[0, prompt["input_ids"].shape[1] :]
        answers.append(" ".join(tokenizer.decode(new_tokens, skip_special_tokens=True).split()))
    return answers


def _report(adapter: Path, pairs: list[tuple[str, str]], before: list[str], after: list[str]) -> None:
    from hf_rocm_tune.publish.history import LOG_NAME, series
    from hf_rocm_tune.train.report import FILE_NAME, closing_line

    losses = [loss for _, loss in series(json.loads((adapter / LOG_NAME).read_text())["log"], "eval_loss")]
    for (question, truth), first, then in zip(pairs, before, after, strict=True):
        _say(f"question  {question}")
        _say(f"  before  {first or '(nothing)'}")
        _say(f"  after   {then or '(nothing)'}")
        _say(f"  Python  {truth}")
    _say(f"evaluation loss on pairs that were not trained on: {losses[0]:.2f} before, {losses[-1]:.2f} after")
    _say(f"adapter in {adapter}: {', '.join(sorted(file.name for file in adapter.iterdir() if file.is_file()))}")
    report = adapter / FILE_NAME
    _say(closing_line(json.loads(report.read_text(encoding="utf-8"))))
    _say(f"the full report is in {report}")


def _say(line: str) -> None:
    print(f"{_PREFIX} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
