"""One process splits a model by layers over several cards, which take turns or run a pipeline of micro-batches.

Every tensor between cards goes through the movers (`models.split`); several micro-batches at once: `pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from typing_extensions import override

from hf_rocm_tune.cards.pipeline import Pipeline, can_pipeline
from hf_rocm_tune.cards.way import CardSettings, Stock, Way
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.models.split import Hops, SplitMover, layer_stack
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.report import BETWEEN_CARDS


class Split(Way):
    """Layers of one model on several cards. The mover must be a `SplitMover`."""

    name: ClassVar[str] = "split"
    flag: ClassVar[str] = "--split_layers"
    mover: SplitMover
    excludes: ClassVar[Mapping[str, str]] = {
        "several processes": "a split runs in one process; start it without --num_processes",
        "FSDP": "choose one of them",
        "DeepSpeed": "choose one of them",
        "--fp16": "its gradient scaler copies between cards; use --bf16",
        "--auto_fit": "it plans for one card; choose the batch with `hf-rocm-tune plan --cards 2`",
        "--activation_offloading": "it serves one card",
        "--torch_compile": "leave it out",
        "--init_lora_weights": "it was never tried; leave it out",
        "--adapter_name_or_path": "it was never tried; merge the adapter into the base first",
        "--attn_implementation flex_attention": "its masks are not tensors; leave it out",
    }

    def __init__(self, settings: CardSettings | None = None) -> None:
        super().__init__(settings)
        self._pipeline: Pipeline | None = None
        self._card_of: dict[int, int] = {}

    @override
    @classmethod
    def wanted(cls, settings: CardSettings) -> bool:
        return settings.split

    @override
    def attach(self, accelerator: Any, mover: Mover) -> None:
        super().attach(accelerator, mover)
        accelerator.clip_grad_norm_ = self._clip

    @override
    def connect(self, trainer: Any, *, one_by_one: bool) -> None:
        self._model = trainer.model
        hops = install_hops(trainer.model, self.mover)
        if self.settings.pipeline and not one_by_one and can_pipeline(trainer):
            self._pipeline = Pipeline(hops, self.mover)

    @override
    def begin_step(self, window: list[Any]) -> None:
        if self._pipeline is not None:
            self._pipeline.begin_step(window)

    @override
    def stepping(self, stock: Stock) -> Stock:
        return stock if self._pipeline is None else partial(self._pipeline.step, stock)

    @override
    def fewer_in_flight(self) -> bool:
        return self._pipeline is not None and self._pipeline.halve()

    @override
    def devices(self, first: torch.device) -> tuple[torch.device, ...]:
        return (first,) if self.mover.logical else tuple(card.device for card in self.mover.cards)

    def _clip(self, *given: Any, **more: Any) -> Tensor:
        cards = {id(each): self.mover.split.card_of(name) for name, each in self._model.named_parameters()}
        return clip_over_cards(self.mover, cards, *given, **more)

    @override
    def describe(self, model: nn.Module) -> dict[str, Any]:
        mover = self.mover
        held = [0] * len(mover.cards)
        for name, tensor in tensors_of(model):
            held[mover.split.card_of(name)] += tensor.numel() * tensor.element_size()
        rows = []
        for number, (layers, card) in enumerate(zip(mover.split.ranges, mover.cards, strict=True)):
            counted = mover.card_reports[number].to_dict()
            row = {"card": number, "device": f"{card.device}{' (logical)' if mover.logical else ''}"}
            row |= {"layers": [layers.start, layers.stop - 1], "model_bytes": held[number]}
            rows.append(row | {name: counted[name] for name in ("weights", BETWEEN_CARDS)})
        split = {
            "layers": mover.split.stack,
            "way": "staged through the host",
            "micro_batches_in_flight": self._pipeline.in_flight if self._pipeline else 1,
            "cards": rows,
        }
        return {**super().describe(model), "split": split}


def install_hops(model: nn.Module, mover: SplitMover) -> Hops:
    """Let tensors pass from one card's layers to another's through the movers, in forward and backward."""
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    _, layers = layer_stack(base, base.config)
    hops = Hops(mover)
    hops.install(base.base_model, layers)
    return hops


@torch.no_grad()
def clip_over_cards(
    mover: SplitMover,
    card_of: Mapping[int, int],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, which would copy the norms to the first card by peer copies.

    The norms of the gradients are summed in the same order, so the result is torch's bit for bit, except that the last
    sum is computed on the host.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    owners = [card_of[id(parameter)] for parameter in trained]
    norms: dict[int, Tensor] = {}
    for card in sorted(set(owners)):
        mine = [index for index, owner in enumerate(owners) if owner == card]
        gradients = [trained[index].grad for index in mine]
        there = torch.stack([torch.linalg.vector_norm(each) for each in gradients if each is not None])
        with mover.cards[card].fetched(there, name=f"gradient_norms.from{card}", stage=BETWEEN_CARDS) as fetched:
            norms |= dict(zip(mine, fetched.host.clone(), strict=True))
    on_host = torch.stack([norms[index] for index in range(len(trained))]) if trained else torch.zeros(1)
    total = torch.linalg.vector_norm(on_host)
    totals = {}
    for card in sorted({0, *owners}):
        name = f"gradient_norm.to{card}"
        totals[card] = mover.cards[card].move(total, name=name, stage=BETWEEN_CARDS)
        mine = [index for index, owner in enumerate(owners) if owner == card]
        clip_grads_with_norm_([trained[index] for index in mine], max_norm, totals[card])
    return totals[0]
