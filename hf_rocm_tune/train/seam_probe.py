"""Tests with a tiny training run, in a child process, that upstream still calls our overrides and replaced functions.

Unchanged names and parameters do not show that: a library may keep a method and no longer call it. So if a library is
newer than the tested version, a model of a few kilobytes is loaded, trained, evaluated, saved, and resumed on the host
before the user's run, and every override and every replaced function must be called.

Not covered: functions called only with several ranks, several cards or a quantised model (`NOT_REACHED`).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import SeamError

NOT_REACHED = frozenset({"dispatch", "send_to_device", "fsdp2_load", "push_to_hub", "create_model_card"})
"""Called with several cards, ``dispatch_batches``, FSDP2, and by the caller after training."""

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "HF_ROCM_TUNE_")
_SECONDS = 300


def require(newer: Sequence[str], say: Callable[[str], None]) -> None:
    """Test the installed libraries, of which ``newer`` are newer than the tested versions.

    Raises:
        SeamError: verification does not work with them.
    """
    known = ", ".join(f"{name} {version}" for name, version in upstream.TESTED.items())
    say(f"{', '.join(newer)}: newer than the tested versions ({known}); a tiny training run tests the verification")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-m", __name__]  # -P: nothing is imported from the working directory
    try:
        done = subprocess.run(
            command, env={**kept, **hidden}, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SeamError(f"a tiny training run with {', '.join(newer)} did not end: install {known}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise SeamError(f"cannot verify with {', '.join(newer)}: {why}; install {known}")


def not_called() -> set[str]:
    """Names of overrides and replaced functions that a tiny training run does not call.

    Replaces functions of the libraries: only for a process of its own.
    """
    from transformers import Trainer

    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

    class Probe(VerifiedTransferMixin, Trainer):
        """The mixin in front of the plain trainer."""

    called: set[str] = set()
    wanted = set()
    for ours, name, _ in list(upstream.overrides(Probe)):
        setattr(ours, name, _counted(vars(ours)[name], name, called))
        wanted.add(name)
    wanted |= {row.name for row in upstream.SEAMS if row.patched}
    for replace in (upstream.replaced, upstream.replace_for_good):
        setattr(upstream, replace.__name__, functools.partial(_replacing, replace, called))
    with tempfile.TemporaryDirectory() as scratch:
        whole = _train(Probe, Path(scratch), "whole", None)
        resumed = _train(Probe, Path(scratch), "resumed", str(Path(scratch, "whole", "checkpoint-2")))
    if whole != resumed:
        raise SeamError("a resumed run does not give the weights of an uninterrupted one")
    return wanted - called - NOT_REACHED


def _train(kind: Any, scratch: Path, name: str, checkpoint: str | None) -> dict[str, str]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

    from hf_rocm_tune.models.factory import ModelSource, load_model
    from hf_rocm_tune.transfer import Mover, digest

    set_seed(3)
    if not (scratch / "model").exists():
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(scratch / "model")
    args = TrainingArguments(
        output_dir=str(scratch / name), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=4, push_to_hub=True,
    )  # fmt: skip
    rows = [{"input_ids": [1, 2, 3, 4 + number], "labels": [1, 2, 3, 4 + number]} for number in range(16)]
    with Mover(torch.device("cpu")) as mover:
        model, _ = load_model(ModelSource(name=str(scratch / "model")), mover)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        trainer = kind(
            model=model, args=args, train_dataset=rows, eval_dataset=rows[:4], mover=mover, publisher=_NullPublisher()
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        batches = trainer.transfer_report.to_dict()["batches"]
        if not 0 < batches["bytes"] == batches["verified_bytes"]:
            raise SeamError("batches bypass the mover")
        return {each: digest(value.detach()).hex() for each, value in model.named_parameters() if value.requires_grad}


def _replacing(replace: Any, called: set[str], name: str, make: Callable[..., Any]) -> Any:
    return replace(name, lambda stock: _counted(make(stock), name, called))


def _counted(function: Callable[..., Any], name: str, called: set[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        called.add(name)
        return function(*arguments, **keywords)

    return counting


class _NullPublisher:
    """A publisher that uploads nothing."""

    def checkpoint(self, directory: Path) -> None:
        """Nothing."""

    def result(self, directory: Path) -> None:
        """Nothing."""


def main() -> int:
    missing = sorted(not_called())
    if missing:
        print(f"upstream no longer calls {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
