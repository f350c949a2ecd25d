"""Trainers with a small adapter on a tiny model, on the CPU, for the tests of what stands in front of a trainer."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.models import recompute
from tests.two_ranks import free_port

STEPS = 4
Make = Callable[..., Any]


class VerifiedSFT(VerifiedTransferMixin, SFTTrainer):
    """As a user would define it."""


class VerifiedPlain(VerifiedTransferMixin, Trainer):
    """The mixin in front of the plain trainer."""


def build(
    kind: Any,
    model: Any,
    rows: Any,
    out: Path,
    *,
    config: Any = None,
    lora: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer.

    Args:
        kind: its class.
        model: or its directory, to load it as plain transformers does.
        rows: to train on.
        out: its output directory.
        config: class of its arguments; None: as SFTTrainer or the plain trainer has it.
        lora: options of the adapter.
        ours: further arguments of the trainer.
        options: of its training arguments.
    """
    torch.manual_seed(3)
    config = config or (SFTConfig if issubclass(kind, SFTTrainer) else TrainingArguments)
    of_trl = config is not TrainingArguments
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **({"bf16": False, recompute.SETTING: False} if of_trl else {}),
        **options,
    }
    peft_config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **(lora or {})})
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model)
        model = model if of_trl else get_peft_model(model, peft_config)
    more = {"peft_config": peft_config} if of_trl else {"data_collator": default_data_collator}
    return kind(model=model, args=config(**settings), train_dataset=rows, **{**more, **(ours or {})})


def files(trainer: Any) -> tuple[int, int]:
    """Files that were read back and equal what is live, and tensors and values in files that did not."""
    counted = trainer.transfer_report.to_dict()["files"]
    return counted["verified"], counted["mismatches"]


def names(directory: Path) -> list[str]:
    """Checkpoints and unfinished or set aside directories of an output directory."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("checkpoint", "_", "damaged")))


def two_ranks(work: Callable[[int], None], logs: Path) -> list[str]:
    """Does this in two processes of one CPU job, to which the rank is given; what each has written to stderr."""
    port, children = free_port(), []
    for rank in range(2):
        child = os.fork()  # an import of everything takes longer than a test
        if child == 0:
            _as_rank(rank, port, work, logs)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [(logs / f"rank{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(said)
    return said


def _as_rank(rank: int, port: int, work: Callable[[int], None], logs: Path) -> None:
    """Never returns."""
    code = 1
    try:
        log = os.open(logs / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - it lives as long as the process
        logging.basicConfig(force=True)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")
        AcceleratorState._reset_state(reset_partial_state=True)
        work(rank)
        torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
