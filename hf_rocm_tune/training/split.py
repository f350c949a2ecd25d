"""Training a model whose layers lie on several cards, in one process.

Upstream trains it as any model that is on one card: the loss is on the first, optimizers keep their state beside each
weight, and gradients that cross are carried by `models.split_hops`. What upstream would copy between cards by itself is
done here instead: the norm over the gradients of all cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.split import layer_stack
from hf_rocm_tune.models.split_hops import Hops
from hf_rocm_tune.models.split_mover import SplitMover
from hf_rocm_tune.transfer.report import BETWEEN_CARDS


def carry_between_cards(model: nn.Module, mover: SplitMover) -> None:
    """From now on what goes from one card's layers to another's goes through the movers, forward and backward."""
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    _, layers = layer_stack(base, base.config)
    Hops(mover).install(base.base_model, layers)


def cards_of_parameters(model: nn.Module, mover: SplitMover) -> dict[int, int]:
    """Number of the card of each parameter, by its identity."""
    return {id(parameter): mover.split.card_of(name) for name, parameter in model.named_parameters()}


@torch.no_grad()
def clip_over_cards(
    mover: SplitMover,
    card_of: Mapping[int, int],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, which would bring the norms to the first card by peer copies.

    The norms of the gradients are the same numbers in the same order, so the outcome is torch's bit for bit, up to
    where the last sum is made: on the host.

    Args:
        mover: of the cards.
        card_of: number of the card of each parameter, by its identity.
        parameters: of all cards.
        max_norm: of all gradients together; infinite to measure only.
        norm_type: 2 for the Euclidean norm.

    Returns:
        The norm before clipping, shape [], on the first card.

    Raises:
        CorruptionError: a norm could not be brought over right.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    owners = [card_of[id(parameter)] for parameter in trained]
    norms: dict[int, Tensor] = {}
    for card in sorted(set(owners)):
        mine = [index for index, owner in enumerate(owners) if owner == card]
        gradients = [trained[index].grad for index in mine]
        there = torch.stack([torch.linalg.vector_norm(each, norm_type) for each in gradients if each is not None])
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


def describe_split(mover: SplitMover, model: nn.Module) -> dict[str, Any]:
    """For the report: what each card holds, and what crossed."""
    held = [0] * mover.split.cards
    for name, tensor in tensors_of(model):
        held[mover.split.card_of(name)] += tensor.numel() * tensor.element_size()
    rows = []
    for stage, card, report in zip(mover.split.stages, mover.cards, mover.card_reports, strict=True):
        counted = report.to_dict()
        rows.append(
            {
                "card": stage.card,
                "device": f"{card.device}{' (logical)' if mover.logical else ''}",
                "layers": [stage.layers.start, stage.layers.stop - 1],
                "model_bytes": held[stage.card],
                "weights": counted["weights"],
                BETWEEN_CARDS: counted[BETWEEN_CARDS],
            }
        )
    return {"layers": mover.split.stack, "way": "staged through the host", "cards": rows}
