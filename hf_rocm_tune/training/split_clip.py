"""Clipping by the norm over the gradients of several cards.

torch's own takes one norm of each gradient, copies these numbers to the first card and the factor back, by peer copies.
Here both go through the movers. The norms are the same numbers in the same order, so the outcome is torch's bit for
bit, up to where the last sum is made: on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from hf_rocm_tune.models.split_mover import SplitMover
from hf_rocm_tune.transfer.report import BETWEEN_CARDS


@torch.no_grad()
def clip_over_cards(
    mover: SplitMover,
    cards: Callable[[], Mapping[int, int]],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``.

    Args:
        mover: of the cards.
        cards: gives the card of each parameter, by identity.
        parameters: of all cards.
        max_norm: of all gradients together; infinite to measure only.
        norm_type: 2 for the Euclidean norm.

    Returns:
        The norm before clipping, shape [], on the first card.

    Raises:
        CorruptionError: a norm could not be brought over right.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    of_each = cards()
    owners = [of_each[id(parameter)] for parameter in trained]
    norms: dict[int, Tensor] = {}
    for card in sorted(set(owners)):
        mine = [index for index, owner in enumerate(owners) if owner == card]
        there = torch.stack([torch.linalg.vector_norm(_gradient(trained[index]), norm_type) for index in mine])
        with mover.cards[card].fetched(there, name=f"gradient_norms.from{card}", stage=BETWEEN_CARDS) as fetched:
            norms |= dict(zip(mine, fetched.host.clone(), strict=True))
    on_host = torch.stack([norms[index] for index in range(len(trained))]) if trained else torch.zeros(1)
    total = torch.linalg.vector_norm(on_host, norm_type)
    totals = {}
    for card in sorted({0, *owners}):
        name = f"gradient_norm.to{card}"
        totals[card] = mover.cards[card].move(total, name=name, stage=BETWEEN_CARDS)
        mine = [index for index, owner in enumerate(owners) if owner == card]
        clip_grads_with_norm_([trained[index] for index in mine], max_norm, totals[card])
    return totals[0]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
