"""The table of ways; see `way.Way`."""

from __future__ import annotations

from transformers import TrainingArguments

from hf_rocm_tune.cards.ddp import Ddp, Host
from hf_rocm_tune.cards.fsdp import Fsdp
from hf_rocm_tune.cards.split import Split
from hf_rocm_tune.cards.tensor_parallel import TensorParallel
from hf_rocm_tune.cards.way import CardSettings, Way, is_on
from hf_rocm_tune.models.split import SplitMover
from hf_rocm_tune.transfer import Mover

WAYS: tuple[type[Way], ...] = (TensorParallel, Split, Fsdp, Host, Ddp, Way)
"""The first one that the settings ask for is used."""


def choose(settings: CardSettings) -> Way:
    return next(way for way in WAYS if way.wanted(settings))(settings)


def way_of(args: TrainingArguments | None, mover: Mover) -> Way:
    """The way of a trainer that was given none, from its arguments, its mover and the launcher's variables."""
    return choose(
        CardSettings(
            world_size=1 if args is None else args.world_size,
            fsdp=is_on("ACCELERATE_USE_FSDP") or bool(getattr(args, "fsdp", None)),
            split=isinstance(mover, SplitMover),
        )
    )
