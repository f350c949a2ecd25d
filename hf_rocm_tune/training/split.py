"""A trainer of a model whose layers lie on several cards, in one process.

Upstream trains it as any model that is on one card: the loss is on the first, optimizers keep their state beside each
weight, and gradients that cross are carried by `models.split_hops`. What upstream would copy between cards by itself is
done here instead: the norm over the gradients of all cards. Random states of all cards are kept for a resumed run.

With a plain mover nothing here does anything.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.split import layer_stack
from hf_rocm_tune.models.split_hops import Hops
from hf_rocm_tune.models.split_mover import SplitMover
from hf_rocm_tune.training.split_clip import clip_over_cards
from hf_rocm_tune.transfer.report import BETWEEN_CARDS

if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from hf_rocm_tune.transfer import Mover
else:
    _Base = object


class SplitMixin(_Base):
    """See the module's description; for a trainer that has ``mover``."""

    mover: Mover

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if isinstance(self.mover, SplitMover):
            base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
            _, layers = layer_stack(base, base.config)
            Hops(self.mover).install(base.base_model, layers)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the model is: the trainer's device, or those of all cards."""
        split = self.mover if isinstance(self.mover, SplitMover) and not self.mover.logical else None
        return tuple(card.device for card in split.cards) if split else (self.args.device,)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """As upstream; gradients are then clipped by their norm over all cards."""
        super().create_accelerator_and_postprocess()
        if isinstance(self.mover, SplitMover):
            self.accelerator.clip_grad_norm_ = partial(clip_over_cards, self.mover, self._card_of_each)

    def _card_of_each(self) -> dict[int, int]:
        assert isinstance(self.mover, SplitMover)
        split = self.mover.split
        return {id(parameter): split.card_of(name) for name, parameter in self.model.named_parameters()}

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def name_of_state(self, name: str) -> str:
        """The name of optimizer state with its parameter's in it instead of a number, for whoever has to place it."""
        found = re.match(r"optimizer\.state\.(\d+)\.(.*)", name)
        if found is None:
            return name
        names = {id(parameter): each for each, parameter in self.model.named_parameters()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return f"{names.get(id(parameters[int(found[1])]), found[1])}/{found[2]}"

    # ---- the report -----------------------------------------------------------------------------------------

    def describe_split(self) -> dict[str, Any] | None:
        """For the report: what each card holds, and what crossed; None where nothing is split."""
        if not isinstance(self.mover, SplitMover):
            return None
        mover = self.mover
        held = [0] * mover.split.cards
        for name, tensor in tensors_of(self.model):
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
