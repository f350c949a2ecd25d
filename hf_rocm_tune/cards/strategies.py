"""The table of parallel strategies; see `strategy.ParallelStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import TrainingArguments

from hf_rocm_tune.cards.ddp import Ddp, Host
from hf_rocm_tune.cards.fsdp import Fsdp
from hf_rocm_tune.cards.split import Split
from hf_rocm_tune.cards.strategy import CardSettings, ParallelStrategy, is_on
from hf_rocm_tune.cards.tensor_parallel import TensorParallel
from hf_rocm_tune.models.split import SplitMover
from hf_rocm_tune.transfer import Mover

STRATEGIES: Mapping[type[ParallelStrategy], Callable[[CardSettings], bool]] = {
    TensorParallel: lambda settings: settings.tensor_parallel,
    Split: lambda settings: settings.split,
    Fsdp: lambda settings: settings.fsdp,
    Host: lambda settings: settings.world_size > 1 and settings.sync.method == "host",
    Ddp: lambda settings: settings.world_size > 1,
    ParallelStrategy: lambda settings: True,
}
"""When each is asked for; the first one is used."""


def choose(settings: CardSettings) -> ParallelStrategy:
    return next(strategy for strategy, is_wanted in STRATEGIES.items() if is_wanted(settings))(settings)


def strategy_of(args: TrainingArguments | None, mover: Mover) -> ParallelStrategy:
    """The strategy of a trainer that was given none, from its arguments, its mover and the launcher's variables."""
    return choose(
        CardSettings(
            world_size=args.world_size if args is not None else 1,
            fsdp=is_on("ACCELERATE_USE_FSDP") or bool(getattr(args, "fsdp", None)),
            split=isinstance(mover, SplitMover),
        )
    )
