"""A model split over several cards: where its layers lie, how weights get there, and what crosses between cards.

Everything that is no layer lies on the first card: a tied output head is then where its embedding is, and labels and
logits never cross. Each card has a mover of its own; `SplitMover` in front of them hands each call to the one that it
concerns. Without accelerators the cards are logical: everything between them is really copied and verified.
"""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.classes import without_weights
from hf_rocm_tune.models.recompute import keep_hooks_outside
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferReport, TransferSettings, map_tensors, tree_tensors
from hf_rocm_tune.transfer.nested import named_tensors
from hf_rocm_tune.transfer.report import BETWEEN_CARDS
from hf_rocm_tune.transfer.retry import THROUGH_HOST, copy_again
from hf_rocm_tune.transfer.to_host import Fetched, Fetcher

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FLAG = "--split_layers"
AUTO = "auto"


# ---- which layer is on which card --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSplit:
    stack: str  # name of the list of layers
    counts: tuple[int, ...]  # of layers on each card

    @property
    def ranges(self) -> tuple[range, ...]:
        ends = itertools.accumulate(self.counts)
        return tuple(range(end - count, end) for count, end in zip(self.counts, ends, strict=True))

    def card_of_layer(self, layer: int) -> int:
        return next(card for card, layers in enumerate(self.ranges) if layer in layers)

    def card_of(self, name: str) -> int:
        in_stack = re.search(rf"(?:^|\.){re.escape(self.stack)}\.(\d+)(?:\.|$)", name)
        if not in_stack:
            return 0
        return self.card_of_layer(int(in_stack[1]))


def parse(text: str) -> tuple[int, ...] | None:
    """Read ``auto`` or ``N[,N...]``: None, or the number of layers on each card, the last of which may be left out."""
    words = [word.strip() for word in text.split(",")]
    if words == [AUTO]:
        return None
    if not all(re.fullmatch("[0-9]{1,5}", word) and int(word) > 0 for word in words):
        raise UsageError(f"{FLAG} {text!r} is not understood: give {AUTO}, or layers of each card, as 18 or 18,22")
    return tuple(int(word) for word in words)


def counts_for(given: Sequence[int], layers: int) -> tuple[int, ...]:
    """Layers on each card, when the last card's may have been left out."""
    rest = layers - sum(given)
    if rest < 0 or (rest == 0 and len(given) < 2):
        wanted = ",".join(map(str, given))
        raise UsageError(f"{FLAG} {wanted} does not fit a model of {layers} layers: at least one must be left for each")
    return (*given, rest) if rest else tuple(given)


def find_layers(model: nn.Module, text: PreTrainedConfig) -> tuple[str, nn.ModuleList, str] | None:
    """The heaviest list of as many modules as the configuration has layers: its name, and the setting that counts."""
    names = (text.attribute_map.get(key, key) for key in ("num_hidden_layers", "decoder_layers", "num_layers"))
    counts = {key: getattr(text, key, None) for key in names}
    lists = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        for key, count in counts.items():
            if len(module) == count:
                lists.append((name, module, key))

    def size(row: tuple[str, nn.ModuleList, str]) -> int:
        return sum(parameter.numel() for parameter in row[1].parameters())

    return max(lists, key=size, default=None)


def layer_stack(model: nn.Module, config: PreTrainedConfig, flag: str = FLAG) -> tuple[str, nn.ModuleList]:
    stack = find_layers(model, config.get_text_config())
    if stack is None:
        raise UsageError(f"{flag}: cannot identify the decoder layers of {type(model).__name__}; leave the flag out")
    name, layers, _ = stack
    return name, layers


def stack_of(config: Any, flag: str = FLAG, *, trust_remote_code: bool) -> tuple[str, int]:
    """Name of the list of layers and their number, from the configuration alone."""
    try:
        skeleton = without_weights(config, trust_remote_code=trust_remote_code)
    except UsageError as error:
        raise UsageError(f"{flag}: the layers of this model cannot be told: {error}") from error
    name, layers = layer_stack(skeleton, config, flag)
    return name, len(layers)


# ---- one mover in front of those of the cards --------------------------------------------------------------------


class CardReport(TransferReport):
    """The counters of one card, which go into the report of the whole as well."""

    def __init__(self, whole: TransferReport, card: int) -> None:
        super().__init__()
        self._whole = whole
        self._card = card

    def add(self, stage: str, **increments: float) -> None:
        super().add(stage, **increments)
        self._whole.add(stage, **increments)

    def incident(self, row: Mapping[str, Any]) -> None:
        self._whole.incident({**row, "card": self._card})


class SplitMover(Mover):
    """The mover of the first card for batches, and of the card that a name or a device belongs to for all else.

    What the movers of the cards know of tensors, and what was read from files, is one record, its own.
    """

    def __init__(
        self,
        split: LayerSplit,
        devices: Sequence[torch.device],
        *,
        settings: TransferSettings | None = None,
        faults: FaultSpec | None = None,
    ) -> None:
        report = TransferReport()
        self.split = split
        self.card_reports = tuple(CardReport(report, card) for card in range(len(split.counts)))
        self.cards = tuple(
            Mover(device, settings=settings, report=own, faults=faults)
            for device, own in zip(devices, self.card_reports, strict=True)
        )
        super().__init__(devices[0], settings=settings, report=report, backend=self.cards[0]._backend)
        for mover in self.cards:
            mover._registry = self._registry
            mover.loaded = self.loaded
        self.logical = len({mover.device for mover in self.cards}) == 1

    def move(self, tensor: Tensor, *, name: str, **more: Any) -> Tensor:
        """As `Mover.move`, to the card that the name belongs to."""
        return self.cards[self.split.card_of(name)].move(tensor, name=name, **more)

    def serves(self, device: torch.device) -> bool:
        return any(mover.serves(device) for mover in self.cards)

    def move_to(self, device: torch.device, tensor: Tensor, *, name: str, **more: Any) -> Tensor:
        """As `Mover.move_to`, to the card that is this device; among logical cards the name decides."""
        card = self if self.logical else next(mover for mover in self.cards if mover.serves(device))
        return card.move(tensor, name=name, **more)

    def fetched(self, tensor: Tensor, *, name: str, stage: str) -> AbstractContextManager[Fetched]:
        """As `Mover.fetched`, from the card that the tensor is on; from the first among logical cards."""
        card = next((mover for mover in self.cards if mover.serves(tensor.device)), self.cards[0])
        return card.fetched(tensor, name=name, stage=stage)

    @contextmanager
    def copies_as(self, stage: str) -> Iterator[None]:
        """As `Mover.copies_as`, on all cards."""
        with ExitStack() as stack:
            stack.enter_context(super().copies_as(stage))
            for mover in self.cards:
                stack.enter_context(mover.copies_as(stage))
            yield

    @property
    def step(self) -> int | None:
        return self._session.step

    @step.setter
    def step(self, value: int | None) -> None:
        self._session.step = value
        for mover in self.cards:
            mover.step = value

    @property
    def failure(self) -> CorruptionError | None:
        """As `Mover.failure`, of any card."""
        for mover in self.cards:
            failure = mover.failure
            if failure is not None:
                return failure
        return super().failure

    def fault_injection(self) -> dict[str, Any] | None:
        rows = [mover.fault_injection() for mover in self.cards]
        known = [row for row in rows if row is not None]
        if not known:
            return None
        return {**known[0], "injected": sum(row["injected"] for row in known)}

    def close(self) -> None:
        super().close()
        for mover in self.cards:
            mover.close()  # the first one's backend is this one's, too


def device_map(mover: Mover) -> dict[str, torch.device]:
    """What ``from_pretrained`` is told: one device, or the cards of a split."""
    if not isinstance(mover, SplitMover) or mover.logical:
        return {"": mover.device}
    devices = {"": mover.device}
    for layers, card in zip(mover.split.ranges[1:], mover.cards[1:], strict=True):
        for layer in layers:
            devices[f"{mover.split.stack}.{layer}"] = card.device
    return devices


@contextmanager
def without_dispatch() -> Iterator[None]:
    """Within the block Accelerate puts no hooks on a model that would move activations by plain ``.to``."""
    with upstream.replaced("dispatch", lambda stock: lambda *arguments, **keywords: None):
        yield


def set_device_map(model: PreTrainedModel, mover: Mover) -> None:
    """Says on the model where its parts are: transformers' Trainer then neither moves nor replicates it."""
    if isinstance(mover, SplitMover) and not mover.logical:
        model.hf_device_map = device_map(mover)


# ---- what crosses between cards ----------------------------------------------------------------------------------


class _Pass(threading.local):
    def __init__(self) -> None:
        # The first of the two is held, so that no other tensor gets its identity meanwhile.
        self.carried: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.is_under_way = False
        self.flight: Any = None  # `cards.split._Flight`: a micro-batch that crosses while others compute


class Hops:
    """Carries each tensor that a layer on another card needs there, and its gradient back, through the host, verified.

    Before each layer: every tensor among its arguments that is not on the layer's card; after the last layer and the
    backbone, what lies elsewhere. A tensor that several layers of a card are given is carried once in a forward pass.
    The hooks stand outside of activation checkpointing. Not covered: masks in objects of their own
    (``flex_attention``).
    """

    def __init__(self, mover: SplitMover) -> None:
        self._mover = mover
        # Logical cards share a device: there a tensor is on another card than the first when it was carried there or
        # comes out of a module of that card.
        self._elsewhere: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._pass = _Pass()

    def fly(self, flight: Any) -> None:
        """From now on what this thread computes is a flight."""
        self._pass.flight = flight

    def install(self, backbone: nn.Module, layers: nn.ModuleList) -> None:
        backbone.register_forward_pre_hook(self._begin)
        backbone.register_forward_hook(self._end)
        for number, layer in enumerate(layers):
            card = self._mover.split.card_of_layer(number)
            keep_hooks_outside(layer)
            fetch = partial(self._fetch_arguments, f"layers.{number}", card)
            layer.register_forward_pre_hook(fetch, with_kwargs=True)
            if self._mover.logical:
                for module in layer.modules():
                    module.register_forward_hook(partial(self._made_on, card))
        last = f"layers.{len(layers) - 1}.output"
        stage = len(self._mover.cards)
        layers[-1].register_forward_hook(lambda *given: self._home(given[-1], last, stage))

    def _home(self, output: Any, name: str, stage: int) -> Any:
        return self._all_to(0, output, [(name, output)], stage)

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        """A forward pass begins, whatever became of the one before."""
        self._pass.carried.clear()
        self._pass.is_under_way = True

    def _end(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        home = self._home(output, "output", len(self._mover.cards) + 1)
        self._pass.carried.clear()
        self._pass.is_under_way = False
        return home

    def _fetch_arguments(self, name: str, card: int, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        return self._all_to(card, (arguments, keywords), [(name, arguments), (name, keywords)], card)

    def _made_on(self, card: int, module: nn.Module, arguments: Any, output: Any) -> None:
        for _, tensor in named_tensors(output):
            self._elsewhere[tensor.untyped_storage()] = card

    def _card_of(self, tensor: Tensor) -> int | None:
        """Number of the card; None for a tensor on the host of an accelerator, which kernels take as it is."""
        if self._mover.logical:
            return self._elsewhere.get(tensor.untyped_storage(), 0)
        return next((card for card, mover in enumerate(self._mover.cards) if mover.serves(tensor.device)), None)

    def _all_to(self, card: int, tree: Any, named: Sequence[tuple[str, Any]], stage: int) -> Any:
        names: dict[int, str] = {}
        for name, part in named:
            names |= {id(tensor): path for path, tensor in named_tensors(part, name)}
        flight = self._pass.flight
        carried = self._pass.carried
        to_carry: dict[int, Tensor] = {}  # by identity
        for tensor in tree_tensors(tree):
            if self._card_of(tensor) not in (None, card) and (id(tensor), card) not in carried:
                to_carry[id(tensor)] = tensor
        with flight.cross(stage) if flight is not None and to_carry else nullcontext() as fetches:
            moved = {key: self._carry(card, tensor, names[key], fetches) for key, tensor in to_carry.items()}

        def on_card(tensor: Tensor) -> Tensor:
            if id(tensor) in moved:
                return moved[id(tensor)]
            if (id(tensor), card) in carried:
                return carried[id(tensor), card][1]
            return tensor

        return map_tensors(tree, on_card)

    def _carry(self, card: int, tensor: Tensor, name: str, fetches: Any) -> Tensor:
        here = self._card_of(tensor)
        assert here is not None
        crossing = Crossing(self._mover, source=here, target=card, name=name)
        if self._pass.flight is None:
            moved: Tensor = _Hop.apply(tensor, crossing) if tensor.requires_grad else crossing.forward(tensor)
        else:
            moved = crossing.forward(tensor, *fetches(here))
            moved = self._pass.flight.cut(tensor, moved, crossing) if tensor.requires_grad else moved
        if self._mover.logical:
            self._elsewhere[moved.untyped_storage()] = card
        if self._pass.is_under_way:  # and not in a recomputation, after which nobody would let go of it
            self._pass.carried[id(tensor), card] = tensor, moved
        return moved


class Crossing:
    """One way of a tensor through the host, and of its gradient back. A flight has fetchers and marks of its own."""

    def __init__(self, mover: SplitMover, *, source: int, target: int, name: str) -> None:
        self._mover = mover
        self.source = source
        self.target = target
        self._name = name

    def forward(self, tensor: Tensor, fetcher: Fetcher | None = None, mark: Any = None) -> Tensor:
        return self._carry(tensor, self.source, self.target, f"forward.{self._name}", fetcher, mark)

    def backward(self, gradient: Tensor, fetcher: Fetcher | None = None, mark: Any = None) -> Tensor:
        return self._carry(gradient, self.target, self.source, f"backward.{self._name}", fetcher, mark)

    def _carry(self, tensor: Tensor, source: int, target: int, name: str, fetcher: Fetcher | None, mark: Any) -> Tensor:
        """Through the host. Digests of all three places are the same, or it is done again."""
        mover = self._mover
        fetch = mover.cards[source].fetched if fetcher is None else partial(fetcher.fetched, mark=mark)
        moved = tensor

        def cross() -> bool:
            nonlocal moved
            with fetch(tensor, name=f"{name}.from{source}", stage=BETWEEN_CARDS) as fetched:
                moved = mover.cards[target].move(
                    fetched.host, name=f"{name}.to{target}", stage=BETWEEN_CARDS, transient=True
                )
                arrived = mover.cards[target].digest_of(moved)
            return fetched.digest is None or arrived is None or fetched.digest == arrived

        if cross():
            return moved
        ended = copy_again(THROUGH_HOST, lambda *_: cross(), on_corruption=mover.cards[source].settings.on_corruption)
        recovered = ended.outcome == "recovered"
        mover.report.add(BETWEEN_CARDS, mismatches=1, recovered=int(recovered))
        row = {"step": mover.step, "stage": BETWEEN_CARDS, "tensor": name, "kind": "changed on the host"}
        mover.report.incident({**row, "retry": ended.route.name, "outcome": ended.outcome})
        if not recovered:
            raise CorruptionError(
                f"{BETWEEN_CARDS} tensor '{name}' changed in host memory between card {source} and card {target}, and "
                f"{ended.why}: run a memory test of this machine, and the doctor"
            )
        return moved


class _Hop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.crossing.backward(gradients[0]), None
