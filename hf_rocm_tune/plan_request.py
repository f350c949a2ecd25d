"""What the planner is asked: the settings of a training job as far as memory depends on them. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan_optimizers import DEFAULT as DEFAULT_OPTIMIZER
from hf_rocm_tune.memory.plan_optimizers import optimizer

METHODS = ("lora", "qlora", "full")
PLATFORMS = ("hip", "cuda", "cpu")
DTYPES = ("bfloat16", "float16", "float32")
ATTENTIONS = ("sdpa", "eager")
ALL_LINEAR = "all-linear"
USUAL_DROPOUT = 0.05


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A question to the planner.

    Args:
        model: directory or Hub id; only the configuration is read. Empty where a configuration is handed over.
        revision, trust_remote_code: as for loading.
        methods: of ``lora``, ``qlora`` and ``full``, those to choose from.
        length: tokens of the longest sequence.
        effective_batch: sequences to one optimizer step, over all cards.
        cards: that hold the whole model each.
        packing: several sequences in a row.
        rank, alpha, dropout, targets, modules_to_save, dora, rslora: of the adapters. Without a ``dropout`` it is 0.05,
            and 0 where PEFT adapts the model only so.
        nested: the constants of 4-bit weights are quantised too.
        dtype: of weights that are not quantised; None: ``bfloat16`` below adapters, ``float32`` when all are trained.
        autocast: mixed precision in bfloat16.
        attention: ``sdpa`` or ``eager``.
        optim: optimizer, by transformers' name.
        platform: whose kernels count.
        workers: data loader workers, for the host's memory.
        micro_batch: only this one, instead of all that reach the effective batch.
        checkpointing: only with (True) or without (False).

    Raises:
        UsageError: a value that cannot be, naming it.
    """

    model: str = ""
    revision: str = "main"
    trust_remote_code: bool = False
    methods: tuple[str, ...] = ("lora", "qlora")
    length: int = 2048
    effective_batch: int = 16
    cards: int = 1
    packing: bool = False
    rank: int = 16
    alpha: int = 32
    dropout: float | None = None
    targets: str | tuple[str, ...] = ALL_LINEAR
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    rslora: bool = False
    nested: bool = True
    dtype: str | None = None
    autocast: bool = True
    attention: str = "sdpa"
    optim: str = DEFAULT_OPTIMIZER
    platform: str = "hip"
    workers: int = 0
    micro_batch: int | None = None
    checkpointing: bool | None = None

    def __post_init__(self) -> None:
        faults = [
            f"--{name} must be {low} or more, got {value}"
            for name, value, low in (
                ("seq", self.length, 2),
                ("effective_batch", self.effective_batch, 1),
                ("cards", self.cards, 1),
                ("rank", self.rank, 1),
            )
            if value < low
        ]
        if not faults and self.effective_batch % self.cards:
            faults.append(f"--effective_batch {self.effective_batch} cannot be shared by {self.cards} cards evenly")
        if self.micro_batch is not None and (self.micro_batch < 1 or self.each % self.micro_batch):
            faults.append(f"a micro-batch of {self.micro_batch} does not divide the {self.each} sequences of a card")
        if not 0 <= self.adapter_dropout < 1:
            faults.append(f"--dropout must be 0 or more and below 1, got {self.dropout}")
        choices: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
            ("method", self.methods, METHODS),
            ("platform", (self.platform,), PLATFORMS),
            ("dtype", (self.dtype or DTYPES[0],), DTYPES),
            ("attention", (self.attention,), ATTENTIONS),
        ]
        for name, given, known in choices:
            faults += [f"--{name} must be one of {', '.join(known)}, got {each}" for each in given if each not in known]
        if faults:
            raise UsageError("; ".join(faults))
        optimizer(self.optim)

    @property
    def each(self) -> int:
        """Sequences of one optimizer step on one card."""
        return self.effective_batch // self.cards

    @property
    def adapter_dropout(self) -> float:
        """The dropout in front of the adapters."""
        return USUAL_DROPOUT if self.dropout is None else self.dropout

    def dtype_of(self, method: str) -> str:
        """The dtype of weights that are not quantised."""
        return self.dtype or ("float32" if method == "full" else "bfloat16")


def as_targets(words: Sequence[str]) -> str | tuple[str, ...]:
    """Module names as a tuple; ``all-linear`` or a regular expression, which stand alone, as a string."""
    alone = len(words) == 1 and not re.fullmatch(r"[\w.]+", words[0])
    return words[0] if alone else tuple(words)


def from_training(settings: Mapping[str, Any], *, cards: int = 1, platform: str = "hip") -> PlanRequest:
    """The question that a training job asks.

    Args:
        settings: by the names of its flags, as ``arguments.Arguments.resolved()`` gives them.
        cards: processes of the job.
        platform: ``hip``, ``cuda`` or ``cpu``.

    Returns:
        A request whose effective batch is the job's micro-batch times accumulation times cards.

    Raises:
        UsageError: the planner does not know something that the job uses.
    """
    if settings.get("load_in_8bit"):
        raise UsageError("--load_in_8bit is not known to the planner: choose the micro-batch yourself")
    if settings.get("max_length") is None:
        raise UsageError("the planner needs --max_length: without a limit the longest row decides")
    if settings.get("label_smoothing_factor"):
        raise UsageError("--label_smoothing_factor builds all logits, which the planner does not count")
    lora = bool(settings.get("use_peft"))
    targets = settings.get("lora_target_modules") or ALL_LINEAR
    return PlanRequest(
        model=str(settings["model_name_or_path"]),
        revision=str(settings.get("model_revision") or "main"),
        trust_remote_code=bool(settings.get("trust_remote_code")),
        methods=("full",) if not lora else ("qlora",) if settings.get("load_in_4bit") else ("lora",),
        length=int(settings["max_length"]),
        effective_batch=cards
        * int(settings["per_device_train_batch_size"])
        * int(settings["gradient_accumulation_steps"]),
        cards=cards,
        packing=bool(settings.get("packing")),
        rank=int(settings["lora_r"]),
        alpha=math.ceil(settings["lora_alpha"]),
        dropout=float(settings["lora_dropout"]),
        targets=as_targets([targets] if isinstance(targets, str) else targets),
        modules_to_save=tuple(settings.get("lora_modules_to_save") or ()),
        dora=bool(settings.get("use_dora")),
        rslora=bool(settings.get("use_rslora")),
        nested=bool(settings.get("use_bnb_nested_quant")),
        dtype=_dtype(settings.get("dtype")),
        autocast=bool(settings.get("bf16")),
        attention="eager" if settings.get("attn_implementation") == "eager" else "sdpa",
        optim=str(settings["optim"]),
        platform=platform,
        workers=int(settings.get("dataloader_num_workers") or 0),
    )


def _dtype(given: Any) -> str | None:
    """TRL's ``auto`` and None load what the file has; nearly all files have bfloat16."""
    return "bfloat16" if given in ("auto", None) else str(given)
