"""``python -m hf_rocm_tune.demo`` (``make demo``): the main job from nothing to an adapter, with no network.

Creates the data and a small base model (`assets`), runs the real command ``hf-rocm-tune sft`` in a child process, and
shows two answers with and without the adapter. All of it runs on the GPU if torch sees one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hf_rocm_tune.demo import assets
from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.publish.history import LOG_NAME, REPORT_NAME
from hf_rocm_tune.publish.training_log import series


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit code of the job, or 2 if the assets cannot be created there."""
    try:
        return _run(argv)
    except UsageError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(argv: Sequence[str] | None) -> int:
    started = time.perf_counter()
    parser = CommandParser(prog="python -m hf_rocm_tune.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("demo-output"),
        help="write data, base model and result here (default: demo-output)",
    )
    parser.add_argument("--steps", type=int, default=250, help="train for this many optimizer steps (default: 250)")
    parser.add_argument("--fresh", action="store_true", help="create data and base model again even if they exist")
    options = parser.parse_args(argv)
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: at least one step is needed")
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output_dir {options.output_dir}: {error.strerror}; name another directory") from error
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    made = assets.prepare(options.output_dir / "assets", fresh=options.fresh, say=_say)
    adapter = options.output_dir / "adapter"
    flags = {
        "model_name_or_path": made.model,
        "dataset_name": made.data,
        "output_dir": adapter,
        "max_steps": options.steps,
        "learning_rate": 2e-3,  # ten times the default, right for a model this small
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 16,
        "max_length": 128,
        "gradient_checkpointing": "false",  # saves memory that this model does not need
        "eval_on_start": "true",
        "eval_strategy": "steps",
        "eval_steps": options.steps,
        "save_steps": options.steps,
        "logging_steps": 25,
        "report_to": "none",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command = ["-m", "hf_rocm_tune", "sft", *arguments, "--overwrite_output_dir"]
    _say(" ".join(["running python", *command]))
    code = subprocess.run([sys.executable, *command], check=False).returncode
    if code:
        return code
    losses = [loss for _, loss in series(json.loads((adapter / LOG_NAME).read_text())["log"], "eval_loss")]
    _say(f"evaluation loss on pairs that were not trained on: {losses[0]:.2f} before, {losses[-1]:.2f} after")
    rows = [json.loads(line)["messages"] for line in (made.data / "test.jsonl").read_text("utf-8").splitlines()]
    asked = [rows[len(rows) // 3], rows[2 * len(rows) // 3]]  # not trained on
    prompts = [part for question, _ in asked for part in ("--prompt", question["content"])]
    likeliest = ["--max_new_tokens", "40", "--temperature", "0"]
    command = ["-m", "hf_rocm_tune", "generate", str(adapter), "--compare", *likeliest, *prompts]
    code = subprocess.run([sys.executable, *command], check=False).returncode
    for question, answer in asked:
        _say(f"{question['content']} Python itself says: {answer['content']}")
    _say(f"the adapter and {REPORT_NAME} are in {adapter}; all done in {time.perf_counter() - started:.0f} s")
    return code


def _say(line: str) -> None:
    print(f"demo: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
