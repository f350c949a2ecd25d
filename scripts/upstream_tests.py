"""Upstream's own trainer tests with the mixin in front: which of those that pass without it are lost, by name.

    python scripts/upstream_tests.py ../trl/tests/test_sft_trainer.py ../trl/tests/test_dpo_trainer.py
    python scripts/upstream_tests.py ../transformers/tests/trainer/test_trainer*.py -- -k "not slow"

The files come from a checkout beside this one, of the version that is installed; what they name on the Hub comes from
there or from its cache. They run twice, each time in a process of its own: as they are, and with
``VerifiedTransferMixin`` in front of every trainer class that they import. Lost tests that assert upstream's exact
callbacks or arguments are listed in `EXPECTED` with the reason; any other lost test makes the exit code 1. Arguments
after ``--`` go to pytest.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIXED = "HF_ROCM_TUNE_UPSTREAM_TESTS"
RESULTS = f"{MIXED}_RESULTS"
TRAINERS = {
    "transformers": ("Trainer", "Seq2SeqTrainer"),
    "trl": ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer"),
}
CALLBACKS = "compares the whole list of callbacks, and the mixin adds its own"
JIT = "asserts upstream's JITCheckpointCallback: enable_jit_checkpoint is set to False, SIGTERM is answered without it"
DIVERGED = "trains in float16 without a scaler: the gradients are NaN from the fourth step on: the guard ends the run"
SEALED = "rewrites the weights of a checkpoint that is sealed: a resume refuses it by name"
COUNTED = "compares whole rows of the log, and the mixin adds how much was verified and the seconds of a step"
EXPECTED: dict[str, str] = {
    "TrainerCallbackTest::test_custom_callback_added_at_init": CALLBACKS,
    "TrainerCallbackTest::test_default_callbacks_are_present": CALLBACKS,
    "TrainerCallbackTest::test_printer_callback_when_tqdm_disabled": CALLBACKS,
    "NotebookProgressCallbackTest::test_evaluate_before_training": (
        "asserts upstream's table of a notebook: the mixin puts its own in its place"
    ),
    "JITCheckpointTest::test_integration_with_trainer": JIT,
    "JITCheckpointTest::test_jit_checkpoint_callback_on_epoch_end": JIT,
    "JITCheckpointTest::test_jit_checkpoint_callback_on_pre_optimizer_step": JIT,
    "JITCheckpointTest::test_jit_checkpoint_callback_on_step_begin": JIT,
    "JITCheckpointTest::test_jit_checkpoint_callback_on_step_end": JIT,
    "JITCheckpointTest::test_jit_checkpoint_callback_on_train_end": JIT,
    "JITCheckpointTest::test_jit_checkpoint_callback_set_trainer_enabled": JIT,
    "::test_logging_inf_nan_filter": (
        "asserts what is logged while the loss is NaN in every step: the guard leaves such steps out, and ends the run"
    ),
    "::test_training_arguments_are_left_untouched": (
        "asserts upstream's arguments: the trainer's own copy of them has dataloader_pin_memory off"
    ),
    "TestDPOTrainer::test_train_model_dtype": DIVERGED,
    "TestKTOTrainer::test_train_model_dtype": DIVERGED,
    "::test_resume_training_with_checkpoint": SEALED,
    "::test_resume_training_with_shard_checkpoint": SEALED,
    "::test_can_resume_training": COUNTED,
    "::test_multiple_peft_adapters": COUNTED,
    "::test_resume_batch_order": (
        "its model puts another tensor in a buffer's place in each forward pass: such code declares it"
    ),
}
"""End of a test's id, and why it cannot pass with the mixin in front."""


def pytest_configure() -> None:
    """As a plugin of pytest: puts the mixin in front of the classes, before a test module imports them."""
    if os.environ.get(MIXED) != "1":
        return
    from hf_rocm_tune import VerifiedTransferMixin

    # TRL's first: they are subclasses of transformers' as it is. Each module puts a lazy one in its own place.
    for library in ("trl", "transformers"):
        for name in TRAINERS[library]:
            stock = getattr(importlib.import_module(library), name)
            verified = type(name, (VerifiedTransferMixin, stock), {"__module__": stock.__module__})
            setattr(sys.modules[library], name, verified)


def pytest_runtest_logreport(report: Any) -> None:
    """Notes each outcome; a failure in set-up or tear-down is one of the test."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ[RESULTS]).open("a") as stream:
            stream.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def outcomes(arguments: list[str], *, mixed: bool) -> dict[str, str]:
    """Runs pytest.

    Returns:
        Outcome (passed, failed, skipped) by test.
    """
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results"
        results.touch()
        path = [str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, MIXED: str(int(mixed)), RESULTS: str(results), "PYTHONPATH": os.pathsep.join(path)}
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", here.stem, "-q", "--tb=short", *arguments],
            env=environment,
            check=False,
        )
        found: dict[str, str] = {}
        for test, outcome in map(json.loads, results.read_text().splitlines()):
            found[test] = "failed" if "failed" in (outcome, found.get(test)) else outcome
    return found


def main(arguments: list[str]) -> int:
    """Runs both, prints counts and what is lost."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    command = [*arguments[:cut], *arguments[cut + 1 :]]
    stock, mixed = (outcomes(command, mixed=mixed) for mixed in (False, True))
    passed = [test for test, outcome in stock.items() if outcome == "passed"]
    lost = [test for test in passed if mixed.get(test) != "passed"]
    print(f"{len(stock)} tests, {len(passed)} pass as they are, {len(passed) - len(lost)} of these with the mixin")
    why = {test: next((reason for end, reason in EXPECTED.items() if test.endswith(end)), "") for test in lost}
    for test in lost:
        print(f"lost: {test}{f' (expected: {why[test]})' if why[test] else ''}")
    return int(not passed or not all(why.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
