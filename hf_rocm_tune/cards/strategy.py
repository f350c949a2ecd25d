"""Parallel strategies: what the trainer and the job ask of one. `ParallelStrategy` itself is one process with one card.

A new strategy is one file with a subclass, and one row in `strategies.STRATEGIES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import str_to_bool
from torch import Tensor, nn

from hf_rocm_tune.cards.averaging import SyncSettings
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.transfer import Mover

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

Stock = Callable[[nn.Module, Any, Any], Tensor]
"""Upstream's ``training_step``: model, inputs, number of label tokens; returns the loss."""


Compare = Callable[[Iterable[tuple[str, Tensor]], str], None]
"""Compares named tensors over the ranks; the text says when."""


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable of the launcher, such as ``ACCELERATE_USE_FSDP``, says yes."""
    return bool(str_to_bool(environ.get(name) or "no"))


@dataclass(frozen=True, kw_only=True)
class CardSettings:
    """What chooses a strategy and configures it; the flags are described in `settings.arguments`."""

    world_size: int = 1
    sync: SyncSettings = field(default_factory=SyncSettings)
    fsdp: bool = False
    tensor_parallel: bool = False
    split: bool = False
    pipeline: bool = False


class ParallelStrategy:
    """One process with one card, and the interface of all parallel strategies. A strategy belongs to one trainer."""

    name: ClassVar[str] = "one"  # in reports
    flag: ClassVar[str] = ""  # how the user asked for it, in messages
    # flags that do not work with it, as `job.refusals.uses` reads them, and what to do instead
    excludes: ClassVar[Mapping[str, str]] = {}
    shares_rows: ClassVar[bool] = False  # all ranks compute with the same rows
    on_host: ClassVar[bool] = False  # the model stays on the host until `place`
    mover: Mover
    state: Any = None  # `sharded.FullState`, gathers what is saved; None where each rank has the whole model

    def __init__(self, settings: CardSettings | None = None) -> None:
        self.settings = settings or CardSettings()

    def refuse(
        self, args: TrainingArguments, model: ModelConfig, uses: Mapping[str, bool], environ: Mapping[str, str]
    ) -> None:
        """Refuse, before the model is loaded, what does not work with this strategy or could not be verified."""
        wrong = [why for applies, why in self._refusals(args, model, environ) if applies]
        wrong += [f"it does not work with {flag}: {why}" for flag, why in self.excludes.items() if uses.get(flag)]
        if wrong:
            raise UsageError(f"{self.flag}: {'; '.join(wrong)}")

    def _refusals(
        self, args: TrainingArguments, model: ModelConfig, environ: Mapping[str, str]
    ) -> list[tuple[bool, str]]:
        return []

    @contextmanager
    def configured(self, args: TrainingArguments) -> Iterator[None]:
        yield

    def attach(self, accelerator: Any, mover: Mover) -> None:
        """Take the new accelerator: replace its clipping and saving where this strategy has its own."""
        self.mover = mover

    def place(self, model: nn.Module) -> None:
        place(model, self.mover)

    def connect(self, trainer: OwningTrainer, *, one_by_one: bool) -> None:
        """The trainer has its model; ``one_by_one``: never compute several micro-batches at once."""

    def start(self, wrapped: nn.Module, optimizer: Any, compare: Compare, *, max_steps: int) -> None:
        """Training begins, with the model ``wrapped`` by upstream: ``compare`` its replicas, and check what the ranks
        exchange from now on. Collective."""

    def begin_step(self, window: list[Any]) -> None:
        """An optimizer step begins with these micro-batches."""

    def stepping(self, stock: Stock) -> Stock:
        return stock

    def collect(self) -> None:
        """After the last backward of a step: what can run out of memory before `check`."""

    def check(self, *, step: int, synced: bool) -> None:
        """Check what the ranks exchanged, before gradients are clipped and used. Collective.

        ``synced``: gradients must have been averaged; not so in an evaluation.
        """

    def fewer_in_flight(self) -> bool:
        """Compute fewer micro-batches at once from now on; False if they already run one by one."""
        return False

    def devices(self, first: torch.device) -> tuple[torch.device, ...]:
        return (first,)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """For the report: ``grad_sync`` and ``split``, as seen by this rank; None where they do not apply."""
        return {"grad_sync": None, "split": None}
