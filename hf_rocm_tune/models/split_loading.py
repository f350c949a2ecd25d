"""Loading onto several cards: each weight goes to its card, and transformers attaches no copies of its own.

``from_pretrained`` with a device map of several devices lets Accelerate put hooks on the model that move activations
between them by plain ``.to``. They are left out here: `split_hops` carries what has to cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_rocm_tune import upstream
from hf_rocm_tune.models.split_mover import SplitMover

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_rocm_tune.transfer import Mover


def device_map(mover: Mover) -> dict[str, torch.device]:
    """What ``from_pretrained`` is told: one device, or the cards of a split."""
    if isinstance(mover, SplitMover) and not mover.logical:
        return mover.split.device_map([card.device for card in mover.cards])
    return {"": mover.device}


@contextmanager
def without_dispatch() -> Iterator[None]:
    """Within the block transformers leaves a model as it was loaded.

    Raises:
        SeamError: transformers has moved the place.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., None]:
        del stock
        return lambda *arguments, **keywords: None

    with upstream.replaced("dispatch", make):
        yield


def tell_of_devices(model: PreTrainedModel, mover: Mover) -> None:
    """Says on the model where its parts are: transformers' Trainer then neither moves nor replicates it."""
    if isinstance(mover, SplitMover) and not mover.logical:
        model.hf_device_map = device_map(mover)
