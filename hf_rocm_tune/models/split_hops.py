"""The ways between the cards of a split model: each tensor that a layer on another card needs is carried there.

A carried tensor goes from its card to the host and from there to the other card, verified both ways, before anything
uses it; its gradient goes back the same way. Nothing is left to peer copies.

What is carried follows from where things are: before each layer, every tensor among its arguments that is not on the
layer's card (activations, masks, position embeddings); after the last layer, what it gives; and after the backbone,
whatever of its outputs lies elsewhere (router logits). A tensor that several layers of a card are given is carried
once in a forward pass. The hooks stand outside of activation checkpointing, so nothing is carried again when a layer is
recomputed; where a model recomputes whole modules itself, it is carried again, verified again.

Not covered: attention that is given masks in objects of its own (``flex_attention``), and caches for generation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.split_mover import SplitMover
from hf_rocm_tune.transfer import Mover, map_tensors
from hf_rocm_tune.transfer.report import BETWEEN_CARDS
from hf_rocm_tune.transfer.tree import named_tensors

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_TRIES = 3


class Hops:
    """The ways between the cards of one model.

    Args:
        mover: of the cards.
    """

    def __init__(self, mover: SplitMover) -> None:
        self._mover = mover
        self._places = _Places(mover)
        self._carried: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._in_forward = False

    def install(self, backbone: nn.Module, layers: nn.ModuleList) -> list[RemovableHandle]:
        """Puts the hooks on a model whose layers are placed.

        Args:
            backbone: the module that calls the layers.
            layers: all of them, in order.

        Returns:
            The hooks, for whoever wants to take them off.
        """
        split = self._mover.split
        hooks = [backbone.register_forward_pre_hook(self._begin), backbone.register_forward_hook(self._come_home)]
        for number, layer in enumerate(layers):
            card = split.card_of_layer(number)
            hooks.append(layer.register_forward_pre_hook(self._fetch_arguments(number, card), with_kwargs=True))
            if self._mover.logical:
                hooks += [module.register_forward_hook(self._places.made_on(card)) for module in layer.modules()]
        hooks.append(layers[-1].register_forward_hook(self._bring_home(f"layers.{len(layers) - 1}.output")))
        return hooks

    # ---- the hooks ------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        """A forward pass begins, whatever became of the one before."""
        del module, arguments
        self._carried.clear()
        self._in_forward = True

    def _come_home(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        del module, arguments
        home = self._all_to(0, output, "output")
        self._carried.clear()
        self._in_forward = False
        return home

    def _bring_home(self, name: str) -> Callable[..., Any]:
        def after(module: nn.Module, arguments: Any, output: Any) -> Any:
            del module, arguments
            return self._all_to(0, output, name)

        return after

    def _fetch_arguments(self, number: int, card: int) -> Callable[..., Any]:
        def before(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            del module
            return self._all_to(card, arguments, f"layers.{number}"), self._all_to(card, keywords, f"layers.{number}")

        return before

    # ---- carrying -------------------------------------------------------------------------------------------

    def _all_to(self, card: int, tree: Any, name: str) -> Any:
        """The same structure with every tensor on that card."""
        names = {id(tensor): path for path, tensor in named_tensors(tree, name)}
        return map_tensors(tree, lambda tensor: self._to(card, tensor, names[id(tensor)]))

    def _to(self, card: int, tensor: Tensor, name: str) -> Tensor:
        here = self._places.card_of(tensor)
        if here is None or here == card:
            return tensor
        key = (id(tensor), card)
        if key in self._carried:
            return self._carried[key][1]
        way = Way(self._mover, source=here, target=card, name=name)
        moved: Tensor = _Hop.apply(tensor, way) if tensor.requires_grad else way.forward(tensor)
        self._places.remember(moved, card)
        if self._in_forward:  # and not in a recomputation, after which nobody would let go of it
            # The first of the two is held, so that no other tensor gets its identity meanwhile.
            self._carried[key] = (tensor, moved)
        return moved


class Way:
    """From one card to another, and back for gradients.

    Args:
        mover: of the cards.
        source, target: numbers of the cards.
        name: what is carried, for incidents and the patterns of faults: ``forward.layers.3.0.from0`` and ``...to1`` are
            the two legs of the first argument of layer 3, ``backward.layers.3.0.from1`` those of its gradient.
    """

    def __init__(self, mover: SplitMover, *, source: int, target: int, name: str) -> None:
        self._mover, self._source, self._target, self._name = mover, source, target, name

    def forward(self, tensor: Tensor) -> Tensor:
        """The tensor on the target card."""
        return self._carry(tensor, self._source, self._target, f"forward.{self._name}")

    def backward(self, gradient: Tensor) -> Tensor:
        """A gradient on the source card."""
        return self._carry(gradient, self._target, self._source, f"backward.{self._name}")

    def _carry(self, tensor: Tensor, source: int, target: int, name: str) -> Tensor:
        """Through the host. Digests of all three places are the same, or it is done again."""
        mover = self._mover
        for _ in range(_TRIES):
            with mover.cards[source].fetched(tensor, name=f"{name}.from{source}", stage=BETWEEN_CARDS) as fetched:
                moved = mover.cards[target].move(fetched.host, name=f"{name}.to{target}", stage=BETWEEN_CARDS)
                arrived = mover.cards[target].digest_of(moved)
            if fetched.digest is None or arrived is None or fetched.digest == arrived:
                return moved
            mover.report.add(BETWEEN_CARDS, mismatches=1, recovered=1)
            mover.report.incident(
                {"step": mover.step, "stage": BETWEEN_CARDS, "tensor": name, "kind": "changed on the host"}
                | {"outcome": "sent again"}
            )
        raise CorruptionError(
            f"{BETWEEN_CARDS} tensor '{name}' changed in host memory between card {source} and card {target}, "
            f"{_TRIES} times: run a memory test of this machine, and the doctor"
        )


class _Hop(torch.autograd.Function):
    """The identity between two cards."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.way.backward(gradients[0]), None


class _Places:
    """On which card a tensor is.

    On accelerators its device says so. Logical cards share a device: there a tensor is on another card than the first
    when it was carried there or comes out of a module of that card, which is remembered by its storage.
    """

    def __init__(self, mover: SplitMover) -> None:
        self._mover = mover
        self._elsewhere: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def card_of(self, tensor: Tensor) -> int | None:
        """Number of the card; None for a tensor on the host of an accelerator, which kernels take as it is."""
        if self._mover.logical:
            return self._elsewhere.get(tensor.untyped_storage(), 0)
        cards: list[Mover] = list(self._mover.cards)
        return next((card for card, mover in enumerate(cards) if mover.serves(tensor.device)), None)

    def remember(self, tensor: Tensor, card: int) -> None:
        """It is on this card now."""
        if self._mover.logical:
            self._elsewhere[tensor.untyped_storage()] = card

    def made_on(self, card: int) -> Callable[..., None]:
        """A hook: what a module gives is on the module's card."""

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            del module, arguments
            for _, tensor in named_tensors(output):
                self.remember(tensor, card)

        return after
