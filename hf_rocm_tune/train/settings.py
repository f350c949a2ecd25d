"""What a trainer with `VerifiedTransferMixin` is given beside upstream's arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hf_rocm_tune.models.adapter import LearningRates

if TYPE_CHECKING:
    from hf_rocm_tune.train.arithmetic import Mode
    from hf_rocm_tune.train.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How steps are computed and checked. Each field may also be given to the trainer as a keyword of its own.

    Attributes:
        sentinel_every: number of steps in which each frozen tensor is checked once; 0: never. All are checked before a
            save.
        check_arithmetic: which products with frozen weights are checked, see :mod:`~hf_rocm_tune.train.arithmetic`.
        prefetch_batches: batches that may be in transfer beyond the one in use; 0: no overlap.
        consent_unverified: train although ``verify="full"`` did not reach every byte.
        recompute_layers: with activation checkpointing: how many layers, from the first, are recomputed fully, and how
            many after them except matrix products and attention; None: all fully. See `models.recompute`.
        one_pass_loss: compute the gradient of TRL's fused head in forward where the head is not trained, see
            `models.loss`; only for losses without a gradient of the entropy, as `SFTTrainer`'s.
        on_oom: ``step_down``: a step that runs out of memory is repeated with smaller micro-batches, see
            :mod:`~hf_rocm_tune.train.oom`; ``stop``: it ends the run.
        max_skipped_steps: how many of the last 100 steps may be skipped because they are not finite.
        skip_steps: optimizer steps (from 1) to leave out, the same on all ranks: they are counted and consume their
            batches, but nothing is computed.
        plain_lora: save the result of an adapter that was initialised from the weights (PiSSA, OLoRA) as plain LoRA
            for the original weights.
        rates: learning rates of parameters that differ from the optimizer's; see `LearningRates`.
        run_id: written into every manifest.
    """

    sentinel_every: int = 50
    check_arithmetic: Mode = "sampled"
    prefetch_batches: int = 1
    consent_unverified: bool = False
    recompute_layers: tuple[int, int] | None = None
    one_pass_loss: bool = False
    on_oom: Literal["step_down", "stop"] = "step_down"
    max_skipped_steps: int = 5
    skip_steps: Collection[int] = ()
    plain_lora: bool = False
    rates: LearningRates = field(default_factory=LearningRates)
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class JobServices:
    """What a job of the command line does for its trainer. Fields may be keywords of their own, as `TrainerSettings`'.

    Attributes:
        publisher: uploads, on the first rank; required for ``push_to_hub``.
        write_readme: writes ``README.md`` into each saved directory, on rank 0, after its tensors were compared and
            before its manifest is written; None: upstream's.
        write_result: writes what else belongs to a result that is being saved, on all ranks, and returns the names of
            its files; None: ``transfer_report.json``.
        telemetry: of this process's card, for the logs.
        listener: receives each heartbeat, in addition to the supervisor.
    """

    publisher: Any = None
    write_readme: Callable[[Path], None] | None = None
    write_result: Callable[[Path], Iterable[str]] | None = None
    telemetry: Telemetry | None = None
    listener: Callable[..., None] | None = None


Given = TypeVar("Given", TrainerSettings, JobServices)


def with_keywords(given: Given, keywords: dict[str, Any]) -> Given:
    """The same with the fields that are among ``keywords``, which are taken out of it."""
    own = {}
    for setting in fields(given):
        if setting.name in keywords:
            own[setting.name] = keywords.pop(setting.name)
    return replace(given, **own)
